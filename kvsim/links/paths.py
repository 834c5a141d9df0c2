"""An instance's way to the sites where blocks lie: over links of its own, or through the network of all instances."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvcore.units import div_ceil
from kvsim.clock import PS_PER_S, Action, Clock, nothing
from kvsim.links.drive import Drive
from kvsim.links.fair_link import FairLink
from kvsim.links.network import Link, Network, Route
from kvsim.links.parcel import Parcel, Site, Tier, num_requests
from kvsim.usage import RecordTransfer


class SharedLink(Protocol):
    """A link or drive: what it tells of itself."""

    bandwidth_bytes_per_s: int
    full_when_busy: bool
    """Whether any transfer alone takes all of it; a link of a route may wait for the others."""
    record: RecordTransfer | None
    entered_bytes: int
    moved_bytes: int

    @property
    def num_active(self) -> int:
        """Transfers under way."""

    def audit(self) -> None:
        """Asserts that nothing was lost; call it when nothing is under way."""


class Path(Protocol):
    """Carries parcels between the instance's GPUs and the sites where blocks lie."""

    def fetch(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """Bring the parcel from the site; then `on_done`."""

    def send(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """Take the parcel to the site; then `on_done`."""

    def thread_ps(self, site: Site, parcel: Parcel) -> int:
        """What the parcel costs the thread that moves it, before the first byte moves."""

    def spill(self, parcel: Parcel) -> None:
        """Write the parcel to the instance's own drives; nobody waits for it."""

    def links(self) -> Iterator[tuple[str, SharedLink]]:
        """Every link and drive of the instance, after its kind."""

    @property
    def fetched_bytes(self) -> int:
        """What has reached the GPUs."""

    @property
    def sent_bytes(self) -> int:
        """What has left them, and arrived."""


@dataclass(frozen=True, slots=True)
class HostPath:
    """A link of its own each way between the GPUs and the instance's host memory, and nothing beyond."""

    into: FairLink
    out_of: FairLink

    def fetch(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """See `Path.fetch`."""
        assert site.tier is Tier.HOST, site
        self.into.transfer(parcel.size_bytes, on_done)

    def send(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """See `Path.send`."""
        assert site.tier is Tier.HOST, site
        self.out_of.transfer(parcel.size_bytes, on_done)

    def thread_ps(self, site: Site, parcel: Parcel) -> int:
        """Nothing: it is the copy engine's."""
        return 0

    def spill(self, parcel: Parcel) -> None:
        """There are no drives."""
        raise AssertionError(parcel)

    def links(self) -> Iterator[tuple[str, SharedLink]]:
        """See `Path.links`."""
        yield "host to GPU", self.into
        yield "GPU to host", self.out_of

    @property
    def fetched_bytes(self) -> int:
        """See `Path.fetched_bytes`."""
        return self.into.moved_bytes

    @property
    def sent_bytes(self) -> int:
        """See `Path.sent_bytes`."""
        return self.out_of.moved_bytes


@dataclass(frozen=True, slots=True)
class LinkPath:
    """The table `[link]`: a link of its own each way to the pool, wherever in it.

    With a private cache there is a way to it; with disks there are the drives of all instances.
    """

    get_link: FairLink
    put_link: FairLink
    host: HostPath | None = None
    drives: tuple[Drive, ...] = ()
    index: int = 0

    def fetch(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """See `Path.fetch`."""
        get = partial(self.get_link.transfer, parcel.size_bytes, on_done)
        if site.tier is Tier.DISK:
            drive = self.drives[self.index if site.owner is None else site.owner]
            drive.read(parcel.size_bytes, parcel.num_objects, get)
        elif site.tier is Tier.HOST and self.host is not None:
            self.host.fetch(site, parcel, on_done)
        else:
            get()

    def send(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """See `Path.send`."""
        if site.tier is Tier.HOST and self.host is not None:
            self.host.send(site, parcel, on_done)
        else:
            self.put_link.transfer(parcel.size_bytes, on_done)

    def thread_ps(self, site: Site, parcel: Parcel) -> int:
        """Nothing: the link's measured bandwidth has it in it."""
        return 0

    def spill(self, parcel: Parcel) -> None:
        """See `Path.spill`."""
        self.drives[self.index].write(parcel.size_bytes, parcel.num_objects, nothing)

    def links(self) -> Iterator[tuple[str, SharedLink]]:
        """See `Path.links`."""
        yield "pool get", self.get_link
        yield "pool put", self.put_link
        if self.host is not None:
            yield from self.host.links()
        if self.drives:
            yield "NVMe", self.drives[self.index]

    @property
    def fetched_bytes(self) -> int:
        """See `Path.fetched_bytes`."""
        return self.get_link.moved_bytes + (0 if self.host is None else self.host.fetched_bytes)

    @property
    def sent_bytes(self) -> int:
        """See `Path.sent_bytes`."""
        return self.put_link.moved_bytes + (0 if self.host is None else self.host.sent_bytes)


@dataclass(frozen=True, slots=True)
class Node:
    """The links of one instance: NICs pooled, the links of all GPUs to the host pooled, each per direction."""

    nic_in: Link
    nic_out: Link
    host_in: Link
    host_out: Link
    drive: Drive | None = None


@dataclass(frozen=True, slots=True)
class Between:
    """What lies between the instances.

    What is spread over all others in equal parts loads the NICs of each of them alike: they are as one, `all_out` and
    `all_in`, which are shared with what these themselves send and fetch.
    """

    all_in: Link
    all_out: Link
    fabric: Route
    """The switches, where they bound anything."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a transfer takes beside bandwidth; see `kvsim.config.links.NetworkConfig`."""

    latency_ps: int
    host_latency_ps: int
    object_ps: int
    request_ps: int
    num_ranks: int
    """GPUs that hold a request, of `num_gpus`; it has that share of NICs and host links at most."""
    num_gpus: int
    slice_bytes: int
    rail_bytes_per_s: int
    """Of one NIC."""
    num_rails: int
    staging_chunk_bytes: int | None
    """None: NICs reach GPU memory."""


class NetworkPath:
    """The table `[network]`: NICs, switches and host links that all instances' transfers cross.

    Bytes from the pool cross the far NICs (where it is known whose they are), the switches, the own NICs and the host
    link at once, at one rate; from the own host memory the host link only; from a drive first the drive, then the rest.
    """

    def __init__(
        self, clock: Clock, network: Network, nodes: tuple[Node, ...], index: int, between: Between, costs: Costs
    ) -> None:
        self._clock = clock
        self._network = network
        self._nodes = nodes
        self._index = index
        self._own = nodes[index]
        self._between = between
        self._costs = costs

    def fetch(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """See `Path.fetch`."""
        rest = partial(self._move, self._route_from(site), parcel, on_done)
        drive = self._drive(site)
        if drive is None:
            rest()
        else:
            drive.read(parcel.size_bytes, parcel.num_objects, rest)

    def send(self, site: Site, parcel: Parcel, on_done: Action) -> None:
        """See `Path.send`."""
        drive = self._drive(site)
        done = on_done if drive is None else partial(drive.write, parcel.size_bytes, parcel.num_objects, on_done)
        self._move(self._route_to(site), parcel, done)

    def thread_ps(self, site: Site, parcel: Parcel) -> int:
        """Each object is looked up, unless it is in the private cache."""
        return 0 if site.tier is Tier.HOST else parcel.num_objects * self._costs.object_ps

    def spill(self, parcel: Parcel) -> None:
        """See `Path.spill`."""
        assert self._own.drive is not None, parcel
        self._own.drive.write(parcel.size_bytes, parcel.num_objects, nothing)

    def links(self) -> Iterator[tuple[str, SharedLink]]:
        """See `Path.links`; what lies between is the first instance's."""
        own = self._own
        yield "NICs in", own.nic_in
        yield "NICs out", own.nic_out
        yield "host to GPU", own.host_in
        yield "GPU to host", own.host_out
        if own.drive is not None:
            yield "NVMe", own.drive
        if not self._index:
            yield "all NICs in", self._between.all_in
            yield "all NICs out", self._between.all_out
            yield from (("switches", link) for link in self._between.fabric)

    @property
    def fetched_bytes(self) -> int:
        """See `Path.fetched_bytes`."""
        return self._own.host_in.moved_bytes

    @property
    def sent_bytes(self) -> int:
        """See `Path.sent_bytes`."""
        return self._own.host_out.moved_bytes

    def _route_from(self, site: Site) -> Route:
        if self._is_own(site):
            return (self._own.host_in,)
        between = self._between
        far = (between.all_out, between.all_in) if site.owner is None else (self._nodes[site.owner].nic_out,)
        return (*far, *between.fabric, self._own.nic_in, self._own.host_in)

    def _route_to(self, site: Site) -> Route:
        if self._is_own(site):
            return (self._own.host_out,)
        between = self._between
        far = (between.all_out, between.all_in) if site.owner is None else (self._nodes[site.owner].nic_in,)
        return (self._own.host_out, self._own.nic_out, *between.fabric, *far)

    def _is_own(self, site: Site) -> bool:
        return site.tier in (Tier.HOST, Tier.LOCAL) or site.owner == self._index

    def _drive(self, site: Site) -> Drive | None:
        if site.tier is not Tier.DISK:
            return None
        drive = self._own.drive if site.owner is None else self._nodes[site.owner].drive
        assert drive is not None, site
        return drive

    def _move(self, route: Route, parcel: Parcel, on_done: Action) -> None:
        """The latency, then the bytes, then the second half of the last chunk's way."""
        costs, is_remote = self._costs, len(route) > 1
        is_staged = is_remote and costs.staging_chunk_bytes is not None
        done = partial(self._unstage, parcel, on_done) if is_staged else on_done
        bound = self._bound(parcel, self._rails_bytes_per_s(parcel) if is_remote else None)
        begin = partial(self._network.transfer, route, parcel.size_bytes, done, bound)
        self._clock.after(costs.latency_ps if is_remote else costs.host_latency_ps, begin)

    def _bound(self, parcel: Parcel, rails_bytes_per_s: int | None) -> int | None:
        """No faster than the request's ranks post, than their NICs and than their host links; None: as fast as all."""
        costs = self._costs
        posting_ps = num_requests(parcel, costs.slice_bytes, costs.num_ranks) * costs.request_ps
        bounds = [] if rails_bytes_per_s is None else [rails_bytes_per_s]
        if posting_ps:
            bounds.append(parcel.size_bytes * PS_PER_S // posting_ps)
        if costs.num_ranks < costs.num_gpus:
            bounds.append(self._own.host_in.bandwidth_bytes_per_s * costs.num_ranks // costs.num_gpus)
        return max(1, min(bounds)) if bounds else None

    def _rails_bytes_per_s(self, parcel: Parcel) -> int | None:
        """Fewer requests than NICs leave some of these idle, and so do ranks that do not hold the request."""
        costs = self._costs
        num_rails = max(1, costs.num_rails * costs.num_ranks // costs.num_gpus)
        posted = max(1, num_requests(parcel, costs.slice_bytes, costs.num_ranks) * costs.num_ranks)
        used = min(num_rails, posted)
        return used * costs.rail_bytes_per_s if used < costs.num_rails else None

    def _unstage(self, parcel: Parcel, on_done: Action) -> None:
        """All but the last chunk went both halves of the way meanwhile."""
        assert self._costs.staging_chunk_bytes is not None
        chunk_bytes = min(parcel.size_bytes, self._costs.staging_chunk_bytes)
        self._clock.after(div_ceil(chunk_bytes * PS_PER_S, self._own.host_in.bandwidth_bytes_per_s), on_done)
