"""The fast engine against the installed vLLM's own scheduler: the same decisions at the same time, event for event."""

from collections import Counter
from random import Random

import pytest
from hypothesis import example, given

from kvcore.errors import InvalidArgument
from kvcore.gpu_cache import OneGroupCache
from kvcore.pool import BlockPool
from kvsim.events import Kind
from kvsim.invariants import check
from kvsim.run import decisions_digest, simulation
from kvsim.scheduler import Scheduler
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.claude_code import session_files
from kvsim.workload.load import load_trace
from kvsim.workload.offered import offered
from tests.kvsim.small_runs import ASKS, ENGINES, Ask, engine, events, scenario_of, trace_of
from tests.support import shared_data

pytestmark = pytest.mark.engine


def both(scenario, trace):
    """(fast, reference), both run."""
    from kvsim.reference import reference_simulation

    runs = simulation(scenario, trace), reference_simulation(scenario, trace)
    for run in runs:
        run.run()
    return runs


def compare(scenario, trace):
    """Counts of what happened; raises AssertionError at the first difference, the most telling ones first."""
    fast, reference = both(scenario, trace)
    assert fast.decisions() == reference.decisions()
    assert decisions_digest(fast.decisions()) == decisions_digest(reference.decisions())
    fast_events, reference_events = events(fast.log), events(reference.log)
    for kind in (Kind.PREEMPTED, Kind.FIRST_TOKEN, Kind.FINISHED):
        assert of_kind(fast_events, kind) == of_kind(reference_events, kind)
    assert fast_events == reference_events
    assert fast.log.digest() == reference.log.digest()
    assert work_of(fast.log) == work_of(reference.log)
    assert check(fast) == check(reference) == "ok"
    evicted = sum(instance.scheduler.blocks.num_evicted for instance in fast.instances)
    hits = sum(hit_len for _, _, _, hit_len, _ in of_kind(fast_events, Kind.ADMITTED))
    return Counter(Kind(event[1]).name for event in fast_events) + Counter(evicted=evicted, hits=hits)


def work_of(log):
    """Per instance: time it computed, steps, tokens. The fast engine takes several steps as one."""
    work = Counter()
    steps = log.usage.steps.columns()
    columns = (steps[name].tolist() for name in ("instance", "start_ps", "end_ps", "num_steps", "computed_tokens"))
    for instance, start_ps, end_ps, num_steps, num_tokens in zip(*columns, strict=True):
        work.update(
            {(instance, "ps"): end_ps - start_ps, (instance, "steps"): num_steps, (instance, "tokens"): num_tokens}
        )
    return work


def of_kind(log, kind):
    return [event for event in log if event[1] == kind]


# --- recorded and generated traces ------------------------------------------------------------------------------------


def conversation():
    return load_trace(shared_data("mooncake_conversation_trace.jsonl.gz")).head(300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"engine.num_gpu_blocks": 4_000},
        {"engine.num_gpu_blocks": 9_000, "engine.watermark": 0.01},
        {"engine.num_gpu_blocks": 9_000, "cluster.instances": 3},
    ],
    ids=["default-memory", "few-blocks", "watermark", "three-instances"],
)
def test_a_recorded_conversation(more):
    seen = compare(scenario_of({"cluster.instances": 1} | more), conversation())
    assert min(seen[what] for what in ("PREEMPTED", "evicted", "hits")) > 0, seen


@pytest.mark.slow
def test_recorded_sessions_that_wait_for_their_answers(tmp_path):
    for session in session_files(shared_data("claude_code"))[:4]:
        (tmp_path / session.name).symlink_to(session)
    trace = load_trace(tmp_path, use_cache=False).head(200)
    seen = compare(scenario_of({"cluster.instances": 2}), trace)
    assert min(seen[what] for what in ("FINISHED", "evicted", "hits")) > 0, seen


def test_identical_sessions_on_identical_instances():
    """Everything happens at the same instants, and a turn's prompt holds the answer of the one before."""
    trace = generate(Agentic(sessions=8, turns=4, common_len=1_000, first_len=500, turn_len=100, output_len=200))
    seen = compare(scenario_of({"cluster.instances": 3, "engine.num_gpu_blocks": 600}), trace)
    assert seen["FINISHED"] == 32 and seen["hits"] > 0, seen


@pytest.mark.parametrize(
    "mode",
    [
        {"starts": "poisson", "rate_per_s": 2.0, "pacing": "start_to_start", "turn_delay_s": 3.0},
        {"starts": "all_at_once", "max_sessions": 5, "stop_after_sessions": 3},
        {"pacing": "open", "turn_delay_s": 0.5, "min_output_len": 90, "stop_after_s": 0.7},
    ],
)
def test_sessions_that_are_offered_in_a_mode(mode):
    """Whoever schedules, arrivals are the same, and the end comes at the same event."""
    trace = generate(Agentic(sessions=12, turns=3, common_len=512, first_len=600, turn_len=200, output_len=60))
    settings = engine(2, 16, 20_000, 1024, 2048, 0.0) | {f"workload.{key}": value for key, value in mode.items()}
    scenario = scenario_of(settings)
    counts = compare(scenario, offered(trace, scenario.workload, seed=4))
    assert counts["hits"] > 0
    assert (counts["STOPPED"] > 0) == any(key.startswith("stop") for key in mode)


def test_long_answers_that_do_not_fit_together():
    """Admitted because the whole prompt fits; then memory runs out in decode, again and again."""
    rng = Random(0)
    asks = [Ask(new_len=rng.randint(1, 40), output_len=rng.randint(100, 400)) for _ in range(40)]
    seen = compare(scenario_of(engine(1, 16, 1_000, 1024, 8192, 0.0)), trace_of(asks))
    assert seen["PREEMPTED"] > 40, seen


