"""The decision log: what was decided for each request, a line of JSON when its last plan has ended, for kvsim to read.

    engine's thread --record--> bounded queue --own thread--> ids of the content, JSON, file

Content is named by ids, made of block hashes; tokens are never written. A block's hash names all before it too, so a
line has ids from the first block on that no earlier line has, and says which line has the others. The first line tells
what the others mean, the last one how many there are; the fields are described in connector/README.md.
"""

import hashlib
import json
import logging
import os
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from kvcore.errors import InvalidArgument
from kvcore.frontier import Frontier
from kvcore.keys import Namespace, Shards
from kvcore.plans import Decisions
from kvcore.ports import Clock
from kvcore.request import KVRequest
from kvcore.runs import num_blocks
from kvcore.spec import ModelSpec
from kvcore.units import NS_PER_S

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

VERSION = 1
"""Of the format. Fields may be added under the same version."""

MAX_WAITING = 1_024
"""Requests that wait to be written; what closes while so many do is dropped."""

MAX_KNOWN_BLOCKS = 131_072
"""Blocks whose line is remembered, two million tokens of 16: 20 MB. What is forgotten is written again."""

ID_BYTES = 8

_CLOSE_TIMEOUT_S = 10.0

Json: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Life:
    """When what first happened to a request, on the engine's clock, and what its lookups took."""

    considered_ns: int
    admitted_ns: int | None = None
    started_ns: int | None = None
    finished_ns: int | None = None
    lookups: int = 0
    rounds: int = 0
    keys_asked: int = 0

    def admitted(self, now_ns: int) -> None:
        """The scheduler gave it blocks."""
        if self.admitted_ns is None:
            self.admitted_ns = now_ns

    def answered(self, dialogue: Frontier, shards: Shards) -> None:
        """A lookup ended; a key was asked for each shard of a block."""
        self.lookups += 1
        self.rounds += dialogue.rounds
        self.keys_asked += sum(
            num_blocks(runs) * num_shards for runs, (_, num_shards) in zip(dialogue.asked, shards, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose decisions they are; a request's block hashes are one for each `hash_block_size` tokens."""

    model: ModelSpec
    namespace: Namespace
    hash_block_size: int
    num_ranks: int

    def header(self) -> Json:
        """The first line, without what depends on the recorder."""
        return {
            "kvtwin_record": VERSION,
            "namespace": self.namespace,
            "granule_len": self.model.hit_step,
            "ranks": self.num_ranks,
            "groups": [_named(asdict(group), type(group).__name__) for group in self.model.groups],
            "eagle_groups": sorted(self.model.eagle_groups),
            "kinds": [list(kind) for kind in self.model.kinds],
        }


def _named(fields: Json, name: str) -> Json:
    return {"type": name, "block_len": fields.pop("block_size"), **fields}


# A tuple, not a dataclass: it is made on the engine's thread, in C.
class _Closed(NamedTuple):
    """What is written of a request; nothing of it changes any more."""

    closed_ns: int
    arrived_unix_s: float
    prompt_len: int
    total_len: int
    block_hashes: Sequence[bytes]
    decisions: Decisions
    life: Life


class Recorder:
    """Writes to a file that it creates; `key` makes ids that mean nothing to whoever does not have it.

    Raises InvalidArgument when there can be no file. When one cannot be written any more the log ends, and is said to.
    """

    def __init__(self, path: str, origin: Origin, clock: Clock, key: str = "") -> None:
        self.num_dropped = 0
        """Requests that closed and were not written."""
        self.on_dropped: Callable[[], None] = lambda: None
        """Called for each of them."""
        self._clock = clock
        self._start_ns, self._start_unix_ns = clock.now_ns(), time.time_ns()
        self._ids = _Ids(key)
        self._granule_len = origin.model.hit_step
        self._hashes_per_granule = self._granule_len // origin.hash_block_size
        self._line, self._num_written = 1, 0
        self._has_ended = False
        self._waiting: queue.SimpleQueue[_Closed | Json | None] = queue.SimpleQueue()
        self._file, self.path = _create(Path(path).expanduser())
        header = origin.header() | {"ids": "keyed" if key else "plain", "started_unix_ns": self._start_unix_ns}
        self._thread = threading.Thread(target=self._run, args=(header,), name="kvtwin-record", daemon=True)
        self._thread.start()

    def record(self, request: Any, machine: KVRequest, life: Life) -> None:
        """The last plan of vLLM's `request` has ended. Returns at once, whatever the disk does."""
        if self._has_ended or self._waiting.qsize() >= MAX_WAITING:
            self.num_dropped += 1
            self.on_dropped()
            return
        self._waiting.put(
            _Closed(
                closed_ns=self._clock.now_ns(),
                arrived_unix_s=request.arrival_time,
                prompt_len=machine.num_prompt_tokens,
                total_len=request.num_tokens,
                block_hashes=request.block_hashes,
                decisions=machine.decisions,
                life=life,
            )
        )

    def moved(self, namespace: Namespace) -> None:
        """From now on keys are in this namespace: what was stored before is found no more."""
        self._waiting.put({"reset_ns": self._clock.now_ns() - self._start_ns, "namespace": namespace})

    def close(self) -> bool:
        """Write what waits and the last line, and say whether that is done."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        logger.info(
            "kvtwin: the decision log %s has %d requests; %d were dropped",
            self.path,
            self._num_written,
            self.num_dropped,
        )
        return not self._thread.is_alive()

    # -- on its own thread -------------------------------------------------------------------------------------

    def _run(self, header: Json) -> None:
        try:
            self._write(header)
            while (event := self._waiting.get()) is not None:
                self._line += 1
                self._write(self._described(event) if isinstance(event, _Closed) else event)
                self._num_written += isinstance(event, _Closed)
            self._write({"records": self._num_written, "dropped": self.num_dropped})
        except Exception:
            logger.exception("kvtwin: the decision log %s ends at line %d", self.path, self._line)
        self._has_ended = True
        os.close(self._file)

    def _write(self, values: Json) -> None:
        line = memoryview(json.dumps(values, separators=(",", ":")).encode() + b"\n")
        while line:
            line = line[os.write(self._file, line) :]

    def _described(self, closed: _Closed) -> Json:
        decisions, life = closed.decisions, closed.life
        step, total_len = self._hashes_per_granule, closed.total_len // self._granule_len
        hashes = closed.block_hashes[step - 1 : total_len * step : step]
        return {
            "arrived_ns": max(0, round(closed.arrived_unix_s * NS_PER_S) - self._start_unix_ns),
            "considered_ns": life.considered_ns - self._start_ns,
            "admitted_ns": self._since_start(life.admitted_ns),
            "started_ns": self._since_start(life.started_ns),
            "finished_ns": self._since_start(life.finished_ns),
            "closed_ns": closed.closed_ns - self._start_ns,
            "prompt_len": closed.prompt_len,
            "total_len": closed.total_len,
            "lookups": life.lookups,
            "rounds": life.rounds,
            "keys_asked": life.keys_asked,
            **asdict(decisions),
            **self._ids.described(hashes, self._line),
        }

    def _since_start(self, time_ns: int | None) -> int | None:
        return None if time_ns is None else time_ns - self._start_ns


class _Ids:
    """Ids of blocks, and on which line each block was written last."""

    def __init__(self, key: str) -> None:
        self._key = hashlib.blake2b(key.encode()).digest() if key else b""
        self._line_of: dict[bytes, int] = {}

    def described(self, hashes: Sequence[bytes], line: int) -> Json:
        """The content of the line, block by block: as many `like` on an earlier line, and the ids of the others."""
        lines = self._line_of
        # Known blocks come before unknown ones. What was forgotten since can only make the answer smaller.
        num_known = bisect_left(hashes, True, key=lambda block_hash: block_hash not in lines)
        content: Json = {"like": [lines[hashes[num_known - 1]], num_known]} if num_known else {}
        new = hashes[num_known:]
        content["ids"] = b"".join(map(self._id, new)).hex()
        for block_hash in new:
            lines[block_hash] = line
        if len(lines) > MAX_KNOWN_BLOCKS:
            # Many at once: a dict looks for its first entry from its very beginning, past all that were deleted.
            for block_hash in list(islice(lines, len(lines) - MAX_KNOWN_BLOCKS * 3 // 4)):
                del lines[block_hash]
        return content

    def _id(self, block_hash: bytes) -> bytes:
        if self._key:
            return hashlib.blake2b(block_hash, digest_size=ID_BYTES, key=self._key).digest()
        assert len(block_hash) >= ID_BYTES, block_hash
        return block_hash[:ID_BYTES]


def _create(path: Path) -> tuple[int, Path]:
    """A new file that only this user reads, and its path: with this process's number when there is such a file."""
    for place in (path, path.with_name(f"{path.name}.{os.getpid()}")):
        try:
            return os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), place
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            raise InvalidArgument("record", str(path), f"a path where a file can be created ({error})") from None
    raise InvalidArgument("record", str(path), "a path where there is no file yet")
