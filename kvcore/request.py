"""One request's life with the pool, as a state machine without I/O: events in, plans out.

    WAITING --consider--> ASKING --lookup_answered--> OFFERED --granted 0--> COMPUTING --finished--> FINISHED
       ^                    |     (or its deadline)      |                     ^   |
       |                    +----------> OFFERED         +--granted g--> LOADING   |
       +--- preempted, or a load that left nothing valid --------------------------+

The driver executes each plan and reports back with the plan's ticket; a report with an unknown ticket is late, is
counted and changes nothing. Time is an argument. Every block a plan reads or writes must stay pinned by the driver
until it reports the plan finished. Positions, not keys: the last hop names the blocks.
"""

from dataclasses import dataclass, field
from enum import Enum

from kvcore.errors import require
from kvcore.group_runs import GroupRuns, common, count_blocks, minus, plus
from kvcore.hints import NO_HINTS, Hints
from kvcore.memory import Experience, NamesOf, by_position
from kvcore.planner import Planner
from kvcore.plans import Answer, Decisions, Load, Lookup, Offer, PoolPolicy, Store, Wait


class State(Enum):
    """Where a request stands; see the picture above."""

    WAITING = "waiting"
    ASKING = "asking"
    OFFERED = "offered"
    LOADING = "loading"
    COMPUTING = "computing"
    FINISHED = "finished"


LEGAL: dict[str, tuple[State, ...]] = {
    "consider": (State.WAITING, State.ASKING, State.OFFERED),
    "granted": (State.WAITING, State.ASKING, State.OFFERED, State.COMPUTING),
    "load_finished": (State.LOADING, State.FINISHED),
    "computed": (State.COMPUTING,),
    "state_saved": (State.COMPUTING,),
    "preempted": (State.COMPUTING,),
    "finished": (State.WAITING, State.ASKING, State.OFFERED, State.LOADING, State.COMPUTING),
}
"""In which states each event may come. A reset, answers, and reports of plans that have ended, may come in any."""

_NOTHING_OFFERED = Offer(0)


