"""The link against queueing theory: processor sharing is insensitive to the size distribution, a FIFO link is not.

Poisson arrivals at rate lambda, service times S on an empty link, rho = lambda E[S] < 1:
    processor sharing   E[T] = E[S] / (1 - rho),  E[T | size x] = x / (1 - rho)
    FIFO                E[T] = E[S] + lambda E[S^2] / (2 (1 - rho))
(Kleinrock, Queueing Systems II, 4.4; for exponential S the first is 1 / (mu - lambda) and FIFO's mean is equal to it,
which is why the sizes here are not exponential where FIFO has to be told apart.)
The bands are those of `tests.theory.bands`.
"""

import random
from collections import deque
from statistics import fmean

import pytest

from kvsim.clock import PS_PER_S, Clock
from kvsim.links.fair_link import FairLink
from kvsim.links.network import Link, Network
from tests.theory.bands import agrees
from tests.theory.sizes import MEAN_SIZE, exponential, fixed, two_sizes

pytestmark = pytest.mark.slow

BANDWIDTH = 1_000_000  # bytes/s: a byte takes a microsecond
MEAN_BYTES = MEAN_SIZE
MEAN_SERVICE_S = MEAN_BYTES / BANDWIDTH
NUM_REPLICATIONS = 24
NUM_TRANSFERS = 1_500
WARM_UP = 200


