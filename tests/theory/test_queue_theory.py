"""Instance and cluster against queueing theory, through the real scheduler, router and clock.

Poisson arrivals at rate lambda, service times S, rho = lambda E[S] < 1:

    M/G/1 FIFO          waiting time  E[W] = lambda E[S^2] / (2 (1 - rho))   (Pollaczek and Khinchine; M/M/1, M/D/1)
    M/M/1 FIFO          sojourn time  P(T > t) = exp(-(mu - lambda) t)
    E_k/M/1 FIFO        E[W] = s / (mu (1 - s)), s the root in (0, 1) of s = (k lambda / (k lambda + mu (1 - s)))^k
    processor sharing   E[T | size x] = x / (1 - rho), whatever the sizes
    M/G/infinity        E[T | size x] = x
(Kleinrock, Queueing Systems I, 5.6 and 6.4; II, 4.4.)

The first three are prompts that an engine takes one at a time; processor sharing is decoding in one batch when each
token takes as long as any other. The bands are those of `tests.theory.bands`; each has a model that it rejects.
"""

import random
from functools import cache
from itertools import islice
from math import exp
from statistics import fmean

import pytest

from tests.theory.bands import agrees
from tests.theory.server import (
    MEAN_LEN,
    MEAN_SERVICE_S,
    TOKEN_PS,
    PerStep,
    PerToken,
    answers,
    poisson,
    prompts,
    served,
)
from tests.theory.sizes import exponential, fixed, two_sizes

pytestmark = pytest.mark.slow

RHO = 0.5
REPLICATIONS = range(16)
NUM_REQUESTS = 1_800
WARM_UP = 200

SQUARED_VARIATION = {exponential: 1.0, fixed: 0.0, two_sizes: 1.44}
"""Variance over squared mean of the sizes: two_sizes has 0.1 * 4.6^2 + 0.9 * 0.6^2 - 1."""


@cache
def open_runs(make_trace, size_of, step_time=PerToken(), max_num_seqs=1_024, num_instances=1):  # noqa: B008 (a value)
    """Of each replication, the requests after the warm-up as (service time, sojourn time), in mean service times."""
    return [one_run(make_trace, size_of, step_time, max_num_seqs, num_instances, seed) for seed in REPLICATIONS]


def one_run(make_trace, size_of, step_time, max_num_seqs, num_instances, seed):
    rng, sizes = random.Random(seed), random.Random(1_000 + seed)
    lengths = [size_of(sizes) for _ in range(NUM_REQUESTS)]
    arrivals = islice(poisson(rng, num_instances * RHO / MEAN_SERVICE_S), NUM_REQUESTS)
    settings = {"engine.max_num_seqs": max_num_seqs, "cluster.instances": num_instances}
    sojourns_ps = served(make_trace(arrivals, lengths), step_time, settings).e2e_ps().tolist()
    pairs = zip(lengths, sojourns_ps, strict=True)
    return [(size / MEAN_LEN, sojourn_ps / (MEAN_LEN * TOKEN_PS)) for size, sojourn_ps in pairs][WARM_UP:]


def waits(size_of, **options):
    """Mean waiting time of each replication, of prompts that an engine takes one at a time."""
    runs = open_runs(prompts, size_of, max_num_seqs=1, **options)
    return [fmean(sojourn - service for service, sojourn in run) for run in runs]


def waiting_time(squared_variation):
    """Pollaczek and Khinchine."""
    return RHO * (1 + squared_variation) / (2 * (1 - RHO))


@pytest.mark.parametrize("size_of", SQUARED_VARIATION)
def test_an_engine_that_takes_one_prompt_at_a_time_is_mg1(size_of):
    assert agrees(waits(size_of), waiting_time(SQUARED_VARIATION[size_of]))
    for other in SQUARED_VARIATION.keys() - {size_of}:
        assert not agrees(waits(size_of), waiting_time(SQUARED_VARIATION[other])), other


def test_the_band_of_md1_rejects_an_engine_that_is_a_tenth_slower():
    assert not agrees(waits(fixed, step_time=PerToken(TOKEN_PS * 11 // 10)), waiting_time(0))


def shares_above(size_of, bound):
    """Share of the requests, of each replication, with a longer sojourn than the bound."""
    return [fmean(sojourn > bound for _, sojourn in run) for run in open_runs(prompts, size_of, max_num_seqs=1)]


@pytest.mark.parametrize("times_mean", [0.5, 1.0, 2.0])
def test_the_sojourn_time_of_mm1_is_exponential(times_mean):
    bound = times_mean / (1 - RHO)
    assert agrees(shares_above(exponential, bound), exp(-times_mean))
    assert not agrees(shares_above(fixed, bound), exp(-times_mean))


def erlang_waiting_time(num_servers):
    """Of each of the servers that take turns at the requests of a Poisson stream."""
    root = 0.0
    for _ in range(200):
        root = (num_servers * RHO / (num_servers * RHO + 1 - root)) ** num_servers
    return root / (1 - root)


def test_each_engine_behind_a_round_robin_router_is_ek_m_1():
    assert agrees(waits(exponential, num_instances=3), erlang_waiting_time(3))
    assert not agrees(waits(exponential, num_instances=3), erlang_waiting_time(1)), "a router by chance gives M/M/1"
    assert erlang_waiting_time(1) == pytest.approx(waiting_time(1))


def slowdowns(size_of, only=None, **options):
    """Mean of sojourn over service time, of each replication, of answers that are decoded in one batch."""
    runs = open_runs(answers, size_of, **options)
    return [fmean(sojourn / service for service, sojourn in run if only in (None, service)) for run in runs]


@pytest.mark.parametrize(("size_of", "only"), [(fixed, None), (two_sizes, 0.6), (two_sizes, 4.6)])
def test_decoding_in_one_batch_is_processor_sharing_whatever_the_sizes(size_of, only):
    assert agrees(slowdowns(size_of, only), 1 / (1 - RHO))


def test_processor_sharing_rejects_one_at_a_time_and_a_batch_that_costs_nothing():
    assert not agrees(slowdowns(two_sizes, only=0.6, max_num_seqs=1), 1 / (1 - RHO))
    free = slowdowns(fixed, step_time=PerStep())
    assert not agrees(free, 1 / (1 - RHO))
    assert fmean(free) == pytest.approx(1.0, abs=1e-4), "M/G/infinity: nobody waits, but for the step that runs"
