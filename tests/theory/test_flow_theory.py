"""Conservation of flow on whole runs: Little's law, the laws of closed loops, and a pool's link that is saturated.

    Little              L = lambda W, of the whole system and of any part of it
    closed loop         N clients, think time Z, service S, all constant: response R = max(S, N S - Z),
                        throughput X = N / (R + Z) = min(N / (S + Z), 1 / S)
    saturated link      n loads of B bytes that start together end together, n B / bandwidth later
(Little 1961; Denning and Buzen, The Operational Analysis of Queueing Network Models, 1978.)
"""

import random
from itertools import count

import pytest

from kvsim.clock import PS_PER_S
from kvsim.events import Kind
from kvsim.metrics import Events, Requests
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.sequence import Status
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.source import trace_of
from tests.theory.bands import agrees
from tests.theory.server import MEAN_LEN, TOKEN_PS, PerToken, served

pytestmark = pytest.mark.slow

CROWDED = [
    "cluster.instances=3",
    "engine.num_gpu_blocks=4_000",
    "link.bandwidth_bytes_per_s=2e9",
    "workload.sessions=60",
    "workload.turns=8",
    "workload.common_len=4_000",
    "workload.first_len=2_000",
    "workload.turn_len=1_000",
    "workload.output_len=300",
    "workload.delay_s=2",
    "workload.start_spread_s=60",
]
"""Sessions that crowd small caches: requests wait, load, are preempted and decode."""

REPLICATIONS = 16
STRATA = 250


def crowded_run():
    scenario = load("pool-16", CROWDED)
    return simulation(scenario, trace_of(scenario))


def observed(run, is_counted, makespan_ps):
    """Mean number of sequences that count, as 16 independent observers saw it at random times of the run."""
    rng, seen = random.Random(0), [[] for _ in range(REPLICATIONS)]

    def observe(observer):
        observer.append(sum(sequence is not None and is_counted(sequence) for sequence in run.cluster.sequences))

    for observer in seen:
        for stratum in range(STRATA):
            at_ps = int((stratum + rng.random()) / STRATA * makespan_ps)
            run.clock.at(at_ps, lambda observer=observer: observe(observer))
    run.run()
    return [sum(observer) / STRATA for observer in seen]


@pytest.fixture(scope="module")
def undisturbed():
    run = crowded_run()
    run.run()
    return run


PARTS = {
    "in the system": (lambda sequence: sequence.status is not Status.FINISHED, Kind.FINISHED),
    "not yet admitted": (lambda sequence: not sequence.admitted, Kind.ADMITTED),
    "without a first token": (lambda sequence: not sequence.num_output, Kind.FIRST_TOKEN),
}
"""Which sequences are there, as the scheduler keeps them, and the event at which they leave, in the log."""


def time_in_part_ps(log, leave):
    """Arrival to the first event of the kind, summed over all requests."""
    arrived, left = (Events(log).of(kind) for kind in (Kind.ARRIVED, leave))
    first = dict(zip(left.request[::-1].tolist(), left.time_ps[::-1].tolist(), strict=True))
    return sum(first[request] - at_ps for request, at_ps in zip(arrived.request, arrived.time_ps.tolist(), strict=True))


@pytest.mark.parametrize("part", PARTS)
def test_littles_law_holds_in_a_crowded_run(undisturbed, part):
    is_counted, leave = PARTS[part]
    makespan_ps = Requests(Events(undisturbed.log)).end_ps()
    run = crowded_run()
    seen = observed(run, is_counted, makespan_ps)
    assert run.log.digest() == undisturbed.log.digest(), "observers change nothing"
    number = time_in_part_ps(run.log, leave) / makespan_ps
    assert number > 1
    assert agrees(seen, number)
    assert not agrees(seen, number * 0.97), "a law in which one request in 33 is lost"


def test_littles_law_rejects_a_count_that_forgets_who_loads(undisturbed):
    assert {Kind.PREEMPTED, Kind.LOADED} <= set(Events(undisturbed.log).all.kind.tolist())
    makespan_ps = Requests(Events(undisturbed.log)).end_ps()
    seen = observed(crowded_run(), lambda s: s.status not in (Status.FINISHED, Status.LOADING), makespan_ps)
    assert not agrees(seen, time_in_part_ps(undisturbed.log, Kind.FINISHED) / makespan_ps)


