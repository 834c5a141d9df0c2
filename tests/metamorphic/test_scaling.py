"""Units are nothing but names: what is scaled as a whole does not change.

- Twice the bytes of everything (blocks, memories, bandwidths) and the same times: the same run, to the last event.
- Everything twice as slow (step times, latencies, patience, pauses, 1 / bandwidth): the same run, at twice the time.

What is scaled is found by the units in the names of settings, which every setting with a unit has. Step times are
theory's (`tests.theory.server`): the roofline has constants of nature, such as the bytes of a weight.
"""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings

from kvsim.clock import PS_PER_NS
from kvsim.events import Kind
from kvsim.run import simulation
from tests.kvsim.small_runs import ASKS, Ask, events, scenario_of, trace_of
from tests.theory.server import TOKEN_PS, PerToken

TABLES = ("pool", "link", "host")
SIZE = re.compile(r"bytes(_per_\w+|_to_use)?$")
"""Settings in bytes, or in bytes per something."""

TIME = re.compile(r"(?<!per)_(s|ms|us|ns)$")
RATE = re.compile(r"_per_s$")

CROWDED = {
    "cluster.instances": 2,
    "engine.block_size": 16,
    "engine.num_gpu_blocks": 60,
    "pool.segment_bytes_per_instance": 2**27,
    "pool.lease_ttl_ms": 20,
    "host.cpu_bytes_to_use": 2**25,
    "host.link_bytes_per_s": 2**34,
    "link.bandwidth_bytes_per_s": 2**31,
}
"""Small memories, slow links. Powers of two: halves are exact."""

FIRST = Ask(new_len=300, output_len=40)
OTHERS = [Ask("fork", cut=280, new_len=200, output_len=30, gap_us=gap_us) for gap_us in (10**6, 0, 0, 10**5, 0, 0, 0)]
BURST = [FIRST, *OTHERS]


def settings_in(unit, but=()):
    """Names and values of the settings in this unit, but for some."""
    scenario = scenario_of(CROWDED, "pool-16")
    return {
        f"{table}.{name}": value
        for table in TABLES
        for name, value in getattr(scenario, table).model_dump(exclude_none=True).items()
        if unit.search(name) and f"{table}.{name}" not in but
    }


def run_events(trace, changes, token_ps=TOKEN_PS):
    """Everything that happened."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvsim.scenario.make_step_time", lambda *_: PerToken(token_ps))
        run = simulation(scenario_of(CROWDED | changes, "pool-16"), trace)
    run.run()
    return events(run.log)


def half_the_bytes(trace, but=()):
    """A run in which everything is half as large."""
    halves = {name: value // 2 for name, value in settings_in(SIZE, but).items()}
    return run_events(trace, {"engine.kv_cache_dtype": "fp8"} | halves)


def half_the_speed(trace, but=()):
    """A run in which everything takes twice as long, with its times halved."""
    slower = {name: value // 2 for name, value in settings_in(RATE, but).items()}
    longer = {name: 2 * value for name, value in settings_in(TIME, but).items()}
    spread = replace(trace, arrival_ps=2 * trace.arrival_ps, delay_ps=2 * trace.delay_ps)
    rows = run_events(spread, slower | longer, 2 * TOKEN_PS)
    return [(time_ps // 2, *what) for time_ps, *what in rows]


def are_same(left, right):
    """Whether the same happened in the same order, at the same times but for roundings to picoseconds."""
    near = all(abs(one[0] - other[0]) <= PS_PER_NS for one, other in zip(left, right, strict=False))
    return near and [row[1:] for row in left] == [row[1:] for row in right]


def test_units_are_found():
    assert settings_in(SIZE).keys() >= {"pool.segment_bytes_per_instance", "link.bandwidth_bytes_per_s"}
    assert settings_in(SIZE).keys() >= {"host.cpu_bytes_to_use", "host.link_bytes_per_s"}
    assert settings_in(RATE).keys() == {"link.bandwidth_bytes_per_s", "host.link_bytes_per_s"}
    assert settings_in(TIME).keys() >= {"pool.lookup_per_key_ns", "pool.lookup_rtt_us", "pool.lease_ttl_ms"}
    assert settings_in(TIME).keys() >= {"pool.session_ttl_s", "link.latency_us", "host.latency_us"}
    assert not settings_in(TIME).keys() & settings_in(SIZE).keys()


@settings(max_examples=25)
@given(ASKS)
@example(BURST)
def test_half_the_bytes_of_everything_is_the_same_run(asks):
    trace = trace_of(asks)
    assert half_the_bytes(trace) == run_events(trace, {})


@settings(max_examples=25)
@given(ASKS)
@example(BURST)
def test_half_the_speed_of_everything_is_the_same_run_at_half_the_speed(asks):
    trace = trace_of(asks)
    assert are_same(half_the_speed(trace), run_events(trace, {}))


@pytest.mark.parametrize("scale", [half_the_bytes, half_the_speed])
def test_what_is_scaled_in_part_is_another_run(scale):
    trace = trace_of(BURST)
    kinds = {kind for _, kind, *_ in run_events(trace, {})}
    assert {Kind.LOADED, Kind.STORED} <= kinds
    assert are_same(scale(trace), run_events(trace, {}))
    assert not are_same(scale(trace, but=["link.bandwidth_bytes_per_s"]), run_events(trace, {}))
