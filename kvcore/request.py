"""One request's life with the pool, as a state machine without I/O: events in, plans out.

    WAITING --consider--> ASKING --lookup_answered--> OFFERED --granted 0--> COMPUTING --finished--> FINISHED
       ^                    |  (late: deadline)          |                     ^   |
       |                    +----------> OFFERED         +--granted g--> LOADING   |
       +--- preempted, or a load that left nothing valid --------------------------+

The driver executes each plan and reports back with the plan's ticket; a report with an unknown ticket is late, is
counted and changes nothing. Time is an argument. Every block a plan reads or writes must stay pinned by the driver
until it reports the plan finished. Positions, not keys: the last hop names the blocks.
"""

from dataclasses import dataclass, field
from enum import Enum

from kvcore.errors import require
from kvcore.planner import GroupRuns, Planner, common, count_blocks, minus, plus
from kvcore.units import NS_PER_MS


class State(Enum):
    """Where a request stands; see the picture above."""

    WAITING = "waiting"
    ASKING = "asking"
    OFFERED = "offered"
    LOADING = "loading"
    COMPUTING = "computing"
    FINISHED = "finished"


LEGAL: dict[str, frozenset[State]] = {
    "consider": frozenset({State.WAITING, State.ASKING, State.OFFERED}),
    "granted": frozenset({State.WAITING, State.ASKING, State.OFFERED, State.COMPUTING}),
    "load_finished": frozenset({State.LOADING, State.FINISHED}),
    "computed": frozenset({State.COMPUTING}),
    "preempted": frozenset({State.COMPUTING}),
    "finished": frozenset({State.WAITING, State.ASKING, State.OFFERED, State.LOADING, State.COMPUTING}),
}
"""In which states each event may come. Answers, and reports of plans that have ended, may come in any."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask the pool for `blocks`; report with `lookup_answered`."""

    ticket: int
    blocks: GroupRuns


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

    `unproven` are needed at `resume_len` too, but the pool does not hold them: a grant below the offer may end where
    only a shorter or longer hit is whole. Nothing will fill them.
    """

    ticket: int
    resume_len: int
    blocks: GroupRuns
    unproven: GroupRuns


@dataclass(frozen=True, slots=True)
class Store:
    """Write `blocks`, which are full when the step that issued this has run. Report with `store_finished`."""

    ticket: int
    blocks: GroupRuns


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Patience with the pool.

    `lookup_deadline_ns`: after this an unanswered question counts as a miss.
    `offer_ttl_ns`: how long an offer is repeated before the pool is asked again; below the lease that a lookup grants
    (5 s in older Mooncake masters, 10 s in 0.3.13).
    `max_load_attempts`: how many loads of a request may fail before it is offered nothing any more. Under vLLM 0.32 a
    second one may wait for ever: the blocks that the first was to fill stay reserved until the prompt is computed.
    """

    lookup_deadline_ns: int = 100 * NS_PER_MS
    offer_ttl_ns: int = 4_000 * NS_PER_MS
    max_load_attempts: int = 1

    def __post_init__(self) -> None:
        require(self.lookup_deadline_ns > 0, "lookup_deadline_ns", self.lookup_deadline_ns, "more than 0")
        require(self.offer_ttl_ns > 0, "offer_ttl_ns", self.offer_ttl_ns, "more than 0")
        require(self.max_load_attempts >= 0, "max_load_attempts", self.max_load_attempts, "at least 0")


@dataclass(slots=True)
class Decisions:
    """What was decided for the request: the record that simulator and connector must share.

    Lengths in tokens, of the first admission; block positions over the whole life: what was asked for, what was planned
    and not reported as failed, and what of the stores was last reported as not written. `late_misses` counts promised
    blocks that were not there.
    """

    looked_up: GroupRuns
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


@dataclass(slots=True)
class _Answer:
    """What the pool held, asked above `local_hit_len`; `answered_ns` None while the question is open."""

    ticket: int
    local_hit_len: int
    asked_ns: int
    asked: GroupRuns
    present: GroupRuns
    answered_ns: int | None = None


