"""NVMe drives as one queue: transfers share the drives' time, whether they read or write."""

from dataclasses import dataclass
from functools import partial

from kvcore.units import div_ceil
from kvsim.clock import PS_PER_S, Action, Clock
from kvsim.links.fair_link import FairLink
from kvsim.usage import RecordTransfer


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one drive in one direction: long transfers by bytes, short ones by commands."""

    bytes_per_s: int
    commands_per_s: int
    command_bytes: int

    def work_ps(self, size_bytes: int, num_pieces: int) -> int:
        """Time of one drive for `num_pieces` of that size in all: whichever takes longer."""
        num_commands = max(num_pieces, div_ceil(size_bytes, self.command_bytes))
        by_bytes = div_ceil(size_bytes * PS_PER_S, self.bytes_per_s)
        return max(by_bytes, div_ceil(num_commands * PS_PER_S, self.commands_per_s))


class Drive:
    """`num_drives` drives: work of theirs is shared equally by the transfers under way (processor sharing).

    A transfer alone has all of them, as one that is striped does. Counters: `entered_bytes` (of all transfers),
    `moved_bytes` and `read_bytes` (of complete ones), `busy_ps` (time with a transfer under way).
    """

    full_when_busy = True

    def __init__(self, clock: Clock, num_drives: int, reading: Speed, writing: Speed) -> None:
        self._reading = reading
        self._writing = writing
        # A link for work: what it carries is picoseconds of a drive, not bytes.
        self._queue = FairLink(clock, 0, num_drives * PS_PER_S)
        self._clock = clock
        self.bandwidth_bytes_per_s = num_drives * reading.bytes_per_s
        """Of long reads."""
        self.record: RecordTransfer | None = None
        """Told of every transfer that completes."""
        self.entered_bytes = 0
        self.moved_bytes = 0
        self.read_bytes = 0

    @property
    def busy_ps(self) -> int:
        """Time with a transfer under way."""
        return self._queue.busy_ps

    @property
    def num_active(self) -> int:
        """Transfers under way."""
        return self._queue.num_active

    def read(self, size_bytes: int, num_pieces: int, on_done: Action) -> None:
        """Read so many pieces of `size_bytes` in all."""
        self._start(
            self._reading.work_ps(size_bytes, num_pieces), size_bytes, partial(self._have_read, size_bytes, on_done)
        )

    def write(self, size_bytes: int, num_pieces: int, on_done: Action) -> None:
        """Write so many pieces of `size_bytes` in all."""
        self._start(self._writing.work_ps(size_bytes, num_pieces), size_bytes, on_done)

    def audit(self) -> None:
        """No work was lost."""
        self._queue.audit()

    def _start(self, work_ps: int, size_bytes: int, on_done: Action) -> None:
        self.entered_bytes += size_bytes
        self._queue.transfer(work_ps, partial(self._end, size_bytes, self._clock.now_ps, on_done))

    def _end(self, size_bytes: int, start_ps: int, on_done: Action) -> None:
        self.moved_bytes += size_bytes
        if self.record is not None:
            self.record(start_ps, self._clock.now_ps, size_bytes)
        on_done()

    def _have_read(self, size_bytes: int, on_done: Action) -> None:
        self.read_bytes += size_bytes
        on_done()
