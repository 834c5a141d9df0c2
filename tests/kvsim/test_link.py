"""The shared link against processor sharing in exact fractions, and its own bookkeeping."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.clock import PS_PER_S, Clock
from kvsim.links.fair_link import FairLink


def completions(flows, bandwidth, latency_ps=0):
    """Completion time of each (start_ps, size_bytes) on a FairLink, and the link."""
    clock = Clock()
    link = FairLink(clock, latency_ps, bandwidth)
    done = {}

    def start(index, size):
        link.transfer(size, lambda: done.setdefault(index, clock.now_ps))

    for index, (start_ps, size) in enumerate(flows):
        clock.at(start_ps, lambda index=index, size=size: start(index, size))
    clock.run()
    link.audit()
    return [done[index] for index in range(len(flows))], link


def exact_sharing(flows, bandwidth):
    """The same by definition: between two changes each of n transfers gets bandwidth * time / n."""
    waiting = sorted((Fraction(start), index) for index, (start, _) in enumerate(flows))
    missing, done, now = {}, {}, Fraction(0)
    while waiting or missing:
        rate = Fraction(bandwidth, len(missing) * PS_PER_S) if missing else Fraction(0)
        finish = now + min(missing.values()) / rate if missing else None
        if waiting and (finish is None or waiting[0][0] < finish):
            change, index = waiting.pop(0)
        else:
            change, index = finish, None
        missing = {flow: left - rate * (change - now) for flow, left in missing.items()}
        now = change
        if index is not None:
            missing[index] = Fraction(flows[index][1])
        done.update({flow: now for flow, left in missing.items() if not left})
        missing = {flow: left for flow, left in missing.items() if left}
    return [done[index] for index in range(len(flows))]


flows_of = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=12)


@given(flows_of, st.sampled_from([3, 1000, 10**9 + 7, 50 * 10**9]), st.sampled_from([0, 1, 12_345, 10**9]))
def test_within_picoseconds_of_exact_sharing(flows, bandwidth, unit_ps):
    flows = [(start * unit_ps, size) for start, size in flows]
    measured, _ = completions(flows, bandwidth)
    for ours, exact in zip(measured, exact_sharing(flows, bandwidth), strict=True):
        # A completion waits for the next whole picosecond; each later one may inherit the wait of those before it.
        assert abs(ours - exact) <= len(flows), (ours, float(exact))


def first_come_first_served(flows, bandwidth):
    free, done = Fraction(0), {}
    for index in sorted(range(len(flows)), key=lambda index: flows[index][0]):
        free = max(free, flows[index][0]) + Fraction(flows[index][1] * PS_PER_S, bandwidth)
        done[index] = free
    return [done[index] for index in range(len(flows))]


def test_the_oracle_rejects_a_fifo_link():
    flows = [(0, 9), (0, 1)]
    fifo, exact = first_come_first_served(flows, 1000), exact_sharing(flows, 1000)
    assert exact == [10 * PS_PER_S // 1000, 2 * PS_PER_S // 1000]
    assert max(abs(a - b) for a, b in zip(fifo, exact, strict=True)) > len(flows)


@given(flows_of, st.sampled_from([1, 7, 10**9 + 7, 50 * 10**9]))
def test_one_busy_period_lasts_as_long_as_its_bytes_need(flows, bandwidth):
    sizes = [size for _, size in flows]
    measured, link = completions([(0, size) for size in sizes], bandwidth)
    assert max(measured) == link.busy_ps == -(-sum(sizes) * PS_PER_S // bandwidth)
    assert link.moved_bytes == sum(sizes)
    assert (link.num_completed, link.num_active) == (len(sizes), 0)


def test_latency_is_waited_out_before_service_and_holds_no_bandwidth():
    # The first transfer has the link to itself while the second one waits out its latency.
    measured, link = completions([(0, 1000), (500, 1000)], PS_PER_S, latency_ps=100)
    assert measured == [100 + 500 + 2 * 500, 600 + 1000 + 500]
    assert link.busy_ps == 2000


def test_a_finished_transfer_may_start_the_next_one():
    clock = Clock()
    link = FairLink(clock, 7, PS_PER_S)
    ends = []

    def again():
        ends.append(clock.now_ps)
        if len(ends) < 3:
            link.transfer(10, again)

    again()
    clock.run()
    assert ends == [0, 17, 34]
    assert link.num_busy_periods == 2


def test_transfers_of_one_instant_complete_in_the_order_they_began():
    clock = Clock()
    link = FairLink(clock, 0, 1000)
    order = []
    for name in "abc":
        link.transfer(5, lambda name=name: order.append(name))
    clock.run()
    assert order == ["a", "b", "c"]


def test_audit_notices_a_lost_byte():
    _, link = completions([(0, 1000)], 1000)
    link.moved_bytes -= 2
    with pytest.raises(AssertionError):
        link.audit()
