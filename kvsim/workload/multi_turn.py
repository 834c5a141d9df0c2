"""Conversations as vLLM's multi-turn benchmark takes them: one JSON list, closed loop, texts instead of lengths.

A conversation is an object with an `id` of its own and `messages`: objects with `role` ("user" and "assistant" in turn,
beginning with "user") and `content`. ShareGPT in this form is what that benchmark's convert_sharegpt_to_openai.py
writes. Source: github.com/vllm-project/vllm, benchmarks/multi_turn.

How long
- A model's tokenizer would say. Without one a rule does: a token is 4 bytes of the conversation's UTF-8 text, which is
  its messages one after the other, without a chat template. "About 4", on average and in practice, is what tiktoken's
  README states (github.com/openai/tiktoken); code and other scripts differ.

What starts when
- A message of the user's is a request, whose prompt is everything up to it, and whose answer is the next message. Where
  the last one has no answer, it generates nothing.
- All conversations start at 0, each next turn at once after the answer: the file has no times. Turns are in order of
  their number, conversations of one turn in order of the file.

Which content is whose
- Content is text: conversations that begin with the same text share it, in whole pieces of 16 tokens. The pieces of an
  answer are shared together or not at all.
- Answers are sent back as they were given, so a conversation's next prompt holds them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, count, islice, pairwise
from pathlib import Path

import numpy as np
import orjson

from kvcore.errors import MAX_SHOWN_CHARACTERS
from kvcore.units import div_ceil
from kvsim.workload import files
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_TOKENS, Row, trace_error
from kvsim.workload.prefix_tree import Ids, PrefixTree
from kvsim.workload.trace import Trace

FORMAT = "multi-turn"
VERSION = 2
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

GRANULE_LEN = 16
BYTES_PER_TOKEN = 4
GRANULE_BYTES = GRANULE_LEN * BYTES_PER_TOKEN
SIGN = frozenset({"messages"})
"""Names that only this format has at the beginning of a file."""
ROLES = ("user", "assistant")


def read(path: Path) -> Trace:
    """The trace in `path` (JSON, plain or gzip); raises TraceError at the first message that breaks the format."""
    tree = PrefixTree(count())
    conversations = [_conversation(row, tree) for row in _rows(path)]
    builder = TraceBuilder()
    last: list[int | None] = [None] * len(conversations)
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        for session, conversation in enumerate(conversations):
            if turn < len(conversation.turns):
                builder.start(0, last[session], 0, session)
                last[session] = len(builder) - 1
                conversation.hold(builder, turn)
    return builder.build(path.name, FORMAT, GRANULE_LEN)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Runs of the whole text as (stream, end token), and (prompt, prompt and answer) of each turn, in tokens."""

    runs: list[tuple[int, int]]
    turns: list[tuple[int, int]]

    def hold(self, builder: TraceBuilder, turn: int) -> None:
        """The content of the request just started."""
        input_len, total_len = self.turns[turn]
        segments = _until(self.runs, input_len)
        output_stream = _until(self.runs, total_len)[-1][0]
        builder.hold(input_len, total_len - input_len, segments, output_stream, input_len // GRANULE_LEN)


def _until(runs: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The runs of the first tokens."""
    num_whole = sum(1 for _, run_end in runs if run_end < end)
    return [*runs[:num_whole], (runs[num_whole][0], end)]


def _rows(path: Path) -> list[Row]:
    """The conversations; at least one."""
    where, text = f"{path}:1", files.content(path)
    try:
        file = Row(where, {"file": orjson.loads(text)})
    except orjson.JSONDecodeError as error:
        found = repr(text[:MAX_SHOWN_CHARACTERS])
        raise trace_error(where, "JSON", found, f"one list of conversations ({error.msg})") from None
    rows = file.rows("file", f"{path}:conversation ")
    if not rows:
        raise file.error("file", "at least one conversation")
    known: set[object] = set()
    for row in rows:
        row.only(("id", "messages"))
        if type(row.values.get("id")) is not str or row.values["id"] in known:
            raise row.error("id", "a text that no conversation before it has")
        known.add(row.values["id"])
    return rows


def _conversation(row: Row, tree: PrefixTree) -> _Conversation:
    messages = row.rows("messages", f"{row.where}, message ")
    if not messages:
        raise row.error("messages", "at least one message")
    texts = [_text(message, ROLES[index % 2]) for index, message in enumerate(messages)]
    if not texts[0]:
        raise messages[0].error("content", "a text that is not empty, as a prompt has at least 1 token")
    ends = [div_ceil(end, BYTES_PER_TOKEN) for end in accumulate(map(len, texts))]
    if ends[-1] >= MAX_TOKENS:
        raise row.error("messages", "less than 2**32 tokens")
    answers = islice([*ends, ends[-1]], 1, None, 2)
    turns = list(zip(ends[::2], answers, strict=False))
    runs = [(stream, end * GRANULE_LEN) for stream, end in tree.follow(_ids(b"".join(texts), turns))]
    return _Conversation(runs, turns)


def _text(message: Row, role: str) -> bytes:
    message.only(("role", "content"))
    message.choice("role", (role,))
    content = message.values.get("content")
    if type(content) is not str:
        raise message.error("content", "a text")
    return content.encode()


def _ids(text: bytes, turns: list[tuple[int, int]]) -> Ids:
    """One id for each piece of text, the last of which may be shorter; those of an answer tell of all its pieces."""
    num_pieces = div_ceil(len(text), GRANULE_BYTES)
    begins = np.ones(num_pieces, dtype=np.bool_)
    for input_len, total_len in turns:
        begins[input_len // GRANULE_LEN + 1 : div_ceil(total_len, GRANULE_LEN)] = False
    bounds = [*(np.flatnonzero(begins) * GRANULE_BYTES).tolist(), len(text)]
    digests = b"".join(digest for start, end in pairwise(bounds) for digest in _digests(text[start:end]))
    return np.frombuffer(digests, dtype=np.uint64)


def _digests(text: bytes) -> Iterator[bytes]:
    """One of 8 bytes for each piece of a text that is shared as a whole."""
    key = blake2b(text, digest_size=8).digest()
    for start in range(0, len(text), GRANULE_BYTES):
        yield blake2b(text[start : start + GRANULE_BYTES], digest_size=8, key=key).digest()