@dataclass(slots=True)
class KVRequest:
    """The machine of one request of `num_prompt_tokens`."""

    planner: Planner
    policy: PoolPolicy
    num_prompt_tokens: int
    state: State = State.WAITING
    decisions: Decisions = field(init=False)
    _answer: _Answer | None = None
    _offer: Offer = Offer(0)
    _local_hit_len: int = 0
    _load: Load | None = None
    _stores: dict[int, GroupRuns] = field(default_factory=dict)
    _saved_len: int = 0
    _failed_loads: int = 0
    _next_ticket: int = 0

    def __post_init__(self) -> None:
        nothing = self.planner.nothing
        self.decisions = Decisions(nothing, nothing, nothing, nothing)

    @property
    def closed(self) -> bool:
        """Finished, and no plan of it reads or writes a block any more."""
        return self.state is State.FINISHED and self._load is None and not self._stores

    @property
    def reconsider_at_ns(self) -> int | None:
        """From when on `consider` answers differently though nothing has happened: a question is late, an offer old."""
        answer = self._answer
        if answer is None or self.state not in (State.ASKING, State.OFFERED):
            return None
        if answer.answered_ns is None:
            return answer.asked_ns + self.policy.lookup_deadline_ns
        return answer.answered_ns + self.policy.offer_ttl_ns + 1

    # -- before admission -------------------------------------------------------------------------------------

    def consider(self, local_hit_len: int, num_tokens: int, now_ns: int) -> Lookup | Wait | Offer:
        """The scheduler may admit the request, which resumes at `local_hit_len` on its own, of `num_tokens` in all."""
        self._expect("consider")
        self._local_hit_len = local_hit_len
        if self._failed_loads >= self.policy.max_load_attempts or self.planner.limit(num_tokens) <= local_hit_len:
            return self._offered(0)
        answer = self._answer
        if answer is None or self._is_stale(answer, local_hit_len, now_ns):
            return self._ask(local_hit_len, num_tokens, now_ns)
        if answer.answered_ns is None:
            return self._wait(answer, now_ns)
        return self._offered(self.planner.hit(local_hit_len, num_tokens, answer.present) - local_hit_len)

    def lookup_answered(self, ticket: int, present: GroupRuns, now_ns: int) -> None:
        """The pool holds `present` of what was asked; empty runs when it could not tell."""
        answer = self._answer
        if answer is None or answer.ticket != ticket or answer.answered_ns is not None:
            self.decisions.late_answers += 1
            return
        answer.present = common(present, answer.asked)
        answer.answered_ns = now_ns

    def granted(self, num_tokens: int) -> Load | None:
        """The scheduler admitted the request with `num_tokens` <= the offer to be loaded, and allocated its blocks.

        A second grant of 0, which the engine makes when a loaded request resumes, changes nothing.
        """
        self._expect("granted")
        if self.state is State.COMPUTING:
            assert num_tokens == 0, num_tokens
            return None
        offer = self._offer if self.state is State.OFFERED else Offer(0)
        bound = f"0 to {offer.num_tokens}, which was offered last"
        require(0 <= num_tokens <= offer.num_tokens, "num_tokens", num_tokens, bound)
        self._record_admission(offer, num_tokens)
        self._saved_len = max(self._saved_len, self._local_hit_len + num_tokens)
        self.state = State.COMPUTING
        load = self._plan_load(num_tokens) if num_tokens else None
        self._answer = None
        return load

    # -- after admission --------------------------------------------------------------------------------------

    def load_finished(self, ticket: int, failed: GroupRuns) -> int | None:
        """The load ended and left the blocks `failed` unwritten. Returns the tokens that are valid now.

        None for a report nobody waits for. When nothing is valid the request waits again.
        """
        load = self._load
        if load is None or load.ticket != ticket:
            self.decisions.late_answers += 1
            return None
        self._expect("load_finished")
        self._load = None
        if self.state is State.FINISHED:
            return 0
        return self._resume(load, common(failed, load.blocks))

    def computed(self, num_tokens: int) -> Store | None:
        """The step being scheduled computes up to `num_tokens`; what it fills is to be stored. Call it for each step.

        Where the engine keeps all blocks of a running request, those that end in generated tokens follow in one plan
        when the request finishes: until then only this engine can use them.
        """
        self._expect("computed")
        can_wait = self.planner.model.prefix_closed
        return self._plan_store(min(num_tokens, self.num_prompt_tokens) if can_wait else num_tokens)

    def store_finished(self, ticket: int, rejected: GroupRuns) -> None:
        """The store ended; `rejected` were not written. Its blocks need no pin any more."""
        blocks = self._stores.pop(ticket, None)
        if blocks is None:
            self.decisions.late_answers += 1
            return
        if any(rejected):
            lost = common(rejected, blocks)
            self.decisions.rejected = plus(self.decisions.rejected, lost)
            self.decisions.stored = minus(self.decisions.stored, lost)

    def preempted(self) -> None:
        """The engine took the blocks away; stores in flight keep theirs."""
        self._expect("preempted")
        self.state = State.WAITING

    def finished(self, num_tokens: int) -> Store | None:
        """The request completed or was aborted with `num_tokens` computed; `closed` when its last plan is reported.

        What is stored now is what the engine still holds: nothing that a window has left behind.
        """
        self._expect("finished")
        computing = self.state is State.COMPUTING
        self.state = State.FINISHED
        self._answer = None
        return self._plan_store(num_tokens) if computing else None

    # -- inside -----------------------------------------------------------------------------------------------

    def _expect(self, event: str) -> None:
        assert self.state in LEGAL[event], f"{event} in state {self.state.name}"

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _is_stale(self, answer: _Answer, local_hit_len: int, now_ns: int) -> bool:
        """A local hit that shrank leaves blocks nobody asked for; what was offered for long has lost its lease.

        An answer is offered once, however old it is: no request asks for ever without an offer in between.
        """
        if local_hit_len < answer.local_hit_len:
            return True
        if self.state is not State.OFFERED or answer.answered_ns is None:
            return False
        return now_ns - answer.answered_ns > self.policy.offer_ttl_ns

    def _ask(self, local_hit_len: int, num_tokens: int, now_ns: int) -> Lookup:
        asked = self.planner.lookup(local_hit_len, num_tokens)
        self._answer = _Answer(self._ticket(), local_hit_len, now_ns, asked, self.planner.nothing)
        self.decisions.looked_up = plus(self.decisions.looked_up, asked)
        self.state = State.ASKING
        return Lookup(self._answer.ticket, asked)

    def _wait(self, answer: _Answer, now_ns: int) -> Wait | Offer:
        self.state = State.ASKING
        until_ns = answer.asked_ns + self.policy.lookup_deadline_ns
        if now_ns < until_ns:
            return Wait(until_ns)
        self.decisions.late_lookups += 1
        answer.answered_ns = now_ns
        return self._offered(0)

    def _offered(self, num_tokens: int) -> Offer:
        self.state = State.OFFERED
        self._offer = Offer(num_tokens)
        return self._offer

    def _record_admission(self, offer: Offer, num_tokens: int) -> None:
        if self.decisions.admitted:
            return
        self.decisions.admitted = True
        self.decisions.local_hit_len = self._local_hit_len
        self.decisions.external_hit_len = offer.num_tokens
        self.decisions.granted_len = num_tokens

    def _plan_load(self, num_tokens: int) -> Load:
        assert self._answer is not None
        resume_len = self._local_hit_len + num_tokens
        wanted = self.planner.load(self._local_hit_len, resume_len)
        proven = common(wanted, self._answer.present)
        self._load = Load(self._ticket(), resume_len, proven, minus(wanted, proven))
        self.decisions.loaded = plus(self.decisions.loaded, proven)
        self.state = State.LOADING
        return self._load

    def _plan_store(self, num_tokens: int) -> Store | None:
        if num_tokens <= self._saved_len:
            return None
        blocks = self.planner.store(self._saved_len, num_tokens, self.num_prompt_tokens)
        if self.state is State.FINISHED:
            blocks = common(blocks, self.planner.held(num_tokens))
        self._saved_len = num_tokens
        if not any(blocks):
            return None
        store = Store(self._ticket(), blocks)
        self._stores[store.ticket] = blocks
        self.decisions.stored = plus(self.decisions.stored, blocks)
        if any(self.decisions.rejected):
            self.decisions.rejected = minus(self.decisions.rejected, blocks)
        return store

    def _resume(self, load: Load, failed: GroupRuns) -> int:
        self.decisions.late_misses += count_blocks(failed)
        self.decisions.loaded = minus(self.decisions.loaded, failed)
        unwritten = plus(failed, load.unproven)
        valid_len = self.planner.valid_len(load.resume_len, unwritten)
        if any(unwritten):
            self._failed_loads += 1
            self._saved_len = valid_len
        self.state = State.COMPUTING if valid_len else State.WAITING
        return valid_len
