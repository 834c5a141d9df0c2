"""With one client, a faster link never raises a time to first token.

One request at a time has every link to itself, and what is loaded does not depend on the link as long as stores have
ended before the next prompt comes: so each prompt waits for the same bytes, over a link that is not slower.

It need not hold where a prompt overtakes the store of the one before it: a link so slow that the blocks are not there
yet makes the engine compute, and that can be faster than loading over a link a little less slow. Such a run is here.
"""

import random
from itertools import pairwise

import pytest

from kvsim.metrics import Events, Requests
from kvsim.run import simulation
from tests.kvsim.small_runs import Ask, scenario_of, trace_of

BANDWIDTHS = [10**8, 3 * 10**8, 10**9, 10**10, 10**11]
ENDS_OF_STORES_US = 10**9


def one_client(seed, delay_us=ENDS_OF_STORES_US):
    """A dialogue that grows, with a pause after each answer."""
    rng = random.Random(seed)
    first = Ask(new_len=rng.randrange(500, 5_000), output_len=100)
    turns = (
        Ask("turn", of=at, new_len=rng.randrange(20, 900), output_len=rng.randrange(1, 300), delay_us=delay_us)
        for at in range(12)
    )
    return [first, *turns]


def ttfts_ps(asks, bandwidth, **settings):
    """Of each request; two engines take turns, so that each needs what the other has computed."""
    fleet = {"cluster.instances": 2, "link.bandwidth_bytes_per_s": bandwidth}
    run = simulation(scenario_of(fleet | settings, "pool-16"), trace_of(asks))
    run.run()
    return Requests(Events(run.log)).ttft_ps().tolist()


def never_rises(times):
    """Whether no time and so no mean is longer than over the slower link before it."""
    return all(fast <= slow for slower, faster in pairwise(times) for slow, fast in zip(slower, faster, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_a_faster_link_never_raises_a_time_to_first_token(seed):
    times = [ttfts_ps(one_client(seed), bandwidth) for bandwidth in BANDWIDTHS]
    assert never_rises(times)
    assert sum(times[-1]) < sum(times[0]) / 2


@pytest.mark.parametrize("seed", range(3))
def test_a_link_of_less_latency_never_raises_a_time_to_first_token(seed):
    assert never_rises([ttfts_ps(one_client(seed), 10**10, **{"link.latency_us": us}) for us in (10**5, 10**3, 10, 0)])


def test_the_law_rejects_a_link_whose_latency_grows_with_its_bandwidth():
    times = [ttfts_ps(one_client(0), each, **{"link.latency_us": each // 10**5}) for each in BANDWIDTHS]
    assert not never_rises(times)


def test_the_law_rejects_a_client_that_overtakes_its_own_stores():
    assert not all(
        never_rises([ttfts_ps(one_client(seed, delay_us=0), bandwidth) for bandwidth in BANDWIDTHS])
        for seed in range(6)
    )
