"""Segments name blocks as a token-by-token reading of the prompts does, for any block size."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from hypothesis import find, given
from hypothesis import strategies as st

from kvsim.workload.builder import TraceBuilder
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.trace import Trace

GRANULE_LEN = 3


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt's granules, tokens of the last one (0: it is full), tokens named by no id, output tokens."""

    ids: tuple[int, ...]
    last_len: int
    tail_len: int
    output_len: int

    @property
    def named_len(self) -> int:
        return len(self.ids) * GRANULE_LEN - (GRANULE_LEN - self.last_len if self.last_len else 0)

    @property
    def input_len(self) -> int:
        return self.named_len + self.tail_len


def is_sound(prompt: Prompt) -> bool:
    """A format either names a partial last granule or leaves a tail, not both; and a prompt is not empty."""
    return prompt.input_len > 0 and not (prompt.last_len and (prompt.tail_len or not prompt.ids))


prompts = st.builds(
    Prompt,
    ids=st.lists(st.integers(0, 1), max_size=6).map(tuple),
    last_len=st.integers(0, GRANULE_LEN - 1),
    tail_len=st.integers(0, GRANULE_LEN - 1),
    output_len=st.integers(0, 8),
).filter(is_sound)
traces = st.lists(prompts, min_size=1, max_size=7)


def built(rows: list[Prompt]) -> Trace:
    streams = count()
    tree, builder = PrefixTree(streams), TraceBuilder()
    for index, prompt in enumerate(rows):
        own = next(streams)
        ids = np.array(prompt.ids, dtype=np.uint64)
        segments = [(stream, min(end * GRANULE_LEN, prompt.named_len)) for stream, end in tree.follow(ids)]
        if prompt.tail_len:
            segments.append((own, prompt.input_len))
        builder.start(0, None, 0, index)
        builder.hold(prompt.input_len, prompt.output_len, segments, own, num_granules=len(ids))
    return builder.build("test", "test", GRANULE_LEN)


def token_names(index: int, prompt: Prompt) -> list[object]:
    """Per token, what names it together with everything before it: all ids so far, or the request itself."""
    named = [prompt.ids[: token // GRANULE_LEN + 1] for token in range(prompt.named_len)]
    return [*named, *[index] * (prompt.tail_len + prompt.output_len)]


def block_names(trace: Trace, request: int, block_size: int) -> list[object]:
    """Per block, (stream, block), after checking that the segments cover the blocks without gap or repetition."""
    segments = trace.segments(request, block_size)
    ends = [0, *(end for _, _, end in segments)]
    assert [start for _, start, _ in segments] == ends[:-1]
    assert all(start < end for _, start, end in segments)
    streams = [stream for stream, _, _ in segments]
    assert len(set(streams)) == len(streams)
    return [(stream, block) for stream, start, end in segments for block in range(start, end)]


Naming = Callable[[Trace, int, int], list[object]]


def disagreement(rows: list[Prompt], block_size: int, naming: Naming = block_names) -> tuple[int, int, int] | None:
    """(request, request, block) that one naming takes for shared and the other does not."""
    trace = built(rows)
    for left, left_prompt in enumerate(rows):
        left_tokens = token_names(left, left_prompt)[block_size - 1 :: block_size]
        left_blocks = naming(trace, left, block_size)
        assert len(left_blocks) == len(left_tokens) == (left_prompt.input_len + left_prompt.output_len) // block_size
        for right in range(left):
            right_tokens = token_names(right, rows[right])[block_size - 1 :: block_size]
            right_blocks = naming(trace, right, block_size)
            for block in range(min(len(left_tokens), len(right_tokens))):
                if (left_tokens[block] == right_tokens[block]) != (left_blocks[block] == right_blocks[block]):
                    return left, right, block
    return None


@given(traces, st.integers(1, 8))
def test_two_requests_share_a_block_exactly_when_their_tokens_up_to_its_end_agree(rows, block_size):
    assert disagreement(rows, block_size) is None


def test_naming_a_block_by_its_first_token_is_rejected():
    def by_first_token(trace, request, block_size):
        tokens = [name for name, _ in block_names(trace, request, 1)]
        return [(tokens[block * block_size], block) for block in range(len(tokens) // block_size)]

    case = st.tuples(traces, st.integers(1, 8))
    rows, block_size = find(case, lambda case: disagreement(*case, naming=by_first_token) is not None)
    assert disagreement(rows, block_size) is None


def test_naming_a_block_by_its_own_id_alone_is_rejected():
    rows = [Prompt((0, 1), 0, 0, 0), Prompt((1, 1), 0, 0, 0)]

    def by_own_id(_trace, request, block_size):
        return [(rows[request].ids[(block + 1) * block_size // GRANULE_LEN - 1], block) for block in range(2)]

    assert disagreement(rows, GRANULE_LEN, naming=by_own_id) == (1, 0, 1)
    assert disagreement(rows, GRANULE_LEN) is None


@given(traces)
def test_a_first_child_continues_its_parents_stream(rows):
    """So a trace that only ever extends one prompt is one stream, and a prompt's segments are as few as they can be."""
    trace = built(rows)
    seen: dict[tuple[int, ...], int] = {}
    for request, prompt in enumerate(rows):
        names = block_names(trace, request, 1)
        for granule in range(len(prompt.ids)):
            path, parent = prompt.ids[: granule + 1], prompt.ids[:granule]
            stream = names[granule * GRANULE_LEN][0]
            if path not in seen and parent:
                first = not any(other[:-1] == parent for other in seen)
                assert (stream == seen[parent]) == first
            seen[path] = stream


def test_rows_are_put_in_order_of_their_start_and_still_wait_for_the_same():
    builder = TraceBuilder()
    for start_ps, after in ((5, None), (9, 0), (3, None), (4, 2)):
        builder.start(start_ps, after, delay_ps=0, session=start_ps)
        builder.hold(10 + start_ps, 1, [(start_ps, 4), (100 + start_ps, 10 + start_ps)], 200 + start_ps, num_granules=1)
    trace = builder.build("test", "test", GRANULE_LEN)
    assert trace.arrival_ps.tolist() == [3, 4, 5, 9]
    assert trace.after.tolist() == [0, 0, 2, 2]
    assert [trace.segments(i, 4)[0] for i in range(4)] == [(3, 0, 1), (4, 0, 1), (5, 0, 1), (9, 0, 1)]
    assert [trace.segments(i, 4)[1][0] for i in range(4)] == [103, 104, 105, 109]
    assert trace.input_len.tolist() == [13, 14, 15, 19]


def test_output_follows_the_prompt_in_its_own_stream_or_continues_the_last_one():
    builder = TraceBuilder()
    for output_stream in (7, 3):
        builder.start(0, None, 0, 0)
        builder.hold(input_len=10, output_len=10, segments=[(3, 10)], output_stream=output_stream, num_granules=3)
    trace = builder.build("test", "test", GRANULE_LEN)
    assert trace.segments(0, 4) == ((3, 0, 2), (7, 2, 5))
    assert trace.segments(1, 4) == ((3, 0, 5),)
    assert trace.segments(0, 32) == ()