# --- closed loops ---------------------------------------------------------------------------------------------------


def closed_loop(num_clients, num_rounds, think_ps):
    """Each client sends a prompt, waits for the answer and thinks."""
    builder = TraceBuilder()
    for at in range(num_clients * num_rounds):
        builder.start(at, at - num_clients if at >= num_clients else None, think_ps, at % num_clients)
        builder.hold(MEAN_LEN, 1, [(at, MEAN_LEN)], at, 0)
    return builder.build("loop", "loop", 1)


def responses_ps(num_clients, think_ps, **settings):
    """Response times when all have settled: of the last third of the rounds."""
    run = served(closed_loop(num_clients, 30, think_ps), PerToken(), {"engine.max_num_seqs": 1} | settings)
    return run.e2e_ps()[20 * num_clients :].tolist()


@pytest.mark.parametrize("num_clients", [1, 2, 5, 6, 7, 8, 20])
def test_response_in_a_closed_loop_has_its_knee_where_all_think_while_one_is_served(num_clients):
    service_ps = MEAN_LEN * TOKEN_PS
    think_ps = 5 * service_ps
    theory_ps = max(service_ps, num_clients * service_ps - think_ps)
    # Who waits in line may have arrived in the same picosecond as another: 1 ps each way.
    assert responses_ps(num_clients, think_ps) == pytest.approx([theory_ps] * 10 * num_clients, abs=num_clients)
    if num_clients > 6:
        two = responses_ps(num_clients, think_ps, **{"cluster.instances": 2})
        assert two != pytest.approx([theory_ps] * len(two), rel=0.01), "two engines have their knee elsewhere"


# --- the pool's link ------------------------------------------------------------------------------------------------

PROMPT_LEN = 16_000
LINK_BYTES_PER_S = 2 * 10**9


def loads_s(num_loads, *settings):
    """Seconds that each of the loads takes when one engine starts them all at once: prompts of another engine."""
    builder, streams = TraceBuilder(), count(1)
    names = [next(streams) for _ in range(num_loads)]

    def ask(at_s, stream, input_len):
        builder.start(at_s * PS_PER_S, None, 0, 0)
        builder.hold(input_len, 1, [(stream, input_len)], stream, 0)

    for at, name in enumerate(names):  # requests go to the engines by turns
        ask(at, name, PROMPT_LEN)
        ask(at, next(streams), 1)
    for name in names:
        ask(10**4, next(streams), 1)
        ask(10**4, name, PROMPT_LEN + 1)
    trace = builder.build("loads", "loads", 1)
    run = simulation(
        load("pool-16", ["cluster.instances=2", f"link.bandwidth_bytes_per_s={LINK_BYTES_PER_S}", *settings]), trace
    )
    run.run()
    admitted, loaded = (Events(run.log).of(kind) for kind in (Kind.ADMITTED, Kind.LOADED))
    start_ps = dict(zip(admitted.request.tolist(), admitted.time_ps.tolist(), strict=True))
    assert len(loaded.request) == num_loads
    ends = zip(loaded.request.tolist(), loaded.time_ps.tolist(), strict=True)
    return [(end_ps - start_ps[request]) / PS_PER_S for request, end_ps in ends]


def test_loads_that_start_together_share_the_link_and_end_together():
    scenario = load("pool-16")
    one_s = PROMPT_LEN * scenario.kv_bytes_per_token / LINK_BYTES_PER_S
    times_s = {num_loads: loads_s(num_loads) for num_loads in (1, 2, 4, 8)}
    for num_loads, taken_s in times_s.items():
        assert taken_s == pytest.approx([num_loads * one_s] * num_loads, rel=1e-3)
    slower = loads_s(8, f"link.bandwidth_bytes_per_s={LINK_BYTES_PER_S * 99 // 100}")
    assert slower != pytest.approx([8 * one_s] * 8, rel=1e-3)
