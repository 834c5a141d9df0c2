"""The network of links against max-min fairness in exact fractions, computed by another method."""

from fractions import Fraction
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.clock import PS_PER_S, Clock
from kvsim.links.fair_link import FairLink
from kvsim.links.network import Link, Network

LINKS = "abcd"


def completions(flows, bandwidths):
    """Completion time of each (start_ps, route, size_bytes, bound) on a Network, and its links."""
    clock = Clock()
    network = Network(clock)
    links = {name: Link(name, bandwidth) for name, bandwidth in bandwidths.items()}
    done = {}

    def start(index, route, size, bound):
        network.transfer(tuple(map(links.get, route)), size, lambda: done.setdefault(index, clock.now_ps), bound)

    for index, (start_ps, *flow) in enumerate(flows):
        clock.at(start_ps, lambda index=index, flow=flow: start(index, *flow))
    clock.run()
    for link in links.values():
        link.audit()
    return [done[index] for index in range(len(flows))], links


def max_min_rates(active, bandwidths):
    """By the bottleneck condition, from below: raise all rates of unfrozen flows by the most that anything allows.

    Every flow for itself, in fractions; no bundles, no counts.
    """
    rates = dict.fromkeys(active, Fraction(0))
    growing = set(active)
    while growing:
        slack = [
            (bandwidth - sum(rates[flow] for flow in active if name in active[flow][0])) / crossing
            for name, bandwidth in bandwidths.items()
            if (crossing := sum(name in active[flow][0] for flow in growing))
        ]
        own = [active[flow][1] - rates[flow] for flow in growing if active[flow][1] is not None]
        step = min([*slack, *own])
        rates = {flow: rate + step if flow in growing else rate for flow, rate in rates.items()}
        full = {
            name
            for name, bandwidth in bandwidths.items()
            if sum(rates[flow] for flow in active if name in active[flow][0]) == bandwidth
        }
        growing = {flow for flow in growing if not full & set(active[flow][0]) and rates[flow] != active[flow][1]}
    return rates


def equal_split_rates(active, bandwidths):
    """The wrong network: each link divides itself by its flows, and nobody takes what others cannot use."""
    share = {
        name: Fraction(bandwidth, max(1, sum(name in route for route, _ in active.values())))
        for name, bandwidth in bandwidths.items()
    }
    return {
        flow: min([share[name] for name in route] + ([] if bound is None else [Fraction(bound)]))
        for flow, (route, bound) in active.items()
    }


def fluid(flows, bandwidths, rates_of=max_min_rates):
    """Completion times by definition: between two changes every flow moves at its rate."""
    bandwidths = {name: Fraction(bandwidth) for name, bandwidth in bandwidths.items()}
    waiting = sorted((Fraction(start), index) for index, (start, *_) in enumerate(flows))
    missing, done, now = {}, {}, Fraction(0)
    while waiting or missing:
        rates = rates_of({flow: flows[flow][1::2] for flow in missing}, bandwidths)
        finish = min((now + left * PS_PER_S / rates[flow] for flow, left in missing.items()), default=None)
        index = None
        if waiting and (finish is None or waiting[0][0] < finish):
            change, index = waiting.pop(0)
        else:
            change = finish
        missing = {flow: left - rates[flow] * (change - now) / PS_PER_S for flow, left in missing.items()}
        now = change
        if index is not None:
            missing[index] = Fraction(flows[index][2])
        done.update({flow: now for flow, left in missing.items() if not left})
        missing = {flow: left for flow, left in missing.items() if left}
    return [done[index] for index in range(len(flows))]


ROUTES = st.sets(st.sampled_from(LINKS), min_size=1, max_size=3).map(sorted).map(tuple)
FLOWS = st.lists(
    st.tuples(
        st.integers(0, 20).map(lambda n: n * 10**9),
        ROUTES,
        st.integers(0, 9).map(lambda n: n * 10**6),
        st.sampled_from([None, None, None, 10**8, 3 * 10**8]),
    ),
    min_size=1,
    max_size=9,
)
BANDWIDTHS = st.fixed_dictionaries(dict.fromkeys(LINKS, st.sampled_from([10**8, 10**9, 3 * 10**9, 7 * 10**9 + 1])))
TOLERANCE_PS = 10_000
"""A completion waits for the next whole picosecond. Who had the bandwidth meanwhile may be 70 times as fast as who gets
it, and that one late by as much; and so on for each of the completions. Sizes are a million times as large."""