class FifoLink:
    """The wrong link: one transfer at a time, first come first served."""

    def __init__(self, clock, latency_ps, bandwidth_bytes_per_s):
        assert latency_ps == 0
        self.clock, self.bandwidth = clock, bandwidth_bytes_per_s
        self.queue = deque()

    @property
    def num_active(self):
        return len(self.queue)

    def transfer(self, size_bytes, on_done):
        self.queue.append((size_bytes, on_done))
        if len(self.queue) == 1:
            self.serve()

    def serve(self):
        self.clock.after(self.queue[0][0] * PS_PER_S // self.bandwidth, self.complete)

    def complete(self):
        _, on_done = self.queue.popleft()
        if self.queue:
            self.serve()
        on_done()


class TwoLinks:
    """A route of a network whose first link is too wide to matter."""

    def __init__(self, clock, latency_ps, bandwidth_bytes_per_s):
        assert latency_ps == 0
        self.network = Network(clock)
        self.route = Link("wide", 7 * bandwidth_bytes_per_s), Link("narrow", bandwidth_bytes_per_s)

    @property
    def num_active(self):
        return self.route[1].num_active

    def transfer(self, size_bytes, on_done):
        self.network.transfer(self.route, size_bytes, on_done)


SHARED = [FairLink, TwoLinks]
"""Each is processor sharing."""


def poisson_run(link_type, size_of, rho, seed):
    """(size_bytes, sojourn_s) per transfer of one open run, after the warm-up."""
    rng = random.Random(seed)
    clock = Clock()
    link = link_type(clock, 0, BANDWIDTH)
    sojourns = [None] * NUM_TRANSFERS

    def start(index, size):
        began_ps = clock.now_ps
        link.transfer(size, lambda: sojourns.__setitem__(index, (size, (clock.now_ps - began_ps) / PS_PER_S)))

    arrival_s = 0.0
    for index in range(NUM_TRANSFERS):
        arrival_s += rng.expovariate(rho / MEAN_SERVICE_S)
        size = size_of(rng)
        clock.at(round(arrival_s * PS_PER_S), lambda index=index, size=size: start(index, size))
    clock.run()
    return sojourns[WARM_UP:]


def mean_sojourns(link_type, size_of, rho, only_size=None):
    return [
        fmean(sojourn for size, sojourn in poisson_run(link_type, size_of, rho, seed) if only_size in (None, size))
        for seed in range(NUM_REPLICATIONS)
    ]


@pytest.mark.parametrize("link_type", SHARED)
@pytest.mark.parametrize("size_of", [exponential, fixed, two_sizes])
def test_mean_sojourn_of_processor_sharing_is_insensitive(size_of, link_type):
    assert agrees(mean_sojourns(link_type, size_of, rho=0.6), MEAN_SERVICE_S / (1 - 0.6))


@pytest.mark.parametrize("size_of", [fixed, two_sizes])
def test_mean_sojourn_rejects_fifo(size_of):
    assert not agrees(mean_sojourns(FifoLink, size_of, rho=0.6), MEAN_SERVICE_S / (1 - 0.6))


@pytest.mark.parametrize("size_bytes", [6_000, 46_000])
def test_sojourn_is_proportional_to_size(size_bytes):
    theory = size_bytes / BANDWIDTH / (1 - 0.6)
    assert agrees(mean_sojourns(FairLink, two_sizes, 0.6, only_size=size_bytes), theory)


def test_proportionality_rejects_fifo():
    theory = 6_000 / BANDWIDTH / (1 - 0.6)
    assert not agrees(mean_sojourns(FifoLink, two_sizes, 0.6, only_size=6_000), theory)


def equal_transfers(link_type, num_transfers):
    clock = Clock()
    link = link_type(clock, 0, BANDWIDTH)
    ends = []
    for _ in range(num_transfers):
        link.transfer(MEAN_BYTES, lambda: ends.append(clock.now_ps))
    clock.run()
    return ends


def test_equal_transfers_end_together():
    assert equal_transfers(FairLink, 7) == [7 * MEAN_BYTES * PS_PER_S // BANDWIDTH] * 7
    assert len(set(equal_transfers(FifoLink, 7))) == 7, "a FIFO link must not pass"


def littles_law(link_type, lost_every):
    """(area under the number in the link, sum of sojourns), in ps, of a run that starts and ends empty.

    The area is sampled at arrivals and departures from `num_active`, the sojourns are the callers'; a link that loses
    every `lost_every`-th departure keeps the one and not the other.
    """
    rng = random.Random(7)
    clock = Clock()
    link = link_type(clock, 0, BANDWIDTH)
    area_ps = sojourns_ps = last_ps = present = departures = 0

    def observe():
        nonlocal area_ps, last_ps, present
        area_ps += present * (clock.now_ps - last_ps)
        last_ps, present = clock.now_ps, link.num_active

    def arrive():
        began_ps = clock.now_ps

        def depart():
            nonlocal sojourns_ps, departures
            departures += 1
            if not lost_every or departures % lost_every:
                sojourns_ps += clock.now_ps - began_ps
            observe()

        link.transfer(exponential(rng), depart)
        clock.after(0, observe)

    at_ps = 0
    for _ in range(2_000):
        at_ps += round(rng.expovariate(0.8 / MEAN_SERVICE_S) * PS_PER_S)
        clock.at(at_ps, arrive)
    clock.run()
    return area_ps, sojourns_ps


@pytest.mark.parametrize("link_type", SHARED)
def test_littles_law_holds_to_the_picosecond(link_type):
    area_ps, sojourns_ps = littles_law(link_type, lost_every=None)
    assert area_ps == sojourns_ps > 0
    area_ps, sojourns_ps = littles_law(link_type, lost_every=100)
    assert area_ps != sojourns_ps


def closed_loop(link_type, num_clients, num_rounds):
    """Seconds until each client has made its transfers, one after the other."""
    clock = Clock()
    link = link_type(clock, 0, BANDWIDTH)
    ends = {}

    def again(client, left):
        if left:
            link.transfer(MEAN_BYTES * (client + 1), lambda: again(client, left - 1))
        else:
            ends[client] = clock.now_ps / PS_PER_S

    for client in range(num_clients):
        again(client, num_rounds)
    clock.run()
    return ends, link


def test_a_saturated_link_is_always_busy_and_moves_its_bandwidth():
    ends, link = closed_loop(FairLink, num_clients=5, num_rounds=40)
    total_bytes = 40 * MEAN_BYTES * sum(range(1, 6))
    assert link.moved_bytes == total_bytes
    assert link.busy_ps == round(max(ends.values()) * PS_PER_S)
    assert 0 <= link.busy_ps - total_bytes * PS_PER_S // BANDWIDTH <= link.num_busy_periods
    # Every client gets a fifth of the link while all are there: the smallest one is done first, at 5 times its work.
    assert ends[0] == pytest.approx(5 * 40 * MEAN_SERVICE_S, rel=1e-9)
    fifo, _ = closed_loop(FifoLink, num_clients=5, num_rounds=40)
    assert fifo[0] != pytest.approx(ends[0], rel=0.5), "FIFO makes small clients wait for large ones"


def moved_on_a_line(num_first, num_second, seconds=10):
    """Bytes that one client of each route moved over two links in a line, all of them always with a transfer."""
    clock = Clock()
    network, (first, second) = Network(clock), (Link(name, BANDWIDTH) for name in "ab")
    moved = {}

    def again(name, route):
        moved[name] = moved.get(name, -MEAN_BYTES) + MEAN_BYTES
        if clock.now_ps < seconds * PS_PER_S:
            network.transfer(route, MEAN_BYTES, lambda: again(name, route))

    again("both", (first, second))
    for number in range(num_first):
        again(f"first {number}", (first,))
    for number in range(num_second):
        again(f"second {number}", (second,))
    clock.run()
    return moved


def test_on_a_line_whoever_crosses_both_links_gets_as_much_as_at_the_narrower():
    """Max-min fairness; a share for each link crossed (proportional fairness) would give it less."""
    moved, whole = moved_on_a_line(num_first=1, num_second=4), 10 * BANDWIDTH
    assert moved["both"] == pytest.approx(whole / 5, rel=0.01)
    assert moved["second 3"] == pytest.approx(whole / 5, rel=0.01)
    assert moved["first 0"] == pytest.approx(whole * 4 / 5, rel=0.01), "what the other link keeps from it is this one's"


def test_overload_grows_without_bound():
    # rho = 1.5: when the last of n arrivals comes, n (E[S] - 1 / lambda) of the work is still there, a third of it all.
    first, second = (overload_drain_s(num) for num in (1_000, 2_000))
    assert second / first == pytest.approx(2.0, rel=0.15)
    assert first == pytest.approx(1_000 * MEAN_SERVICE_S * (1 - 1 / 1.5), rel=0.15)


def overload_drain_s(num_transfers):
    rng = random.Random(3)
    clock = Clock()
    link = FairLink(clock, 0, BANDWIDTH)
    at_s = 0.0
    for _ in range(num_transfers):
        at_s += rng.expovariate(1.5 / MEAN_SERVICE_S)
        clock.at(round(at_s * PS_PER_S), lambda: link.transfer(MEAN_BYTES, lambda: None))
    clock.run()
    return clock.now_ps / PS_PER_S - at_s
