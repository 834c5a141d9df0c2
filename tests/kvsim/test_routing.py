"""Routing in a whole simulation: what a router is told and when, what each policy does to sessions and hits."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.routing.pool_aware import PoolAware
from kvcore.routing.round_robin import RoundRobin
from kvcore.routing.router import Fact
from kvsim import run
from kvsim.config.cluster import ROUTINGS
from kvsim.dispatcher import Dispatcher
from kvsim.events import Kind
from kvsim.invariants import check
from kvsim.metrics import measure
from kvsim.routers import ROUTERS, make_router
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.source import trace_of as workload_of
from tests.kvsim.small_runs import ASKS, ENGINES, POOLS, Ask, engine, events, scenario_of, trace_of

MS = 1_000
FEW = settings(max_examples=settings.default.max_examples // 3)
SMALL = ["cluster.instances=4", "workload.sessions=17", "workload.turns=6", "workload.common_len=1000"]


def finished(scenario, trace, max_jump=None):
    done = simulation(scenario, trace, max_jump)
    done.run()
    assert check(done) == "ok"
    return done


def instances_of(done):
    """Instance by request, of those that finished."""
    return {request: instance for _, kind, request, _, instance in events(done.log) if kind == Kind.FINISHED}


def test_every_name_has_a_router():
    assert ROUTERS.keys() == set(ROUTINGS)


# --- what a router is told --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spy:
    """Sends everything to the first instance and keeps what it was told."""

    reads: ClassVar = frozenset(Fact)
    told: list = field(default_factory=list)

    def choose(self, arrival, snapshots):
        self.told.append((arrival, tuple(snapshots)))
        return 0


NO_POOL = engine(2, 16, 2_560, 8, 8192, 0.0)
POOL = NO_POOL | {"pool.segment_bytes_per_instance": 10**10, "link.bandwidth_bytes_per_s": 10**10}


def spied(scenario, trace, router):
    """The simulation, run to its end with this router."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_router", lambda _: router)
        return finished(scenario, trace)


def told(asks, interval_ms):
    """What a router is told of these requests at two instances of 160 blocks of 16 tokens."""
    spy = Spy()
    spied(scenario_of(NO_POOL | {"routing.snapshot_interval_ms": interval_ms}), trace_of(asks), spy)
    return spy.told


def test_loads_are_as_old_as_the_interval_allows_and_count_what_was_sent_since():
    # One step takes about 7 ms, so a request of 100 tokens of output runs for most of a second.
    seen = told([Ask(new_len=160, output_len=100, gap_us=gap * MS) for gap in (0, 30, 0, 40)], interval_ms=50)
    assert [snapshots[0].taken_at_ns for _, snapshots in seen] == [0, 0, 0, 70 * 1_000_000]
    loads = [(s[0].num_waiting, s[0].num_running, s[0].num_queued_tokens, s[0].num_prompt_tokens) for _, s in seen]
    assert loads == [(0, 0, 0, 0), (1, 0, 160, 160), (2, 0, 320, 320), (0, 3, 0, 480)]
    assert all(snapshots[1] == replace(snapshots[1], num_waiting=0, num_running=0) for _, snapshots in seen)


def test_without_an_interval_everything_is_fresh():
    seen = told([Ask(new_len=160, output_len=5, gap_us=gap * MS) for gap in (0, 30, 900)], interval_ms=0)
    assert [snapshots[0].taken_at_ns for _, snapshots in seen] == [0, 30_000_000, 930_000_000]
    assert [(s[0].num_waiting, s[0].num_running) for _, s in seen] == [(0, 0), (0, 1), (0, 0)]


def forks(*gaps_ms):
    return [Ask(new_len=320, output_len=2), *(Ask("fork", 0, 320, 80, 2, gap_us=gap * MS) for gap in gaps_ms)]


