"""Links that transfers cross several at a time: max-min fair rates by progressive filling, in exact integers.

A transfer crosses all links of its route at once, at one rate. Rates are max-min fair: nobody's can grow without taking
from somebody who has no more (Bertsekas and Gallager, Data Networks, 6.5.2). Progressive filling finds them: all rates
grow alike until a link is full or a transfer at its own bound; those it holds are fixed, and the others grow on.

    route A-B  |=====|                    link A: 1 of 3     rates  A-B  min(1/2 of A, ...)
    route A    |===========|              link B: 1 of 1            ...
               0     done  done

Transfers of one route have one rate, so that they are kept together: a `_Bundle` is processor sharing in virtual time,
as `FairLink` is, at a rate that changes. Between two changes of the set of transfers nothing happens, and a change
concerns only what is connected to it by links that are in use.

Rates are whole multiples of 2**-32 byte/s, rounded down, which a transfer of an hour notices by less than a picosecond.
Alarms ring on whole picoseconds: what a completed transfer could have had of its last picosecond goes to nobody.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TypeAlias

from kvcore.units import div_ceil
from kvsim.clock import PS_PER_S, Action, Alarm, Clock
from kvsim.usage import RecordTransfer

RATE_SCALE = 1 << 32
"""Rates are in units of 1 / RATE_SCALE byte/s."""

UNITS_PER_BYTE = PS_PER_S * RATE_SCALE
"""Service is counted in what a rate of 1 unit moves in a picosecond."""


class Link:
    """One direction of a connection, or whatever else has a bandwidth that concurrent transfers share.

    Counters: `entered_bytes` and `moved_bytes` (of transfers that began and that are complete), `num_completed`,
    `busy_ps` (time with an active transfer).
    """

    full_when_busy = False

    def __init__(self, name: str, bandwidth_bytes_per_s: int) -> None:
        assert bandwidth_bytes_per_s > 0, (name, bandwidth_bytes_per_s)
        self.name = name
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.record: RecordTransfer | None = None
        """Told of every transfer that completes."""
        self.bundles: dict[_Bundle, None] = {}
        self.carried_units = 0
        self.num_active = 0
        self.num_completed = 0
        self.entered_bytes = 0
        self.moved_bytes = 0
        self.busy_ps = 0
        self._busy_since_ps = 0

    def enter(self, size_bytes: int, now_ps: int) -> None:
        """A transfer begins."""
        if not self.num_active:
            self._busy_since_ps = now_ps
        self.num_active += 1
        self.entered_bytes += size_bytes

    def leave(self, size_bytes: int, start_ps: int, now_ps: int) -> None:
        """A transfer that began then is complete."""
        self.num_active -= 1
        self.num_completed += 1
        self.moved_bytes += size_bytes
        if not self.num_active:
            self.busy_ps += now_ps - self._busy_since_ps
        if self.record is not None:
            self.record(start_ps, now_ps, size_bytes)

    def audit(self) -> None:
        """Idle, it has moved what entered it, never faster than its bandwidth; a completion wastes at most 1 ps."""
        assert not self.num_active and not self.bundles, f"{self.name}: {self.num_active} transfers have not ended"
        assert self.moved_bytes == self.entered_bytes, (self.name, self.moved_bytes, self.entered_bytes)
        wasted = self.carried_units - self.moved_bytes * UNITS_PER_BYTE
        capacity = self.bandwidth_bytes_per_s * RATE_SCALE
        assert 0 <= wasted <= self.num_completed * capacity, (self.name, wasted, self.num_completed)
        assert self.carried_units <= self.busy_ps * capacity, (self.name, self.carried_units, self.busy_ps)


Route: TypeAlias = tuple[Link, ...]
"""What a transfer crosses at once, each link once."""


class _Bundle:
    """The active transfers of one route and one bound; each has attained `served` since its own start."""

    __slots__ = ("active", "bound", "due_ps", "rate", "route", "served", "updated_ps")

    def __init__(self, route: Route, bound: int | None) -> None:
        self.route = route
        self.bound = bound
        # heap of (complete at served, number, size_bytes, start_ps, ...)
        self.active: list[tuple[int, int, int, int, Action]] = []
        self.served = 0
        self.rate = 0
        self.updated_ps = 0
        self.due_ps = 0

    def advance(self, now_ps: int) -> None:
        """Serve the time since the last change of the rate."""
        attained = (now_ps - self.updated_ps) * self.rate
        self.updated_ps = now_ps
        self.served += attained
        carried = attained * len(self.active)
        for link in self.route:
            link.carried_units += carried

    def set_rate(self, rate: int) -> None:
        """From now on."""
        assert rate > 0, self.route
        self.rate = rate
        self.due_ps = self.updated_ps + max(0, div_ceil(self.active[0][0] - self.served, rate))


class Network:
    """Transfers over routes of links, at max-min fair rates."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bundles: dict[tuple[Route, int | None], _Bundle] = {}
        self._alarm: Alarm | None = None
        self._num_started = 0

    def transfer(self, route: Route, size_bytes: int, on_done: Action, bound_bytes_per_s: int | None = None) -> None:
        """Move `size_bytes` (>= 0) over the route (of at least one link), at no more than the bound; then `on_done`.

        Transfers that complete at one instant do so in the order they began.
        """
        assert route and size_bytes >= 0, (route, size_bytes)
        now_ps = self._clock.now_ps
        bundle = self._bundle(route, None if bound_bytes_per_s is None else bound_bytes_per_s * RATE_SCALE)
        bundle.advance(now_ps)
        goal = bundle.served + size_bytes * UNITS_PER_BYTE
        heappush(bundle.active, (goal, self._num_started, size_bytes, now_ps, on_done))
        self._num_started += 1
        for link in route:
            link.enter(size_bytes, now_ps)
        self._refill(route)

    def _bundle(self, route: Route, bound: int | None) -> _Bundle:
        bundle = self._bundles.get((route, bound))
        if bundle is None:
            bundle = self._bundles[route, bound] = _Bundle(route, bound)
            bundle.updated_ps = self._clock.now_ps
            for link in route:
                link.bundles[bundle] = None
        return bundle

    def _refill(self, changed: Iterable[Link]) -> None:
        """Rates and the alarm, after what crosses the changed links has changed."""
        now_ps = self._clock.now_ps
        bundles = _connected(changed)
        for bundle in bundles:
            bundle.advance(now_ps)
        for bundle, rate in fair_rates(bundles).items():
            bundle.set_rate(rate)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._bundles:
            self._alarm = self._clock.at(min([bundle.due_ps for bundle in self._bundles.values()]), self._complete)

    def _complete(self) -> None:
        """Take out every transfer that has its bytes."""
        now_ps = self._clock.now_ps
        self._alarm = None
        done: list[tuple[int, Action]] = []
        changed: dict[Link, None] = {}
        for bundle in [bundle for bundle in self._bundles.values() if bundle.due_ps <= now_ps]:
            bundle.advance(now_ps)
            changed.update(dict.fromkeys(bundle.route))
            while bundle.active and bundle.active[0][0] <= bundle.served:
                _, number, size_bytes, start_ps, on_done = heappop(bundle.active)
                done.append((number, on_done))
                for link in bundle.route:
                    link.leave(size_bytes, start_ps, now_ps)
            if not bundle.active:
                self._drop(bundle)
        self._refill(changed)
        for _, on_done in sorted(done, key=_number):
            on_done()

    def _drop(self, bundle: _Bundle) -> None:
        del self._bundles[bundle.route, bundle.bound]
        for link in bundle.route:
            del link.bundles[bundle]


