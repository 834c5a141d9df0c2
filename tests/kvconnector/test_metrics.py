"""What is counted adds up, over threads, ranks, halves and steps, and is what Prometheus shows."""

import os
import random
import subprocess
import sys
import threading
from collections import Counter as Count
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvconnector.metrics import (
    BREAKER,
    BYTES,
    DURATION,
    GAUGE_STEPS,
    KEYS,
    LATE_MISSES,
    LOOKUPS,
    MAX_PINNED,
    METRIC_OF,
    METRICS,
    PINNED,
    PREFIX,
    PROMPT_TOKENS,
    REJECTED,
    ROUNDS,
    UNRECORDED,
    WAITING,
    Kind,
    Operation,
    Tally,
    combine,
    summary,
)

from kvcore.breaker import BreakerState
from kvcore.ports import StoreOutcome
from tests.kvconnector.test_transfer import DEADLINE_MS, HandClock, job, take, transfers, until  # noqa: F401

OK, MISSING, TIMEOUT = StoreOutcome.OK, StoreOutcome.MISSING, StoreOutcome.TIMEOUT
LOAD_TOOK = DURATION.of("load")


def numbers():
    """What a tally might give: any series, each with the kind of number that it has."""
    value = {Kind.SECONDS: st.lists(st.integers(1, 10**9), min_size=1, max_size=3)}
    return st.lists(st.sampled_from(sorted(METRIC_OF)), unique=True, max_size=8).flatmap(
        lambda names: st.fixed_dictionaries(
            {name: value.get(METRIC_OF[name].kind, st.integers(0, 10**9)) for name in names}
        )
    )


def total(parts):
    """The sum of many numbers, the obvious way."""
    made = {}
    for part in parts:
        for series, value in part.items():
            before = made.get(series, [] if isinstance(value, list) else 0)
            made[series] = max(before, value) if METRIC_OF[series].kind is Kind.GAUGE else before + value
    return {series: sorted(value) if isinstance(value, list) else value for series, value in made.items()}


# -- the tally --------------------------------------------------------------------------------------------------------


def test_what_was_counted_is_taken_once():
    tally = Tally()
    tally.add(LOOKUPS.of(), 2)
    tally.add(LOOKUPS.of(), 3)
    tally.moved(Operation.LOAD, 4096, 7)
    tally.moved(Operation.LOAD, 0, 5)
    assert tally.take() == {LOOKUPS.of(): 5, BYTES.of("load"): 4096, LOAD_TOOK: [7, 5]}
    assert tally.take() == {}


def test_a_gauge_is_told_while_it_is_not_0_and_once_when_it_is_again():
    tally = Tally()
    levels = [1, 0, 3, 3, 0]
    tally.watch(PINNED.of(), levels.pop)
    unread = [{}] * (GAUGE_STEPS - 1)
    assert [tally.take() for _ in range(GAUGE_STEPS)] == [{}, *unread]
    assert [tally.take() for _ in range(3)] == [{PINNED.of(): 3}, {PINNED.of(): 3}, {PINNED.of(): 0}]
    assert [tally.take() for _ in unread] == unread
    assert tally.take() == {PINNED.of(): 1}


def test_gauges_are_read_with_whatever_was_counted():
    tally = Tally()
    tally.watch(PINNED.of(), [3, 0].pop)
    assert tally.take() == {}
    tally.add(LOOKUPS.of(), 1)
    assert tally.take() == {LOOKUPS.of(): 1, PINNED.of(): 3}