def test_prefixes_are_as_old_as_the_interval_allows():
    assert [arrival.cached_lens for arrival, _ in told(forks(30, 30), interval_ms=50)] == [(0, 0), (0, 0), (320, 0)]
    assert [arrival.cached_lens for arrival, _ in told(forks(30), interval_ms=0)] == [(0, 0), (320, 0)]


def test_a_whole_prompt_is_never_cached():
    asks = [Ask(new_len=320), Ask("fork", 0, 320, 0, gap_us=900 * MS)]
    assert [arrival.cached_lens for arrival, _ in told(asks, interval_ms=0)] == [(0, 0), (304, 0)]


def test_an_answer_is_known_when_it_is_complete():
    asks = [Ask(new_len=160, output_len=65), Ask("turn", 0, new_len=50, delay_us=1)]
    (_, _), (turn, _) = told(asks, interval_ms=0)
    assert turn.cached_lens == (224, 0), "160 + 64 computed tokens: the last one is never computed"


def test_nothing_is_known_of_an_answer_that_is_not_complete():
    """The second continues what the first will have said; when it comes, little of that is said."""
    turns = trace_of([Ask(new_len=160, output_len=65), Ask("turn", 0, new_len=50)])
    open_loop = replace(turns, after=np.arange(2), arrival_ps=np.array([0, 10**11]))
    spy = Spy()
    spied(scenario_of(NO_POOL), open_loop, spy)
    assert [arrival.cached_lens for arrival, _ in spy.told] == [(0, 0), (160, 0)]


def test_the_pool_is_asked_when_the_request_arrives_and_does_not_notice():
    spy, control = Spy(), RoundRobin()
    lookups = [
        spied(scenario_of(POOL, "pool-16"), trace_of(forks(900, 0)), it).pool.store.counters.lookups
        for it in (spy, control)
    ]
    assert [arrival.pool_hit_len for arrival, _ in spy.told] == [0, 320, 320]
    assert lookups[0] <= lookups[1] == 3
    assert [arrival.pool_hit_len for arrival, _ in told(forks(900), 50)] == [None, None], "no pool"


@dataclass(frozen=True)
class ByLength:
    """The prompt's length modulo the number of instances: one token of the future shows."""

    reads: ClassVar = frozenset()

    def choose(self, arrival, snapshots):
        return arrival.prompt_len % len(snapshots)


def choices_ignore_the_future(settings_, asks, make_router_of):
    """Whether no choice changes with the length of the last arrival's answer."""
    asks = [replace(ask, start="fork" if ask.start == "turn" else ask.start) for ask in asks]
    other = [*asks[:-1], replace(asks[-1], output_len=asks[-1].output_len + 7)]
    scenario = scenario_of(settings_)
    served = [instances_of(spied(scenario, trace_of(some), make_router_of(scenario))) for some in (asks, other)]
    return all(served[0][request] == served[1][request] for request in served[0].keys() & served[1].keys())


@given(ENGINES, ASKS)
@FEW
def test_the_length_of_an_answer_changes_no_choice(engines, asks):
    for routing in ROUTINGS:
        assert choices_ignore_the_future(engines | {"cluster.routing": routing}, asks, make_router), routing
    assert choices_ignore_the_future(engines, asks, lambda _: ByLength())


def test_control_a_front_that_tells_the_future_is_found(monkeypatch):
    honest = Dispatcher._arrival

    def leaking(self, sequence, session):
        return replace(honest(self, sequence, session), prompt_len=sequence.input_len + sequence.max_tokens)

    monkeypatch.setattr(Dispatcher, "_arrival", leaking)
    assert not choices_ignore_the_future(NO_POOL, [Ask(new_len=5, output_len=2)], lambda _: ByLength())


# --- what the policies do ---------------------------------------------------------------------------------------------


def routed(name, routing, settings_=SMALL):
    config = load(name, [*settings_, f"cluster.routing={routing}"])
    return finished(config, workload_of(config))


