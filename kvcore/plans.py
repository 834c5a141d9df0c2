"""What the machine of a request answers with, what it is patient about, and what it records."""

from dataclasses import dataclass, field

from kvcore.admission import Admission, AdmitAll, AdmitNone
from kvcore.errors import require
from kvcore.frontier import Frontier
from kvcore.group_runs import GroupRuns
from kvcore.hints import NO_HINTS, Hints
from kvcore.loading import LoadAlways, Loading
from kvcore.units import NS_PER_MS


@dataclass(frozen=True, slots=True)
class Lookup:
    """Carry the `dialogue` with the pool through, then report with `lookup_answered`; until then it is the driver's.

    From `deadline_ns` on nobody waits for it.
    """

    ticket: int
    dialogue: Frontier
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The pool has not answered; consider again after an answer, or at `until_ns`."""

    until_ns: int


@dataclass(frozen=True, slots=True)
class Offer:
    """`num_tokens` beyond the local hit can be loaded; any grant up to it is accepted."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch `blocks`; report with `load_finished`.

    The machine knows no timeout: the driver sets one, and reports blocks whose transfer timed out as failed. It reports
    once, when no rank can write any block of the plan any more: until then they are pinned, after it they are others'.
    `unproven` are needed at `resume_len` too, but the pool does not hold them: a grant below the offer may end where
    only a shorter or longer hit is whole. Nothing will fill them.
    """

    ticket: int
    resume_len: int
    blocks: GroupRuns
    unproven: GroupRuns


@dataclass(frozen=True, slots=True)
class Store:
    """Write `blocks`, which hold their content when the step that issued this has run. Report with `store_finished`.

    Timeouts are the driver's, as with `Load`: what timed out is reported as rejected, once, and only when no rank can
    read any block of the plan any more; a late read would put what others have written there under this one's names.
    A tail is written from the block that it is in. `hints` are the request's, for the pool.
    """

    ticket: int
    blocks: GroupRuns
    hints: Hints = NO_HINTS


DEFAULT_STORING_SHARE = 0.25
"""Of an engine's blocks, what its stores in flight may pin when nobody says otherwise."""


def storing_blocks(share: float, num_gpu_blocks: int) -> int:
    """That share of the engine's blocks in whole ones, at least 1: a `PoolPolicy.max_storing_blocks`."""
    return max(1, int(share * num_gpu_blocks))


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Patience with the pool.

    `lookup_deadline_ns`: after this what a lookup has not found yet counts as a miss, until it is found.
    `offer_ttl_ns`: how long an offer is repeated before the pool is asked again; below the lease that a lookup grants
    (5 s in older Mooncake masters, 10 s in 0.3.13).
    `max_load_attempts`: how many loads of a request may fail before it is offered nothing any more. Under vLLM 0.32 a
    second one may wait for ever: the blocks that the first was to fill stay reserved until the prompt is computed.
    `max_storing_blocks`: how many blocks an engine's stores in flight may pin, all requests together; None: any number.
    What finds no room counts as refused. A plan that is alone passes whatever its size.
    `admission`: which computed blocks are worth storing. `loading`: whether a hit is worth fetching.
    """

    lookup_deadline_ns: int = 100 * NS_PER_MS
    offer_ttl_ns: int = 4_000 * NS_PER_MS
    max_load_attempts: int = 1
    max_storing_blocks: int | None = None
    admission: Admission = field(default_factory=AdmitAll)
    loading: Loading = field(default_factory=LoadAlways)
    stores: bool = field(init=False, repr=False, compare=False)
    """Whether anything is stored at all."""

    def __post_init__(self) -> None:
        require(self.lookup_deadline_ns > 0, "lookup_deadline_ns", self.lookup_deadline_ns, "more than 0")
        require(self.offer_ttl_ns > 0, "offer_ttl_ns", self.offer_ttl_ns, "more than 0")
        require(self.max_load_attempts >= 0, "max_load_attempts", self.max_load_attempts, "at least 0")
        valid = self.max_storing_blocks is None or self.max_storing_blocks > 0
        require(valid, "max_storing_blocks", self.max_storing_blocks, "None, or at least 1 block")
        object.__setattr__(self, "stores", not isinstance(self.admission, AdmitNone))

    def has_room(self, num_storing: int, num_more: int) -> bool:
        """Whether a plan of `num_more` blocks may start beside `num_storing` that are in flight."""
        return self.max_storing_blocks is None or not num_storing or num_storing + num_more <= self.max_storing_blocks


@dataclass(slots=True)
class Answer:
    """What the pool held, asked above `local_hit_len`; `answered_ns` None until it is `told`, or that takes too long.

    Then it is what the rounds so far have said; a driver's other thread may be in the next one. `num_offered` tokens is
    the offer for `offered_for`: local hit and length of the sequence.
    """

    ticket: int
    local_hit_len: int
    asked_ns: int
    dialogue: Frontier
    present: GroupRuns
    answered_ns: int | None = None
    told: bool = False
    offered_for: tuple[int, int] | None = None
    num_offered: int = 0

    def hear(self, now_ns: int) -> None:
        """From now on what the dialogue has found counts; it is as old as what was heard of it first."""
        if self.answered_ns is None or not any(self.present):
            self.answered_ns = now_ns
        self.present, self.offered_for = self.dialogue.present, None

    def ends_ns(self, policy: PoolPolicy) -> int:
        """From when on nobody waits for it any more; or, answered, it is believed no longer."""
        if self.answered_ns is None:
            return self.asked_ns + policy.lookup_deadline_ns
        return self.answered_ns + policy.offer_ttl_ns + 1


@dataclass(slots=True)
class Decisions:
    """What was decided for the request: the record that simulator and connector must share.

    Lengths in tokens, of the first admission; block positions over the whole life: what was asked for, what of it was
    found, what was planned and not reported as failed, and what of the stores was last reported as not written.
    `late_misses` counts promised blocks that were not there.
    """

    looked_up: GroupRuns
    found: GroupRuns
    loaded: GroupRuns
    stored: GroupRuns
    rejected: GroupRuns
    local_hit_len: int = 0
    external_hit_len: int = 0
    granted_len: int = 0
    admitted: bool = False
    late_lookups: int = 0
    late_answers: int = 0
    late_misses: int = 0

    def record_admission(self, local_hit_len: int, external_hit_len: int, granted_len: int) -> None:
        """The first one counts."""
        if not self.admitted:
            self.local_hit_len, self.external_hit_len, self.granted_len = local_hit_len, external_hit_len, granted_len
            self.admitted = True