# --- random small runs ------------------------------------------------------------------------------------------------

# The last prompt begins with what the first request generates, and is there before that has ended.
NAMED_WHILE_GENERATED = (
    engine(1, 1, 100, 1024, 8192, 0.0),
    [Ask(output_len=9), Ask("turn", of=0), Ask("fork", of=1, cut=5, new_len=1, gap_us=20_000)],
)

# The last prompt finds no room until the first request has generated its second block.
ROOM_BY_WHAT_IS_GENERATED = (
    engine(1, 3, 99, 2, 8192, 0.0),
    [
        Ask(output_len=26),
        Ask("turn", new_len=0, output_len=0),
        Ask(output_len=0),
        Ask("fork", of=1, cut=27, new_len=70, output_len=0),
    ],
)

GIVES_WAY = (
    engine(1, 1, 92, 2, 8192, 0.0),
    [Ask(output_len=0), Ask(new_len=3), Ask(new_len=50, output_len=2), Ask("turn", of=1, new_len=38, output_len=2)],
)
FORGOTTEN_PREFIX = (
    engine(1, 1, 28, 1, 8192, 0.0),
    [
        *[Ask(output_len=0)] * 10,
        Ask("fork", of=3, cut=1, new_len=0, output_len=27),
        *[Ask(output_len=0)] * 2,
        Ask("fork", of=3, cut=1, output_len=0),
        Ask(new_len=29),
    ],
)


def test_random_small_runs():
    seen = Counter()

    @given(ENGINES, ASKS)
    @example(*NAMED_WHILE_GENERATED)
    @example(*ROOM_BY_WHAT_IS_GENERATED)
    @example(*GIVES_WAY)
    @example(*FORGOTTEN_PREFIX)
    def agree(settings, asks):
        seen.update(compare(scenario_of(settings), trace_of(asks)))

    agree()
    wanted = ("PREEMPTED", "REJECTED", "FINISHED", "evicted", "hits")
    assert min(seen[what] for what in wanted) > 0, seen


def test_a_scenario_with_a_pool_is_refused():
    from kvsim.reference import reference_simulation

    with pytest.raises(InvalidArgument, match=r"scenario = 'pool-16': expected one without \[pool\].*nopool-16"):
        reference_simulation(scenario_of({}, "pool-16"), trace_of([Ask()]))


# --- negative controls: each wrong scheduler is found -----------------------------------------------------------------


class GivesWayItself(Scheduler):
    """Wrong: who lacks blocks is preempted, not the last admitted."""

    def _make_room(self, sequence, num_tokens, step):
        if self.cache.lacking(sequence.tables, num_tokens) > self.blocks.num_free:
            self.running.remove(sequence)
            self._preempt(sequence, step)
            return False
        return super()._make_room(sequence, num_tokens, step)


class AdmitsByChunk(Scheduler):
    """Wrong: the first chunk must fit, not the whole prompt."""

    def _fits(self, sequence, ends, hit, num_tokens, reserved):
        return self.cache.missing(ends, num_tokens) + (hit.num_free if hit else 0) <= self.blocks.num_free


class AdmitsBesidePreemption(Scheduler):
    """Wrong: a step that preempts admits as well."""

    def schedule(self, now_ns):
        step = super().schedule(now_ns)
        if step.preempted:
            budget = self.limits.max_num_batched_tokens - sum(num_new for _, _, num_new in step.scheduled)
            self._schedule_waiting(step, budget)
        return step


class FreesHeadFirst(BlockPool):
    """Wrong: the first part of a sequence is evicted before the later ones."""

    def free(self, holding):
        holding.spans.reverse()
        super().free(holding)


class NamesNoAnswers(OneGroupCache):
    """Wrong: blocks of generated tokens are not found by others."""

    def enter(self, tables, names, computed_len):
        return super().enter(tables, names, min(computed_len, tables.num_prompt_tokens))


# Each was found by random search with the wrong scheduler, and shrunk.
WRONG_SCHEDULERS = [
    (GivesWayItself, *GIVES_WAY),
    (
        AdmitsByChunk,
        engine(1, 1, 48, 2, 8192, 0.04),
        [Ask(output_len=0), Ask(new_len=47, output_len=0)],
    ),
    (
        AdmitsBesidePreemption,
        engine(1, 1, 32, 2, 8192, 0.0),
        [
            *[Ask(output_len=0)] * 17,
            Ask(new_len=16, output_len=13),
            *[Ask(output_len=0)] * 7,
            Ask("fork", of=17, cut=1, new_len=0, output_len=5),
        ],
    ),
]


@pytest.mark.parametrize(("wrong", "settings", "asks"), WRONG_SCHEDULERS)
def test_a_wrong_scheduler_is_found(monkeypatch, wrong, settings, asks):
    assert not differs(settings, asks)
    monkeypatch.setattr("kvsim.run.Scheduler", wrong)
    assert differs(settings, asks)


@pytest.mark.parametrize(
    ("name", "wrong", "case"),
    [("BlockPool", FreesHeadFirst, FORGOTTEN_PREFIX), ("OneGroupCache", NamesNoAnswers, NAMED_WHILE_GENERATED)],
)
def test_a_wrong_cache_is_found(monkeypatch, name, wrong, case):
    assert not differs(*case)
    monkeypatch.setattr(f"kvcore.gpu_cache.{name}", wrong)
    assert differs(*case)


def differs(settings, asks):
    fast, reference = both(scenario_of(settings), trace_of(asks))
    return events(fast.log) != events(reference.log)