def test_nothing_is_lost_between_threads_that_count_and_one_that_takes():
    tally, taken = Tally(), []

    def count():
        for _ in range(5_000):
            tally.add(LOOKUPS.of(), 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.append(tally.take())
    taken.append(tally.take())
    assert total(taken) == {LOOKUPS.of(): 20_000}


def test_a_tally_nobody_takes_stays_small(monkeypatch):
    monkeypatch.setattr("kvconnector.metrics.MAX_EVENTS", 10)
    tally = Tally()
    for _ in range(1_000):
        tally.add(LOOKUPS.of(), 1)
    assert tally.take() == {LOOKUPS.of(): 10}


@given(st.lists(st.sampled_from(StoreOutcome), max_size=40))
def test_keys_are_counted_by_outcome(outcomes):
    tally = Tally()
    tally.keys(Operation.STORE, outcomes)
    assert tally.take() == {KEYS.of("store", kind.value): count for kind, count in Count(outcomes).items()}


@given(st.integers(1, 50), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_every_prompt_token_has_one_tier(prompt_len, local_hit_len, num_granted, resume_len):
    """One token of the prompt after the other, the obvious way."""
    tally = Tally()
    request = SimpleNamespace(num_prompt_tokens=prompt_len, num_computed_tokens=resume_len)
    tally.prompt(request, local_hit_len, local_hit_len + num_granted)
    ends = {"local": local_hit_len, "pool": local_hit_len + num_granted, "sibling": prompt_len}
    tiers = Count(
        "computed" if token >= resume_len else next(tier for tier, end in ends.items() if token < end)
        for token in range(prompt_len)
    )
    assert tally.take() == {PROMPT_TOKENS.of(tier): count for tier, count in tiers.items()}


# -- ranks, halves, steps ---------------------------------------------------------------------------------------------


def combined(parts, rng, combine=combine):
    """All parts as one, neighbours first, at any place: ranks, then halves, then steps."""
    parts = list(parts)
    while len(parts) > 1:
        index = rng.randrange(len(parts) - 1)
        parts[index : index + 2] = [combine(*parts[index : index + 2])]
    return parts[0]


@given(st.lists(numbers(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_numbers_add_up_in_any_order(parts, rng):
    assert total([combined(parts, rng)]) == total(parts)


@pytest.mark.parametrize(
    "wrong", [lambda left, right: left | right, lambda left, right: right | left, lambda left, right: dict(left)]
)
def test_control_numbers_that_do_not_add_up(wrong):
    parts = [{LOOKUPS.of(): 1}, {LOOKUPS.of(): 2, LOAD_TOOK: [3]}, {PINNED.of(): 2}]
    assert total([combined(parts, random.Random(0))]) == total(parts)
    assert total([combined(parts, random.Random(0), wrong)]) != total(parts)


def test_combining_changes_neither_side():
    left, right = {LOAD_TOOK: [1], LOOKUPS.of(): 1}, {LOAD_TOOK: [2], LOOKUPS.of(): 2}
    assert combine(left, right) == {LOAD_TOOK: [1, 2], LOOKUPS.of(): 3}
    assert (left, right) == ({LOAD_TOOK: [1], LOOKUPS.of(): 1}, {LOAD_TOOK: [2], LOOKUPS.of(): 2})


def test_of_a_gauge_the_largest_counts():
    waiting = WAITING.of("store")
    assert combine({waiting: 5}, {waiting: 2}) == {waiting: 5}


def test_the_log_line_has_means_and_maxima_of_durations():
    assert summary({LOAD_TOOK: [1_000_000, 3_000_000], BYTES.of("load"): 64}) == {
        "bytes_total:load": 64,
        "operation_ms:load:count": 2,
        "operation_ms:load:mean": 2.0,
        "operation_ms:load:max": 3.0,
    }


# -- a transfer thread tells ------------------------------------------------------------------------------------------


def test_a_transfer_thread_tells_of_every_job_also_of_one_that_never_began(transfers):  # noqa: F811
    clock, began, goes_on = HandClock(), threading.Event(), threading.Event()

    def move(_, deadline_ns):
        began.set()
        assert goes_on.wait(5)
        return [OK, MISSING]

    thread, told = transfers(move, clock), []
    thread.on_ended = lambda job, outcomes, took_ns: told.append((job.job_id, list(outcomes), took_ns))
    thread.submit(job(1))
    assert began.wait(5)
    clock.pass_ms(10)
    thread.submit(job(2))
    assert thread.num_waiting == 1
    clock.pass_ms(DEADLINE_MS)
    thread.take_ended()
    goes_on.set()
    until(lambda: len(told) == 2)
    ms = 1_000_000
    assert told == [(2, [TIMEOUT, TIMEOUT], DEADLINE_MS * ms), (1, [OK, MISSING], (DEADLINE_MS + 10) * ms)]
    assert thread.num_waiting == 0


# -- vLLM's side ------------------------------------------------------------------------------------------------------


@pytest.fixture
def prometheus():
    """(metrics of two engines in a registry of their own, a function that gives the registry's samples)."""
    from kvconnector.connector import KVTwinConnector
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    engines = {0: ["m", "0"], 1: ["m", "1"]}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = KVTwinConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], engines)

    def samples():
        lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    return metrics, samples


@pytest.mark.engine
def test_prometheus_shows_what_was_observed(prometheus):
    metrics, samples = prometheus
    metrics.observe({PROMPT_TOKENS.of("pool"): 672, PINNED.of(): 21, LOAD_TOOK: [2_000_000, 60_000_000_000]}, 1)
    metrics.observe({PROMPT_TOKENS.of("pool"): 32, PINNED.of(): 0}, 1)
    shown = samples()
    assert shown['vllm:kvtwin_prompt_tokens_total{engine="1",model_name="m",tier="pool"}'] == 704
    assert shown['vllm:kvtwin_pinned_blocks{engine="1",model_name="m"}'] == 0
    took = 'vllm:kvtwin_operation_seconds_%s{engine="1",%smodel_name="m",operation="load"}'
    assert shown[took % ("count", "")] == 2
    assert shown[took % ("sum", "")] == pytest.approx(60.002)
    assert [shown[took % ("bucket", f'le="{le}",')] for le in ("0.001", "0.0025", "30.0", "+Inf")] == [0, 1, 1, 2]
    others = {name: value for name, value in shown.items() if 'engine="0"' in name and "_created" not in name}
    assert set(others.values()) == {0.0}


@pytest.mark.engine
def test_every_series_is_there_from_the_start(prometheus):
    """Whatever a tally can give, an engine's metrics can show: no key is missing, and none has two names."""
    metrics, samples = prometheus
    before = samples()
    for metric in METRICS:
        for values in metric.all_values():
            metrics.observe({metric.of(*values): [1] if metric.kind is Kind.SECONDS else 1})
    after = samples()
    assert before.keys() == after.keys()
    assert all(name.startswith(PREFIX) for name in after)
    changed = [name for name in after if after[name] != before[name] and "_bucket" not in name and "_sum" not in name]
    assert len(changed) == len(METRIC_OF)


@pytest.mark.engine
def test_ranks_aggregate_as_vllm_does_it_and_travel_as_msgpack():
    import msgspec
    from kvconnector.connector import KVTwinConnector
    from kvconnector.stats import Stats

    ranks = [Stats({BYTES.of("load"): 10, LOAD_TOOK: [1]}), Stats({BYTES.of("load"): 20, LOAD_TOOK: [2]})]
    both = ranks[0].aggregate(ranks[1])
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(both.to_dict()))
    stats = KVTwinConnector.build_kv_connector_stats(there)
    assert (type(stats), stats.data, stats.is_empty()) == (Stats, {BYTES.of("load"): 30, LOAD_TOOK: [1, 2]}, False)
    assert KVTwinConnector.build_kv_connector_stats().is_empty()
    assert ranks[0].data == {BYTES.of("load"): 10, LOAD_TOOK: [1]}
    assert stats.reduce()["bytes_total:load"] == 30


# -- vLLM's scheduler -------------------------------------------------------------------------------------------------

TEXT = "abcdefghijklmnopqrstuvw"


@pytest.fixture
def engine(monkeypatch):
    """A real scheduler with blocks of 4 tokens, whose connector's numbers are kept in `told`."""
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    return listened_to(modelless_engine.Engine([modelless_engine.full(4)], 64, num_ranks=2))


def listened_to(engine):
    engine.told, take_stats = [], engine.connector.get_kv_connector_stats

    def told():
        stats = take_stats()
        engine.told.append(stats.data if stats is not None else {})
        return stats

    engine.connector.get_kv_connector_stats = told
    return engine


def run(engine, name, num_output=1):
    """What the scheduler half counted for a prompt of TEXT."""
    engine.told.clear()
    engine.add(name, TEXT, num_output)
    engine.drain()
    return total(engine.told)


def of_interest(taken):
    return {name: value for name, value in taken.items() if METRIC_OF[name].kind is Kind.COUNTER}


@pytest.mark.engine
def test_tiers_lookups_and_keys_of_a_miss_a_pool_hit_and_a_local_hit(engine):
    blocks, keys = 5, 2 * 5  # of 23 tokens 20 can be hit; two ranks
    assert of_interest(run(engine, "miss")) == {
        PROMPT_TOKENS.of("computed"): 23, LOOKUPS.of(): 1, ROUNDS.of(): 1, KEYS.of("lookup", "missing"): keys,
    }  # fmt: skip
    assert engine.scheduler.reset_prefix_cache()
    assert of_interest(run(engine, "pool")) == {
        PROMPT_TOKENS.of("pool"): 4 * blocks, PROMPT_TOKENS.of("computed"): 3,
        LOOKUPS.of(): 1, ROUNDS.of(): 1, KEYS.of("lookup", "ok"): keys,
    }  # fmt: skip
    assert of_interest(run(engine, "local")) == {PROMPT_TOKENS.of("local"): 20, PROMPT_TOKENS.of("computed"): 3}


@pytest.mark.engine
def test_what_a_load_does_not_deliver_is_no_hit(engine):
    run(engine, "miss")
    assert engine.scheduler.reset_prefix_cache()
    move = engine.move
    engine.move = lambda kind, rank: move(kind, rank, lambda index: kind == "load" and index == 2)
    taken = of_interest(run(engine, "late"))
    assert (taken[PROMPT_TOKENS.of("pool")], taken[PROMPT_TOKENS.of("computed")]) == (8, 15)
    assert (taken[LATE_MISSES.of()], REJECTED.of() in taken) == (1, False)


@pytest.mark.engine
def test_rejected_stores_are_counted_and_pins_are_seen_while_they_last(engine):
    move = engine.move
    engine.move = lambda kind, rank: move(kind, rank, lambda index: index == 0)
    taken = run(engine, "rejected")
    assert taken[REJECTED.of()] == 1
    assert taken[PINNED.of()] >= 5
    levels = [told[PINNED.of()] for told in engine.told if PINNED.of() in told]
    assert levels[-1] == 0
    assert all(levels[:-1])


@pytest.mark.engine
def test_how_many_blocks_stores_may_pin_is_told_once(engine):
    run(engine, "first")
    assert [told[MAX_PINNED.of()] for told in engine.told if MAX_PINNED.of() in told] == [64]
    assert MAX_PINNED.of() not in run(engine, "second")


@pytest.mark.engine
def test_requests_that_the_decision_log_lacks_are_counted(monkeypatch, tmp_path):
    from kvconnector import connector as connector_module
    from kvconnector import record

    from tests.kvconnector import modelless_engine

    read_config, path = connector_module.read_config, str(tmp_path / "log")
    monkeypatch.setattr(connector_module, "read_config", lambda *given: replace(read_config(*given), record=path))
    monkeypatch.setattr(record, "MAX_WAITING", 0)
    modelless_engine.without_threads(monkeypatch)
    engine = listened_to(modelless_engine.Engine([modelless_engine.full(4)], 64))
    taken = combine(run(engine, "dropped"), run(engine, "dropped, too"))
    left = engine.connector.get_kv_connector_stats()
    assert combine(taken, left.data if left else {})[UNRECORDED.of()] == 2


@pytest.mark.engine
def test_nothing_is_told_of_a_step_in_which_nothing_happened(engine):
    engine.add("long", TEXT, 30)
    engine.drain()
    assert engine.told.count({}) > 10


@pytest.mark.engine
def test_under_multi_connector_our_numbers_are_told_by_our_name(monkeypatch):
    """It looks the class up in vLLM's registry, and the API server ends when it is not there."""
    from kvconnector.connector import KVTwinConnector
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    step = MultiConnector.build_kv_connector_stats({KVTwinConnector.__name__: {LOOKUPS.of(): 1}})
    both = step.aggregate(MultiConnector.build_kv_connector_stats({KVTwinConnector.__name__: {LOOKUPS.of(): 2}}))
    assert both.to_dict() == {KVTwinConnector.__name__: {LOOKUPS.of(): 3}}
    assert both.reduce() == {KVTwinConnector.__name__: {LOOKUPS.of(): 3}}
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    with pytest.raises(ValueError, match="not registered"):
        MultiConnector.build_kv_connector_stats({KVTwinConnector.__name__: {LOOKUPS.of(): 1}})


@pytest.mark.engine
def test_loaded_by_our_module_s_path_we_have_a_name_in_vllm_s_registry():
    script = (
        "import kvconnector.connector\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "KVConnectorFactory.get_connector_class_by_name('KVTwinConnector')\n"
    )
    without_plugins = {**os.environ, "VLLM_PLUGINS": ""}
    subprocess.run([sys.executable, "-c", script], env=without_plugins, check=True, capture_output=True, timeout=120)


@pytest.mark.engine
def test_a_pool_that_is_not_asked_is_seen_and_that_it_is_asked_again_too(engine):
    series = BREAKER.of("scheduler")
    for state, level in ((BreakerState.OPEN, 2), (BreakerState.HALF_OPEN, 1)):
        engine.connector._store.state = state
        run(engine, state.value)
        assert engine.told
        assert all(told[series] == level for told in engine.told)
    engine.connector._store.state = BreakerState.CLOSED
    run(engine, "closed")
    assert [told.get(series) for told in engine.told] == [0, *[None] * (len(engine.told) - 1)]