def test_round_robin_is_the_order_of_arrivals():
    done = routed("nopool-16", "round_robin")
    arrived = [request for _, kind, request, _, _ in events(done.log) if kind == Kind.ARRIVED]
    served = instances_of(done)
    assert [served[request] for request in arrived] == [number % 4 for number in range(len(arrived))]


def test_round_robin_gathers_nothing():
    config = load("pool-16", SMALL)
    done = simulation(config, workload_of(config))
    done.pool.store.holds = None
    done.run()
    dispatcher = done.cluster._dispatcher
    assert isinstance(dispatcher, Dispatcher) and not dispatcher._in_flight and not dispatcher._news


def test_a_session_has_one_instance():
    config = load("nopool-16", [*SMALL, "cluster.routing=session_affinity"])
    trace = workload_of(config)
    served = instances_of(finished(config, trace))
    homes = {(int(trace.session[request]), instance) for request, instance in served.items()}
    assert len(homes) == 17 and {instance for _, instance in homes} == {0, 1, 2, 3}


def test_who_looks_at_prefixes_hits_more():
    local = {
        routing: measure(routed("nopool-16", routing).log, num_gpus=4).hit_rate_local
        for routing in ("round_robin", "session_affinity", "prefix_aware", "pool_aware")
    }
    assert local["round_robin"] < min(local["session_affinity"], local["prefix_aware"], local["pool_aware"]), local


def test_with_a_pool_who_looks_at_prefixes_moves_less():
    moved = {
        routing: sum(link.moved_bytes for link in [path.get_link for path in routed("pool-16", routing).pool.paths])
        for routing in ("round_robin", "pool_aware")
    }
    assert 0 < moved["pool_aware"] < moved["round_robin"] / 2, moved


def test_what_a_token_takes_comes_from_the_scenario_unless_told():
    given_ns = load("pool-16", ["routing.prefill_ns_per_token=7", "routing.transfer_ns_per_token=8"])
    assert ROUTERS["pool_aware"](given_ns) == PoolAware(7, 8)
    derived = make_router(load("pool-16", ["cluster.routing=pool_aware"]))
    # 2 x 7.0e9 weights in the layers at 45 % of 989e12 flops, and attention over a mean of 4,096 tokens.
    assert 32_000 < derived.prefill_ns_per_token < 45_000
    assert derived.transfer_ns_per_token == 131_072 * 10**9 // 9_878_424_780 + 1
    assert make_router(load("nopool-16", ["cluster.routing=pool_aware"])).transfer_ns_per_token == 0


# --- exactness --------------------------------------------------------------------------------------------------------


@given(ENGINES, POOLS | st.none(), ASKS, st.sampled_from([0, 1, 50, 1_000]))
@FEW
def test_a_jump_is_exact_under_every_policy(engines, pool, asks, interval_ms):
    base = engines | (pool or {}) | {"routing.snapshot_interval_ms": interval_ms}
    for routing in ROUTINGS:
        scenario = scenario_of(base | {"cluster.routing": routing}, "pool-16" if pool else "nopool-16")
        jumping, stepping = (finished(scenario, trace_of(asks), max_jump) for max_jump in (None, 1))
        assert events(jumping.log) == events(stepping.log), routing


DIGESTS = """
from kvsim.run import simulation, decisions_digest
from kvsim.run import simulation
from kvsim.config.cluster import ROUTINGS
from kvsim.scenario import load
from kvsim.workload.source import trace_of
import json
found = {}
for name in ("nopool-16", "pool-16"):
    for routing in ROUTINGS:
        config = load(name, [*%r, "cluster.routing=" + routing])
        done = simulation(config, trace_of(config))
        done.run()
        found[name + routing] = done.log.digest() + decisions_digest(done.decisions())
print(json.dumps(found))
"""


def test_one_digest_under_any_hash_seed():
    outputs = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DIGESTS % [*SMALL, "workload.sessions=37"]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].values())) == 2 * len(ROUTINGS), "the policies differ"
