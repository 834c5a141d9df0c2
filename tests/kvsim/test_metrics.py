"""Metrics of a log small enough to compute by hand, and what each number must not be."""

import math
from dataclasses import asdict

import numpy as np
import pytest

from kvsim.clock import PS_PER_MS, PS_PER_S
from kvsim.events import EventLog, Kind
from kvsim.metrics import TOO_LONG, Events, Spread, measure, spread


def log_of(*events):
    """Events as (time_ms, kind, request, a, b)."""
    log = EventLog()
    for time_ms, kind, request, *more in events:
        log.add(time_ms * PS_PER_MS, kind, request, *more)
    return log


# Request 0: prompt 100, 5 tokens, no hit. 1: prompt 200, 3 tokens, local 32, granted 64 of which 48 are left.
# 2: rejected. 3: prompt 50, prefill only, local 16. 4: prompt 150, 2 tokens, no hit, loads after a preemption.
LOG = log_of(
    (0, Kind.ARRIVED, 0, 100, 5),
    (0, Kind.ADMITTED, 0, 0, 0),
    (0, Kind.ARRIVED, 1, 200, 3),
    (10, Kind.ARRIVED, 2, 5000, 1),
    (10, Kind.REJECTED, 2, 5001, 1000),
    (10, Kind.ADMITTED, 1, 32, 64),
    (20, Kind.ARRIVED, 3, 50, 0),
    (30, Kind.FIRST_TOKEN, 0),
    (40, Kind.LOADED, 1, 80, 1),
    (50, Kind.ADMITTED, 3, 16, 0),
    (60, Kind.FIRST_TOKEN, 3),
    (60, Kind.FINISHED, 3, 1, 0),
    (70, Kind.ARRIVED, 4, 150, 2),
    (70, Kind.FINISHED, 0, 5, 0),
    (80, Kind.ADMITTED, 4, 0, 0),
    (90, Kind.FIRST_TOKEN, 1),
    (100, Kind.FIRST_TOKEN, 4),
    (110, Kind.PREEMPTED, 4, 150),
    (120, Kind.LOADED, 4, 144, 2),
    (130, Kind.FINISHED, 1, 3, 0),
    (150, Kind.FINISHED, 4, 2, 0),
    (160, Kind.STORED, 4, 9, 0),
)
METRICS = measure(LOG, num_gpus=2)


def test_counts():
    assert (METRICS.requests_completed, METRICS.requests_rejected) == (4, 1)
    assert METRICS.rejected_reasons == {TOO_LONG: 1}
    assert (METRICS.preemptions, METRICS.late_misses) == (1, 3)


def test_makespan_ends_with_the_last_completion_not_with_the_last_event():
    assert METRICS.simulated_s == 0.150


def test_hit_rates_are_tokens_over_prompt_tokens_of_the_admitted():
    assert METRICS.hit_rate_local == (32 + 16) / 500
    assert METRICS.hit_rate_external == (80 - 32) / 500, "what the load left, not the 64 that were granted"
    assert METRICS.hit_rate == METRICS.hit_rate_local + METRICS.hit_rate_external


def test_latencies():
    assert METRICS.ttft_s == spread(np.array([0.030, 0.090, 0.040, 0.030]))
    assert METRICS.e2e_s == spread(np.array([0.070, 0.130, 0.040, 0.080]))
    assert METRICS.tpot_ms == spread(np.array([40 / 4, 40 / 2, 50 / 1])), "not the one without a second token"


def test_throughput_counts_prompt_and_output_of_the_completed():
    tokens = (100 + 5) + (200 + 3) + 50 + (150 + 2)
    assert METRICS.throughput_tokens_per_s == tokens / 0.150
    assert METRICS.throughput_tokens_per_s_per_gpu == tokens / 0.150 / 2


def test_a_spread_interpolates():
    sample = np.arange(101.0)
    assert spread(sample) == Spread(50.0, 90.0, 99.0, 50.0)
    assert spread(np.array([1.0, 2.0])).p90 == pytest.approx(1.9)


@pytest.mark.parametrize("log", [EventLog(), log_of((0, Kind.ARRIVED, 0, 9, 9), (0, Kind.REJECTED, 0, 18, 16))])
def test_without_a_completed_request_there_is_nothing_and_no_nan(log):
    metrics = measure(log, num_gpus=1)
    assert (metrics.requests_completed, metrics.simulated_s) == (0, 0.0)
    nothing = Spread(None, None, None, None)
    assert metrics.ttft_s == metrics.tpot_ms == metrics.e2e_s == nothing
    assert metrics.hit_rate is metrics.hit_rate_external is metrics.throughput_tokens_per_s is None
    assert not [value for value in asdict(metrics).values() if isinstance(value, float) and math.isnan(value)]


def test_times_are_exact_far_from_zero():
    hour_ms = 100 * 3600 * 1000
    log = log_of(
        (hour_ms, Kind.ARRIVED, 0, 1, 2), (hour_ms, Kind.ADMITTED, 0, 0, 0), (hour_ms + 1, Kind.FIRST_TOKEN, 0),
        (hour_ms + 3, Kind.FINISHED, 0, 2, 0),
    )  # fmt: skip
    metrics = measure(log, num_gpus=1)
    assert (metrics.ttft_s.mean, metrics.tpot_ms.mean) == (0.001, 2.0)
    assert metrics.simulated_s == (hour_ms + 3) * PS_PER_MS / PS_PER_S


def test_a_log_may_grow_while_its_columns_are_kept():
    log = log_of((0, Kind.ARRIVED, 0, 1, 1))
    events = Events(log)
    log.add(1, Kind.REJECTED, 0)
    assert len(events.all.request) == 1
    assert len(Events(log).of(Kind.REJECTED).request) == 1