def far_apart(left, right):
    return max(abs(a - b) for a, b in zip(left, right, strict=True)) > TOLERANCE_PS


@given(FLOWS, BANDWIDTHS)
def test_rates_are_max_min_fair_at_every_instant(flows, bandwidths):
    measured, _ = completions(flows, bandwidths)
    assert not far_apart(measured, fluid(flows, bandwidths))


CLASSIC = [(0, ("a", "b"), 10**6, None), (0, ("a",), 10**6, None), (0, ("b",), 10**6, None), (0, ("b",), 10**6, None)]
WIDE_AND_NARROW = {"a": 10**9, "b": 3 * 10**8, "c": 1, "d": 1}


def test_who_is_held_elsewhere_leaves_its_share_to_the_others():
    """Who must pass the narrow link takes a third of that from the wide one; the other has the rest."""
    measured, links = completions(CLASSIC, WIDE_AND_NARROW)
    assert measured[1] == -(-(10**6) * PS_PER_S // (9 * 10**8))
    assert links["a"].moved_bytes == 2 * 10**6 and links["b"].moved_bytes == 3 * 10**6


def test_the_oracle_rejects_an_equal_split():
    assert far_apart(fluid(CLASSIC, WIDE_AND_NARROW), fluid(CLASSIC, WIDE_AND_NARROW, equal_split_rates))
    assert not far_apart(fluid(CLASSIC[2:], WIDE_AND_NARROW), fluid(CLASSIC[2:], WIDE_AND_NARROW, equal_split_rates))


@given(st.lists(st.tuples(st.integers(0, 50).map(lambda n: n * 10**6), st.integers(0, 10**6)), min_size=1, max_size=12))
def test_one_link_is_a_fair_link(flows):
    clock = Clock()
    link, ends = FairLink(clock, 0, 10**9), {}
    for index, (start_ps, size) in enumerate(flows):
        clock.at(start_ps, lambda i=index, s=size: link.transfer(s, lambda: ends.setdefault(i, clock.now_ps)))
    clock.run()
    measured, _ = completions([(start, ("a",), size, None) for start, size in flows], {"a": 10**9})
    assert all(abs(ours - ends[index]) <= len(flows) for index, ours in enumerate(measured))


def test_a_bound_leaves_the_rest_to_the_others():
    flows = [(0, ("a",), 10**6, 2 * 10**8), (0, ("a",), 8 * 10**5, None)]
    measured, _ = completions(flows, {"a": 10**9})
    assert measured == [5 * 10**9, 10**9]


def test_links_that_share_no_transfer_do_not_know_of_each_other():
    flows = [(0, ("a",), 10**6, None), (0, ("b",), 10**6, None), (10, ("b", "c"), 10**6, None)]
    measured, _ = completions(flows, dict.fromkeys("abc", 10**9))
    assert measured[0] == 10**9 < measured[1]


def test_a_finished_transfer_may_start_the_next_one():
    clock = Clock()
    network, link, ends = Network(clock), Link("a", PS_PER_S), []

    def again():
        ends.append(clock.now_ps)
        if len(ends) < 3:
            network.transfer((link,), 10, again)

    again()
    clock.run()
    assert ends == [0, 10, 20]
    assert link.busy_ps == 20


def test_transfers_of_one_instant_complete_in_the_order_they_began():
    clock = Clock()
    network, links, order = Network(clock), [Link(name, 1000) for name in LINKS], []
    for link, number in zip([links[1], links[0], links[1]], count(), strict=False):
        network.transfer((link,), 5 if link is links[1] else 2, lambda number=number: order.append(number))
    clock.run()
    assert order == [1, 0, 2]


def test_there_is_one_alarm_for_each_change():
    clock = Clock()
    network, link = Network(clock), Link("a", 10**9)
    for size in range(100):
        network.transfer((link,), 10**6 + size, lambda: None)
    before = clock.num_events
    clock.run()
    assert clock.num_events - before == 99, "one completion after the other; the last one sets no alarm"


@pytest.mark.parametrize("counter", ["moved_bytes", "carried_units", "busy_ps"])
def test_audit_notices(counter):
    _, links = completions(CLASSIC, WIDE_AND_NARROW)
    setattr(links["b"], counter, getattr(links["b"], counter) * 9 // 10)
    with pytest.raises(AssertionError):
        links["b"].audit()