def fair_rates(bundles: Iterable[_Bundle]) -> dict[_Bundle, int]:
    """The max-min fair rate of one transfer of each bundle, by progressive filling; they share links with no other."""
    open_ones = dict.fromkeys(bundles)
    counts: dict[Link, int] = {}
    for bundle in open_ones:
        for link in bundle.route:
            counts[link] = counts.get(link, 0) + len(bundle.active)
    left = {link: link.bandwidth_bytes_per_s * RATE_SCALE for link in counts}
    rates: dict[_Bundle, int] = {}
    while open_ones:
        tightest = min(counts, key=lambda link: left[link] // counts[link])
        rate = left[tightest] // counts[tightest]
        bound = min((bundle.bound for bundle in open_ones if bundle.bound is not None), default=rate)
        held = (
            _bounded(open_ones, bound)
            if bound < rate
            else [bundle for bundle in tightest.bundles if bundle in open_ones]
        )
        for bundle in held:
            rates[bundle] = min(bound, rate)
            del open_ones[bundle]
            _take(bundle, rates[bundle], left, counts)
    return rates


def _bounded(bundles: Iterable[_Bundle], bound: int) -> list[_Bundle]:
    return [bundle for bundle in bundles if bundle.bound == bound]


def _take(bundle: _Bundle, rate: int, left: dict[Link, int], counts: dict[Link, int]) -> None:
    """The bundle's rates are fixed: the links have less left, for fewer."""
    for link in bundle.route:
        left[link] -= rate * len(bundle.active)
        counts[link] -= len(bundle.active)
        if not counts[link]:
            del counts[link]


def _connected(links: Iterable[Link]) -> dict[_Bundle, None]:
    """The bundles that cross one of the links, or a link that one of these crosses, and so on."""
    found: dict[_Bundle, None] = {}
    todo = list(links)
    for link in todo:
        for bundle in link.bundles:
            if bundle not in found:
                found[bundle] = None
                todo.extend(bundle.route)
    return found


def _number(done: tuple[int, Action]) -> int:
    return done[0]
