"""vLLM's own schedulers, whatever they do in whatever order, with the connector: no wrong token, no end, no leak."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

pytestmark = pytest.mark.engine

LINEAGES = (
    "abcdefghijklmnopqrstuvwABC",
    "abcdefghijkl34567890123456",
    "abcdeXYZUVWRSTABCDEFGHIJKL",
    "0123456789abcdefghij012345",
)
MODELS = ("full", "full window", "window", "full wide-window", "narrow-full window", "full tight", "full window window")
PICK = st.integers(0, 11)
SOME = st.sampled_from((0, 0, 0, 0b1, 0b10, 0b1000, 0b10100, 0b11111111))
"""Which blocks of a transfer fail: those whose index modulo 8 is a bit of it."""

SEARCH = settings(
    max_examples=250, stateful_step_count=60, phases=[Phase.generate], database=None, derandomize=True,
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck), deadline=None,
)  # fmt: skip


@pytest.fixture
def engines(monkeypatch):
    """The module of engines without a model; it imports vLLM."""
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    return modelless_engine


def specs_of(engines, model):
    made = {
        "full": lambda: engines.full(4),
        "narrow-full": lambda: engines.full(2),
        "window": lambda: engines.window(4, 9),
        "wide-window": lambda: engines.window(2, 5),
        "tight": lambda: engines.window(4, 2),
    }
    return [made[name]() for name in model.split()]


def fails_by(bits):
    return lambda index: bool(bits >> index % 8 & 1)


class Interleavings(RuleBasedStateMachine):
    """The rules: what requests, engine and pool may do next, in any order."""

    engines = seen = None

    num_kv_heads = 64
    """Of which ranks beyond it are replicas."""

    runner = 1
    """Which of vLLM's model runners there is: for the second one requests that were preempted are new."""

    def breaks(self):
        """Made wrong by the controls."""

    @initialize(
        model=st.sampled_from(MODELS),
        num_ranks=st.sampled_from((1, 1, 2)),
        depth=st.sampled_from((1, 2)),
        num_drafts=st.sampled_from((0, 0, 2)),
        budget=st.sampled_from((5, 8, 24)),
        spare=st.sampled_from((0, 6, 40)),
        policy=st.sampled_from(("fcfs", "fcfs", "priority")),
        caching=st.sampled_from((True, True, True, False)),
    )
    def start(self, model, num_ranks, depth, num_drafts, budget, spare, policy, caching):
        specs = specs_of(self.engines, model)
        # One request of the longest kind fits; several hardly do.
        num_blocks = sum(40 // spec.block_size + 2 for spec in specs) + 2 + spare
        scheduling = depth, num_drafts, budget, policy, caching
        self.engine = self.engines.Engine(specs, num_blocks, num_ranks, *scheduling, self.num_kv_heads, self.runner)
        self.expected, self.num_requests, self.num_before = {}, 0, 0
        self.breaks()

    @precondition(lambda self: len(self.engine.live()) < 5)
    @rule(
        lineage=st.sampled_from(LINEAGES),
        num_prompt=st.integers(1, 26),
        num_output=st.integers(1, 11),
        priority=st.integers(0, 1),
        reads=st.sampled_from((True, True, True, False)),
    )
    def arrive(self, lineage, num_prompt, num_output, priority, reads):
        name, text = f"r{self.num_requests}", lineage[:num_prompt]
        self.num_requests += 1
        self.expected[name] = self.engines.continuation(text, num_prompt + num_output)[num_prompt:]
        self.engine.add(name, text, num_output, priority=priority, skip_reading_prefix_cache=not reads)

    @precondition(lambda self: self.old_names() and not self.engine.scheduled and not self.engine.executed)
    @rule(index=PICK, lineage=st.sampled_from(LINEAGES), num_prompt=st.integers(1, 26))
    def arrive_under_an_old_name(self, index, lineage, num_prompt):
        """A finished request's id may come again, its stores still under way. vLLM minds when a step of it is, too."""
        name, text = self.old_names()[index % len(self.old_names())], lineage[:num_prompt]
        self.engine.outputs[name] = ""
        self.expected[name] = self.engines.continuation(text, num_prompt + 3)[num_prompt:]
        self.engine.add(name, text, 3)

    def old_names(self):
        return sorted(set(self.expected) - set(self.engine.scheduler.requests))

    def sessions(self):
        return [name for name in self.engine.live() if name not in self.expected]

    @precondition(lambda self: not self.engine.num_drafts and not self.sessions())
    @rule(lineage=st.sampled_from(LINEAGES), first=st.integers(1, 12), more=st.integers(1, 12))
    def session(self, lineage, first, more):
        """Input that comes in parts: each goes on with what was computed of the answer to the one before.

        With drafts vLLM 0.32 takes what it had accepted beyond the answer's end for computed, with no connector too.
        """
        name = f"s{self.num_requests}"
        self.num_requests += 1
        self.engine.add(name, lineage[:first], 2, resumable=True)
        self.engine.add(name, lineage[first : first + more], 3, resumable=True)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @rule()
    def schedule(self):
        self.engine.schedule()

    @rule()
    def execute(self):
        self.engine.execute()

    @rule()
    def update(self):
        self.engine.update()

    @rule(times=st.integers(1, 3))
    def answer(self, times):
        for _ in range(times):
            self.engine.lookups.answer(self.engine.pool)

    @rule(kind=st.sampled_from(("load", "store")), rank=st.integers(0, 1), failing=SOME)
    def move(self, kind, rank, failing):
        self.engine.move(kind, rank, fails_by(failing))

    @rule(times=st.integers(1, 5), failing=SOME)
    def advance(self, times, failing):
        """The pool answers at once, and moves what it does not lose."""
        for _ in range(times):
            self.engine.lookups.answer(self.engine.pool)
            for kind, rank in (("load", 0), ("load", 1), ("store", 0)):
                self.engine.move(kind, rank, fails_by(failing))
            self.engine.step()

    @rule()
    def go_on(self):
        """Until all requests have ended; what they left in the pool is looked up by the next ones."""
        for name in self.sessions():  # they would wait for more, and keep their blocks
            self.engine.abort(name)
        self.engine.drain()
        self.engine.scheduler.reset_prefix_cache()

    @rule(lineage=st.sampled_from(LINEAGES), num_prompt=st.integers(4, 26), num_output=st.integers(1, 11))
    def come_back(self, lineage, num_prompt, num_output):
        """To an engine that holds nothing any more: it waits for a load, if the pool has its blocks."""
        self.go_on()
        self.arrive(lineage, num_prompt, num_output, 0, True)
        self.step(1)
        self.answer(3)
        self.step(1)

    @rule(milliseconds=st.sampled_from((1, 1, 100, 5_000)))
    def wait(self, milliseconds):
        self.engine.now_ns += milliseconds * 1_000_000

    @precondition(lambda self: self.engine.live())
    @rule(index=PICK)
    def abort(self, index):
        live = self.engine.live()
        self.engine.abort(live[index % len(live)])

    @rule(index=PICK)
    def evict(self, index):
        for key in sorted(self.engine.pool, key=str)[index::4]:
            del self.engine.pool[key]

    @rule()
    def reset_local_cache(self):
        """Succeeds only when no block is in use."""
        self.engine.scheduler.reset_prefix_cache()

    @rule()
    def reset_under_running_requests(self):
        try:
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:  # raised into the call of whoever wants it, not into the engine's loop
            assert "Failed to reset KV cache" in str(error)

    @precondition(lambda self: self.num_requests > self.num_before + 2)
    @precondition(lambda self: not self.engine.scheduled and not self.engine.executed)
    @rule()
    def update_weights(self):
        """Rarely: afterwards the pool is of no use."""
        self.num_before = self.num_requests
        self.seen["weights"] += self.engine.update_weights()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.go_on()
        self.engine.check_nothing_is_left()
        for name, text in self.expected.items():
            assert text.startswith(self.engine.outputs[name]), (name, text, self.engine.outputs[name])
        for made in self.engine.decisions:
            self.seen.update(hits=made.granted_len > 0, late_misses=made.late_misses, rejected=any(made.rejected))


def search(engines, breaks=Interleavings.breaks, **options):
    kind = type("Search", (Interleavings,), {"engines": engines, "breaks": breaks, "seen": Counter(), **options})
    run_state_machine_as_test(kind, settings=SEARCH)
    return kind.seen


@pytest.mark.parametrize(("num_kv_heads", "runner"), [(64, 1), (1, 2)])
def test_any_interleaving(engines, num_kv_heads, runner):
    """With one KV head two ranks share each object, and take turns at storing."""
    seen = search(engines, num_kv_heads=num_kv_heads, runner=runner)
    assert min(seen[event] for event in ("hits", "late_misses", "rejected", "weights")) > 10, seen


# -- controls ---------------------------------------------------------------------------------------------------------


def without_pins(machine):
    """A store reads blocks that may be somebody else's by then."""
    half, pool = machine.engine.half, machine.engine.block_pool
    half._pool = SimpleNamespace(
        blocks=pool.blocks,
        get_num_free_blocks=pool.get_num_free_blocks,
        touch=lambda blocks: None,
        free_blocks=lambda blocks: None,
    )


def never_reporting_a_failed_load(machine):
    """What was not loaded is taken for loaded."""
    for rank in machine.engine.ranks:
        rank.half._loads.end = lambda job, failed, thread=rank.half._loads: type(thread).end(thread, job, [])


def forgetting_ranks(machine):
    """The first rank's report ends the job."""
    machine.engine.half._ranks = 1


def keeping_what_old_weights_computed(machine):
    """The pool is not reset with the engine's own cache."""
    machine.engine.connector.reset_cache = lambda: True


@pytest.mark.parametrize(
    "breaks", [without_pins, never_reporting_a_failed_load, forgetting_ranks, keeping_what_old_weights_computed]
)
def test_a_broken_connector_is_found(engines, breaks):
    with pytest.raises(AssertionError):
        search(engines, breaks)


# -- what was found, one by one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [{"depth": 2}, {"num_drafts": 2}])
def test_blocks_are_stored_when_their_last_token_is_known(engines, overlap):
    """A step may compute tokens nobody knows yet: what an overlapping step samples, and drafts. They have no hash."""
    engine = engines.Engine(specs_of(engines, "full window"), 40, **overlap)
    engine.add("r", "abcdefg", 12)
    engine.drain()
    text = engines.continuation("abcdefg", 19)
    assert engine.outputs["r"] == text[7:]
    assert {key.block_hash.decode() for key in engine.pool} == {text[:end] for end in (4, 8, 12, 16)}


def test_a_failed_load_does_not_wait_for_room_it_has_reserved_itself(engines):
    """vLLM keeps a failed load's blocks reserved; a second load of a prompt of half the cache would wait for ever."""
    engine = engines.Engine([engines.full(4)], 16)
    text = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    engine.add("first", text, 1)
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("second", text, 1)
    engine.step()
    engine.lookups.answer(engine.pool)
    engine.step()
    engine.move("load", 0, fails_by(0b1))
    engine.step()
    engine.now_ns += 11 * 10**9  # what was denied may be asked for again
    engine.drain()
    assert (engine.decisions[-1].granted_len, engine.decisions[-1].late_misses) == (32, 1)
    assert engine.outputs["second"] == engine.outputs["first"]


def test_control_a_second_attempt_waits_for_ever(engines, monkeypatch):
    make = engines.make_scheduler

    def patient(*arguments):
        scheduler = make(*arguments)
        half = scheduler.connector._scheduler
        half._policy = replace(half._policy, max_load_attempts=2)
        return scheduler

    monkeypatch.setattr(engines, "make_scheduler", patient)
    with pytest.raises(AssertionError, match="never end"):
        test_a_failed_load_does_not_wait_for_room_it_has_reserved_itself(engines)


def write_two_texts(engine):
    """Two texts of 36 tokens that are in the pool, and nowhere else."""
    texts = [lineage + "abcdefghij" for lineage in (LINEAGES[0], LINEAGES[3])]
    for number, text in enumerate(texts):
        engine.add(f"writer {number}", text, 1)
        engine.drain()
        assert engine.scheduler.reset_prefix_cache()
    return texts


def start_two_loads_in_an_engine_that_computes_one_prompt(engines):
    """Of a window, a prompt that is loaded needs less room than one that is computed."""
    engine = engines.Engine(specs_of(engines, "full window"), 28, depth=2)
    texts = write_two_texts(engine)
    for number, text in enumerate(texts):
        engine.add(f"reader {number}", text, 1)
    for _ in range(4):
        engine.step()
        engine.lookups.answer(engine.pool)
    assert len(engine.ranks[0].half._loads.waiting) == 2
    return engine


def test_two_loads_that_fail_together_do_not_wait_for_each_other(engines):
    engine = start_two_loads_in_an_engine_that_computes_one_prompt(engines)
    for _ in range(2):
        engine.move("load", 0, fails_by(0b1))
    engine.drain()
    engine.check_nothing_is_left()
    assert [engine.outputs[f"reader {number}"] for number in (0, 1)] == [
        engine.outputs[f"writer {number}"] for number in (0, 1)
    ]


def test_control_a_request_that_insists_on_being_first_waits_for_the_other_for_ever(engines):
    engine = start_two_loads_in_an_engine_that_computes_one_prompt(engines)
    report = engine.half._report

    def reported(*arguments):
        report(*arguments)
        for tracked in engine.half._tracked.values():
            tracked.starts_over = False

    engine.half._report = reported
    for _ in range(2):
        engine.move("load", 0, fails_by(0b1))
    with pytest.raises(AssertionError, match="never end"):
        engine.drain()


def start_a_load_that_fails_before_one_of_higher_priority(engines):
    engine = engines.Engine([engines.full(4)], 16, policy="priority")
    texts = write_two_texts(engine)
    engine.add("late", texts[0], 1, priority=1)
    for _ in range(2):
        engine.step()
        engine.lookups.answer(engine.pool)
    engine.step()
    engine.add("early", texts[1], 1)
    engine.move("load", 0, fails_by(0b1))
    return engine


def test_a_load_does_not_wait_for_room_that_a_failed_one_has_reserved(engines):
    engine = start_a_load_that_fails_before_one_of_higher_priority(engines)
    engine.drain()
    engine.check_nothing_is_left()
    assert engine.outputs["late"] == engine.outputs["writer 0"]
    assert engine.outputs["early"] == engine.outputs["writer 1"]


def test_control_what_is_offered_before_a_failed_load_is_made_up_for_waits_for_ever(engines):
    engine = start_a_load_that_fails_before_one_of_higher_priority(engines)
    engine.half._must_wait = lambda tracked, resume_len: False
    with pytest.raises(AssertionError, match="never end"):
        engine.drain()


@pytest.mark.parametrize("num_blocks", range(18, 30))
def test_loads_leave_each_other_the_room_for_a_step(engines, num_blocks):
    load_two_prompts(engines, num_blocks)


def test_control_loads_that_only_vllm_reserves_room_for_end_with_none_to_go_on(engines):
    def hangs(num_blocks):
        try:
            load_two_prompts(engines, num_blocks, must_wait=lambda tracked, resume_len: False)
        except AssertionError as error:
            return "never end" in str(error)

    assert any(hangs(num_blocks) for num_blocks in range(18, 30))


def load_two_prompts(engines, num_blocks, must_wait=None):
    engine = engines.Engine(specs_of(engines, "full window"), num_blocks, budget=8)
    if must_wait is not None:
        engine.half._must_wait = must_wait
    texts = write_two_texts(engine)
    for number, text in enumerate(texts):
        engine.add(f"reader {number}", text, 1)
    for _ in range(4):  # both are offered a hit before a load ends
        engine.step()
        engine.lookups.answer(engine.pool)
    engine.drain()
    engine.check_nothing_is_left()
    assert [made.granted_len for made in engine.decisions] == [0, 0, 32, 32]
    for number in (0, 1):
        assert engine.outputs[f"reader {number}"] == engine.outputs[f"writer {number}"]


def test_the_id_of_a_finished_request_may_come_again_at_once(engines):
    engine = engines.Engine([engines.full(4)], 40)
    engine.add("r", "abcdefgh", 1)
    engine.step()
    engine.lookups.answer(engine.pool)
    engine.step()
    engine.step()
    assert engine.half._jobs, "its store is under way"
    engine.add("r", "abcdeXYZUVWRST", 4)
    engine.abort("r")
    engine.add("r", "abcdeXYZUVWRST", 4)
    engine.drain()
    engine.check_nothing_is_left()
    assert engine.outputs["r"][1:] == engines.continuation("abcdeXYZUVWRST", 18)[14:]


def test_other_connectors_may_have_loaded_what_this_one_offered(engines):
    """Under MultiConnector the grant is 0 then; what the other brought is stored like what was computed."""
    engine = engines.Engine([engines.full(4)], 40)
    engine.add("first", "abcdefghijklm", 1)
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.connector.get_num_new_matched_tokens = lambda request, local: (
        engine.half.get_num_new_matched_tokens(request, local)[0] and 0,
        False,
    )
    engine.add("second", "abcdefghijklm", 1)
    engine.drain()
    engine.check_nothing_is_left()
    assert (engine.decisions[-1].external_hit_len, engine.decisions[-1].granted_len) == (12, 0)
    assert engine.outputs["second"] == engine.outputs["first"]