@dataclass(slots=True)
class KVRequest:
    """The machine of one request of `num_prompt_tokens` >= 1; its `policy` may be replaced between any two events.

    `experience` is shared by the requests of one engine, and `names_of` names this one's blocks in it; without them the
    request learns from itself alone. From `next_store_len` tokens on `computed` is to be called; None: it need not be.
    """

    planner: Planner
    policy: PoolPolicy
    num_prompt_tokens: int
    experience: Experience = field(default_factory=Experience)
    names_of: NamesOf = by_position
    hints: Hints = NO_HINTS
    state: State = State.WAITING
    next_store_len: int | None = None
    decisions: Decisions = field(init=False)
    _answer: Answer | None = None
    _offer: Offer = _NOTHING_OFFERED
    _local_hit_len: int = 0
    _considered_ns: int | None = None
    _load: Load | None = None
    _stores: dict[int, GroupRuns] = field(default_factory=dict)
    _void_stores: set[int] = field(default_factory=set)
    _saved_len: int = 0
    _owed: GroupRuns = field(init=False)
    _given: GroupRuns = field(init=False)
    _is_foreign: bool = False
    _kept_back: bool = False
    _failed_loads: int = 0
    _next_ticket: int = 0

    def __post_init__(self) -> None:
        require(self.num_prompt_tokens >= 1, "num_prompt_tokens", self.num_prompt_tokens, "1 or more, as in the engine")
        self._owed = self._given = nothing = self.planner.nothing
        self.decisions = Decisions(nothing, nothing, nothing, nothing, nothing)

    @property
    def closed(self) -> bool:
        """Finished, and no plan of it reads or writes a block any more."""
        return self.state is State.FINISHED and self._load is None and not self._stores

    @property
    def reconsider_at_ns(self) -> int | None:
        """From when on `consider` answers differently though nothing has happened: a question is late, an offer old."""
        answer = self._answer
        return answer.ends_ns(self.policy) if answer and self.state in (State.ASKING, State.OFFERED) else None

    # -- before admission -------------------------------------------------------------------------------------

    def consider(self, local_hit_len: int, num_tokens: int, now_ns: int) -> Lookup | Wait | Offer:
        """The scheduler may admit the request, which resumes at `local_hit_len` on its own, of `num_tokens` in all.

        An engine's own hit ends where any hit of the model does: it is 0 or a multiple of `hit_step`.
        """
        self._expect("consider")
        self.planner.require_hit(local_hit_len)
        self._local_hit_len = local_hit_len
        if self._considered_ns is None:
            self._considered_ns = now_ns
        if self._failed_loads >= self.policy.max_load_attempts or self.planner.limit(num_tokens) <= local_hit_len:
            self.state = State.WAITING  # for nothing of the pool's: an answer it has grows old without consequence
            return _NOTHING_OFFERED
        answer = self._answer
        if answer is None or self._is_stale(answer, local_hit_len, now_ns):
            return self._ask(local_hit_len, num_tokens, now_ns)
        if answer.answered_ns is None:
            if now_ns < answer.ends_ns(self.policy):
                self.state = State.ASKING
                return Wait(answer.ends_ns(self.policy))
            self.decisions.late_lookups += 1
            self._hear(answer, now_ns)
        if answer.offered_for != (local_hit_len, num_tokens):
            hit_len = self.planner.hit(local_hit_len, num_tokens, answer.present)
            answer.offered_for = local_hit_len, num_tokens
            answer.num_offered = self._worth(hit_len, answer.present, now_ns)
        return self._offered(answer.num_offered)

    def lookup_answered(self, ticket: int, now_ns: int) -> None:
        """The dialogue of the lookup has ended, or was broken off; late, it counts until the request is admitted."""
        answer = self._answer
        if answer is None or not self.awaits(ticket):
            self.decisions.late_answers += 1
            return
        answer.told = True
        self._hear(answer, now_ns)

    def awaits(self, ticket: int) -> bool:
        """Whether an answer to this lookup would still count."""
        return self._answer is not None and self._answer.ticket == ticket and not self._answer.told

    def granted(self, num_tokens: int, now_ns: int) -> Load | None:
        """The scheduler admitted the request with `num_tokens` <= the offer to be loaded, and allocated its blocks.

        A second grant of 0, which the engine makes when a loaded request resumes, changes nothing.
        """
        self._expect("granted")
        if self.state is State.COMPUTING:
            assert num_tokens == 0, num_tokens
            return None
        offer = self._offer if self.state is State.OFFERED else _NOTHING_OFFERED
        bound = f"0 to {offer.num_tokens}, which was offered last"
        require(0 <= num_tokens <= offer.num_tokens, "num_tokens", num_tokens, bound)
        self.decisions.record_admission(self._local_hit_len, offer.num_tokens, num_tokens)
        resume_len = self._local_hit_len + num_tokens
        self._owed = self._unsaved_hits(resume_len, now_ns)
        # What waits for the end to be stored may be a local hit now: the pool was not given it.
        saved_len = min(resume_len, self.num_prompt_tokens) if self._kept_back else resume_len
        self._saved_len = max(self._saved_len, saved_len)
        self.state = State.COMPUTING
        self._look_ahead()
        load = self._plan_load(resume_len) if num_tokens else None
        self._answer = None
        return load

    # -- after admission --------------------------------------------------------------------------------------

    def load_finished(self, ticket: int, failed: GroupRuns, now_ns: int) -> int | None:
        """The load ended and left the blocks `failed` unwritten. Returns the tokens that are valid now.

        None for a report nobody waits for, 0 when the request has ended. When nothing is valid it waits again.
        """
        load = self._load
        if load is None or load.ticket != ticket:
            self.decisions.late_answers += 1
            return None
        self._expect("load_finished")
        self._load = None
        missed = common(failed, load.blocks)
        self._record_misses(missed, now_ns)
        return 0 if self.state is State.FINISHED else self._resume(load, plus(missed, load.unproven))

    def adopted(self, num_tokens: int) -> None:
        """Another connector filled the blocks that resuming at `num_tokens` needs; no others before it are there."""
        self._expect("computed")
        kept = self.planner.kept(num_tokens, self.num_prompt_tokens)
        self._owed = plus(self._owed, minus(kept, self.planner.held(self._saved_len)))
        self._saved_len = max(self._saved_len, num_tokens)
        self._look_ahead()

    def computed(self, num_tokens: int, now_ns: int) -> Store | None:
        """The step being scheduled computes up to `num_tokens`; what it fills is to be stored.

        Where the engine keeps all blocks of a running request, those that end in generated tokens follow in one plan
        when the request finishes: until then only this engine can use them. What is owed waits for nothing.
        """
        self._expect("computed")
        if self.next_store_len is None or num_tokens < self.next_store_len:
            return None
        return self._plan_store(num_tokens, now_ns)

    def state_saved(self, group: int, state_len: int, now_ns: int) -> Store | None:
        """The engine keeps the state of a recurrent `group` after `state_len` tokens, and lends it.

        Tails of other groups come with it: their blocks must hold `state_len` tokens.
        """
        self._expect("state_saved")
        blocks = self.planner.store_state(group, state_len, self.num_prompt_tokens)
        return self._store(minus(blocks, self._given), self.planner.nothing, state_len, now_ns)

    def store_finished(self, ticket: int, rejected: GroupRuns, now_ns: int) -> None:
        """The store ended; `rejected` were not written. Its blocks need no pin any more."""
        blocks = self._stores.pop(ticket, None)
        if blocks is None:
            self.decisions.late_answers += 1
            return
        self.experience.num_storing -= count_blocks(blocks)
        lost = common(rejected, blocks)
        written = minus(blocks, lost)
        if any(lost) or any(self.decisions.rejected):
            self.decisions.rejected = minus(plus(self.decisions.rejected, lost), written)
            self.decisions.stored = plus(minus(self.decisions.stored, lost), written)
        if ticket in self._void_stores:
            self._void_stores.remove(ticket)
            return
        self._given = minus(self._given, lost)
        self.experience.unsaved.forget(written, self.names_of)
        self.experience.denied.forget(written, self.names_of)
        self.experience.unsaved.note(lost, self.names_of, now_ns)

    def preempted(self) -> None:
        """The engine took the blocks away; stores in flight keep theirs."""
        self._expect("preempted")
        self._kept_back = self.planner.model.prefix_closed and not self._is_foreign
        self._wait_again()

    def finished(self, num_tokens: int, now_ns: int) -> Store | None:
        """The request completed or was aborted with `num_tokens` computed; `closed` when its last plan is reported.

        What is stored now is what the engine still holds: nothing that a window has left behind.
        """
        self._expect("finished")
        computing = self.state is State.COMPUTING
        self.state = State.FINISHED
        self._answer = None
        return self._plan_store(num_tokens, now_ns) if computing else None

    def reset(self) -> None:
        """The pool's namespace ended. What is loaded or computed goes on, as in the engine, but is shared no more."""
        self._answer = None
        self._offer = _NOTHING_OFFERED
        self._owed = self._given = self.planner.nothing
        self._void_stores |= self._stores.keys()
        self._is_foreign = self.state is State.COMPUTING or self._load is not None
        self._saved_len, self._kept_back = 0, False
        self._look_ahead()
        if self.state in (State.ASKING, State.OFFERED):
            self.state = State.WAITING

    # -- inside -----------------------------------------------------------------------------------------------

    def _expect(self, event: str) -> None:
        assert self.state in LEGAL[event], f"{event} in state {self.state.name}"

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _is_stale(self, answer: Answer, local_hit_len: int, now_ns: int) -> bool:
        """A local hit that shrank leaves blocks nobody asked for; what was offered for long has lost its lease.

        An answer is offered once, however old it is: no request asks for ever without an offer in between.
        """
        offered_ns = answer.answered_ns if self.state is State.OFFERED else None
        is_old = offered_ns is not None and now_ns - offered_ns > self.policy.offer_ttl_ns
        return is_old or local_hit_len < answer.local_hit_len

    def _ask(self, local_hit_len: int, num_tokens: int, now_ns: int) -> Lookup | Offer:
        dialogue = self.planner.frontier(local_hit_len, num_tokens, self._denied(local_hit_len, num_tokens, now_ns))
        self._answer = Answer(self._ticket(), local_hit_len, now_ns, dialogue, self.planner.nothing)
        if dialogue.open:
            self.state = State.ASKING
            return Lookup(self._answer.ticket, dialogue, now_ns + self.policy.lookup_deadline_ns)
        self._answer.answered_ns = now_ns
        return self._offered(self._worth(dialogue.hit_len, self.planner.nothing, now_ns))

    def _denied(self, local_hit_len: int, num_tokens: int, now_ns: int) -> GroupRuns:
        denied = self.experience.denied
        beyond = self.planner.beyond(local_hit_len, num_tokens) if len(denied) else self.planner.nothing
        return denied.known(beyond, self.names_of, now_ns)

    def _hear(self, answer: Answer, now_ns: int) -> None:
        answer.hear(now_ns)
        self.decisions.looked_up = plus(self.decisions.looked_up, answer.dialogue.asked)
        self.decisions.found = plus(self.decisions.found, answer.present)

    def _worth(self, hit_len: int, present: GroupRuns, now_ns: int) -> int:
        """The tokens of a hit that are to be offered."""
        if hit_len == self._local_hit_len:
            return 0
        assert self._considered_ns is not None
        blocks = self.planner.load(self._local_hit_len, hit_len, present)
        worth = self.policy.loading.worth(self._local_hit_len, hit_len, blocks, now_ns - self._considered_ns)
        return hit_len - self._local_hit_len if worth else 0

    def _offered(self, num_tokens: int) -> Offer:
        self.state = State.OFFERED
        self._offer = Offer(num_tokens) if num_tokens else _NOTHING_OFFERED
        return self._offer

    def _plan_load(self, resume_len: int) -> Load:
        assert self._answer is not None
        present = self.planner.usable(self._answer.present, resume_len)
        wanted = self.planner.load(self._local_hit_len, resume_len, present)
        proven = common(wanted, present)
        self._load = Load(self._ticket(), resume_len, proven, minus(wanted, proven))
        self.decisions.loaded = plus(self.decisions.loaded, proven)
        self._given = plus(self._given, proven)
        self.state = State.LOADING
        return self._load

    def _record_misses(self, missed: GroupRuns, now_ns: int) -> None:
        """Promised and not there; the other requests of the engine learn it, also from one that has ended."""
        self.decisions.late_misses += count_blocks(missed)
        self.decisions.loaded = minus(self.decisions.loaded, missed)
        self._given = minus(self._given, missed)
        if not self._is_foreign:
            self.experience.denied.note(missed, self.names_of, now_ns)

    def _resume(self, load: Load, unwritten: GroupRuns) -> int:
        valid_len = self.planner.valid_len(load.resume_len, unwritten)
        if any(unwritten):
            self._failed_loads += 1
            self._saved_len, self._kept_back = min(self._saved_len, valid_len), False
            self._look_ahead()
        if valid_len:
            self.state = State.COMPUTING
        else:
            self._wait_again()
        return valid_len

    def _wait_again(self) -> None:
        """The engine holds nothing of it any more."""
        self.state = State.WAITING
        self._is_foreign = False
        self._owed = self.planner.nothing

    def _unsaved_hits(self, resume_len: int, now_ns: int) -> GroupRuns:
        """What the engine holds of the sequence, also when it resumes, and the pool was never given."""
        unsaved = self.experience.unsaved
        if not len(unsaved) or not self.policy.stores:
            return self.planner.nothing
        kept = self.planner.kept(self._local_hit_len, self.num_prompt_tokens)
        return unsaved.known(common(kept, self.planner.held(resume_len)), self.names_of, now_ns)

    def _look_ahead(self) -> None:
        """What is owed is stored with the next step, and a block when it is full, but if that can wait for the end."""
        filled_len = 0 if any(self._owed) else self.planner.next_block_end(self._saved_len)
        waits = filled_len is None or (filled_len > self.num_prompt_tokens and self.planner.model.prefix_closed)
        self.next_store_len = None if self._is_foreign or waits else filled_len

    def _plan_store(self, num_tokens: int, now_ns: int) -> Store | None:
        ended = self.state is State.FINISHED
        last_len = num_tokens if ended or not self.planner.model.prefix_closed else self.num_prompt_tokens
        saved_len, self._saved_len = self._saved_len, max(min(num_tokens, last_len), self._saved_len)
        blocks = self.planner.store(saved_len, self._saved_len, self.num_prompt_tokens)
        again = common(self._owed, self.planner.full(num_tokens)) if any(self._owed) else self._owed
        if self._kept_back:
            blocks = minus(blocks, self._given)
        if ended:
            held = self.planner.held(num_tokens)
            blocks, again = common(blocks, held), common(again, held)
            if any(self.decisions.rejected):
                refused = minus(self.decisions.rejected, self._given)
                again = plus(again, common(refused, self.planner.kept(num_tokens, self.num_prompt_tokens)))
        self._owed = self.planner.nothing if ended else minus(self._owed, again)
        self._look_ahead()
        return self._store(plus(blocks, again), again, num_tokens, now_ns)

    def _store(self, blocks: GroupRuns, owed: GroupRuns, computed_len: int, now_ns: int) -> Store | None:
        """`owed` is known to be unsaved; of the rest, what the engine has been through tells."""
        if self._is_foreign or not any(blocks) or not self.policy.stores:
            return None
        again = owed
        if len(self.experience.unsaved):
            again = plus(owed, self.experience.unsaved.known(minus(blocks, owed), self.names_of, now_ns))
        sequence_len = max(computed_len, self.num_prompt_tokens)
        admitted = common(self.policy.admission.admit(blocks, again, sequence_len), blocks)
        num_admitted = count_blocks(admitted)
        if not self.policy.has_room(self.experience.num_storing, num_admitted):
            admitted = self.planner.nothing
        self.experience.unsaved.note(minus(blocks, admitted), self.names_of, now_ns)
        if not any(admitted):
            return None
        store = Store(self._ticket(), admitted, self.hints)
        self._stores[store.ticket] = admitted
        self.experience.num_storing += num_admitted
        self.decisions.stored = plus(self.decisions.stored, admitted)
        self._given = plus(self._given, admitted)
        if any(self.decisions.rejected):
            self.decisions.rejected = minus(self.decisions.rejected, admitted)
        return store
