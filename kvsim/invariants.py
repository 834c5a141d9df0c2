"""What must hold at the end of every simulation; the numbers are those of docs/INVARIANTS.md."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.gpu_cache import NO_TABLES
from kvcore.group_runs import GroupRuns, count_blocks, minus, plus
from kvcore.request import KVRequest
from kvcore.runs import normalize, subtract
from kvcore.types import Run, Runs, StreamId
from kvsim.events import Kind
from kvsim.links.parcel import Tier
from kvsim.metrics import Events, to_the_last
from kvsim.pool.client import Moved, PoolClient
from kvsim.run import Simulation
from kvsim.sequence import Sequence, Status

Lineage: TypeAlias = tuple[int, StreamId]
"""(group, stream) of a piece of content."""


class InvariantBroken(AssertionError):
    """A simulation that cannot be right; the message starts with the invariant's number."""

    def __init__(self, number: int, statement: str, evidence: object) -> None:
        super().__init__(f"invariant {number}: {statement}: {evidence}")
        self.number = number


def check(simulation: Simulation) -> str:
    """Check every invariant of a simulation that has run; returns "ok", or raises InvariantBroken."""
    events = to_the_last(simulation.log)
    for number, invariant in INVARIANTS.items():
        try:
            invariant(simulation, events)
        except AssertionError as error:
            statement = (invariant.__doc__ or "").partition("\n")[0].removesuffix(".")
            raise InvariantBroken(number, statement, error) from error
    return "ok"


# --- requests and time ------------------------------------------------------------------------------------------------


def requests_conserved(simulation: Simulation, events: Events) -> None:
    """Every request arrives once and ends once: completed with all its tokens, rejected, or stopped with the run."""
    num_requests = len(simulation.cluster.sequences)
    counts = {kind: np.bincount(events.of(kind).request, minlength=num_requests) for kind in Kind}
    arrived, stopped = events.of(Kind.ARRIVED), events.of(Kind.STOPPED)
    is_absent = np.zeros(num_requests, dtype=np.int64)
    is_absent[stopped.request] = 1 - stopped.a
    wrong = counts[Kind.ARRIVED] != 1 - is_absent
    assert not wrong.any(), f"requests {_where(wrong)} arrived not once"
    wrong = counts[Kind.FINISHED] + counts[Kind.REJECTED] != counts[Kind.ARRIVED]
    assert not wrong.any(), f"requests {_where(wrong)} ended not once"
    for kind in (Kind.ADMITTED, Kind.FIRST_TOKEN):
        differs = counts[kind] != counts[Kind.FINISHED]
        assert not differs.any(), f"requests {_where(differs)}: {kind.name} not once for each completion"
    _check_told(simulation)
    finished = events.of(Kind.FINISHED)
    output_len = np.zeros(num_requests, dtype=np.int64)
    output_len[arrived.request] = np.maximum(arrived.b, 1)
    short = finished.a != output_len[finished.request]
    assert not short.any(), f"requests {finished.request[short][:3]} have not the output they were to have"


def _check_told(simulation: Simulation) -> None:
    """The run tells one end of each request, where it was stopped as where it was not."""
    told, num_requests = Events(simulation.log), len(simulation.cluster.sequences)
    done, stopped = (
        np.concatenate([told.of(kind).request for kind in kinds])
        for kinds in ((Kind.FINISHED, Kind.REJECTED), (Kind.STOPPED,))
    )
    wrong = np.bincount(np.concatenate((done, stopped)), minlength=num_requests) != 1
    assert not wrong.any(), f"requests {_where(wrong)} completed, were rejected or stopped not once"
    assert simulation.cluster.num_done == len(done), (simulation.cluster.num_done, len(done), num_requests)


LIFE = (Kind.ARRIVED, Kind.ADMITTED, Kind.FIRST_TOKEN, Kind.FINISHED)
"""In the order in which they come, which is the order of their values."""


def clock_monotone(_simulation: Simulation, events: Events) -> None:
    """Time never runs backwards, and requests arrive, are admitted, get a first token and finish in this order."""
    every = events.all
    elapsed_ps = np.diff(every.time_ps, prepend=0)
    assert (elapsed_ps >= 0).all(), f"events {_where(elapsed_ps < 0)} are earlier than those before them"
    by_request = np.argsort(every.request, kind="stable")
    lives = by_request[np.isin(every.kind[by_request], LIFE)]
    request, kind = every.request[lives], every.kind[lives]
    disordered = (np.diff(request) == 0) & (np.diff(kind) < 0)
    assert not disordered.any(), f"request {request[1:][disordered][:3]} lives in another order"


# --- blocks and bytes -------------------------------------------------------------------------------------------------


def gpu_blocks_conserved(simulation: Simulation, _events: Events) -> None:
    """Blocks of every instance are conserved, and all free at the end."""
    for instance in simulation.instances:
        scheduler = instance.scheduler
        left = [*scheduler.running, *scheduler.waiting, *scheduler.block_holders]
        assert not left, f"instance {instance.index} still has requests {[sequence.index for sequence in left]}"
        scheduler.blocks.audit(())
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks, f"instance {instance.index}"
    for sequence in _sequences(simulation):
        assert sequence.status is Status.FINISHED and sequence.tables is NO_TABLES, f"request {sequence.index}"


def bytes_conserved(simulation: Simulation, events: Events) -> None:
    """Every byte that left for the pool or from it has arrived."""
    pool = simulation.pool
    if pool is None:
        return
    for link in pool.links():
        link.audit()
        assert link.num_active == 0, f"{link.num_active} transfers have not ended"
        assert link.moved_bytes == link.entered_bytes, f"{link.entered_bytes} bytes entered, {link.moved_bytes} left"
    clients = _clients(simulation)
    for client, means in zip(clients, pool.means, strict=True):
        for counted, moved_bytes in (
            (client.loaded, means.path.fetched_bytes),
            (client.stored, means.path.sent_bytes),
        ):
            counted_bytes = sum(moved.num_bytes for moved in counted.values())
            assert counted_bytes == moved_bytes, f"{moved_bytes} bytes moved, {counted_bytes} reported"
        means.load_threads.audit()
        means.store_threads.audit()
        if means.host is not None:
            means.host.audit()
            got = client.loaded[Tier.HOST].num_blocks
            assert got == means.host.counters.got, f"{got} blocks got, {means.host.counters}"
    got = sum(_of_pool(client.loaded) for client in clients)
    put = sum(_of_pool(client.stored) for client in clients)
    assert got == pool.store.counters.got, f"{got} blocks got, {pool.store.counters}"
    stored = events.of(Kind.STORED)
    num_reported = int(stored.a.sum() + stored.b.sum())
    assert put == (num_reported if simulation.scenario.pool is not None else 0), (
        f"{put} blocks put, {num_reported} reported"
    )


def pool_objects_conserved(simulation: Simulation, _events: Events) -> None:
    """Objects of the pool are conserved: put = present + evicted + removed, within its capacity."""
    if simulation.pool is not None:
        simulation.pool.store.audit()


# --- decisions --------------------------------------------------------------------------------------------------------


def loads_were_proven(simulation: Simulation, _events: Events) -> None:
    """Blocks loaded are among those that lookups found, these among those they asked for; as many or more were got."""
    pool = simulation.pool
    if pool is None:
        return
    num_loaded = 0
    for index, machine in _machines(simulation):
        decisions = machine.decisions
        num_loaded += count_blocks(decisions.loaded)
        unproven, unasked = minus(decisions.loaded, decisions.found), minus(decisions.found, decisions.looked_up)
        assert not any(unproven), f"request {index} loaded {unproven} unproven"
        assert not any(unasked), f"request {index} found {unasked} unasked"
    num_got = pool.store.counters.got + sum(means.host.counters.got for means in pool.means if means.host is not None)
    assert num_loaded <= num_got, (num_loaded, pool.store.counters)


def lookups_add_up(simulation: Simulation, _events: Events) -> None:
    """No key is asked twice in one dialogue; what the dialogues asked and found is what the tiers have counted."""
    pool = simulation.pool
    if pool is None:
        return
    clients = _clients(simulation)
    near = sum(client.num_near for client in clients)
    asked, found = (
        sum(client.num_asked for client in clients) - near,
        sum(client.num_found for client in clients) - near,
    )
    assert (asked, found) == (pool.store.counters.asked, pool.store.counters.found), (asked, found, pool.store.counters)


def loads_were_stored(simulation: Simulation, _events: Events) -> None:
    """Nothing is got that was not put before."""
    if simulation.pool is None:
        return
    counters = simulation.pool.store.counters
    assert counters.put or not (counters.found or counters.got), counters
    loaded = _contents(simulation, lambda machine: machine.decisions.loaded)
    # A private cache has what the pool refused.
    is_shared = all(means.host is None for means in simulation.pool.means)
    stored = _contents(simulation, _stored if is_shared else _stored_or_refused)
    for lineage, runs in loaded.items():
        unknown = subtract(runs, stored.get(lineage, ()))
        assert not unknown, f"(group, stream) {lineage}: blocks {unknown} were never stored"


def machines_closed(simulation: Simulation, _events: Events) -> None:
    """Nobody reads or writes a block any more."""
    open_ones = [index for index, machine in _machines(simulation) if not machine.closed]
    assert not open_ones, f"requests {open_ones[:3]} wait for a report"


def lost_blocks_reported(simulation: Simulation, events: Events) -> None:
    """Every block that was to be stored is reported, as written or as rejected."""
    pool = simulation.pool
    if pool is None:
        return
    stored = events.of(Kind.STORED)
    assert pool.store.counters.rejected == int(stored.b.sum()), (pool.store.counters, int(stored.b.sum()))
    reported = np.bincount(stored.request, stored.a + stored.b, minlength=len(simulation.cluster.sequences))
    for index, machine in _machines(simulation):
        decisions = machine.decisions
        planned = plus(decisions.stored, decisions.rejected)
        assert count_blocks(planned) <= reported[index], f"request {index}: {planned}, reported {reported[index]}"


def hits_aligned(simulation: Simulation, events: Events) -> None:
    """Every hit is a whole number of blocks and leaves at least one token to compute."""
    block_size = simulation.scenario.kv_model.alignment
    admitted, loaded = events.of(Kind.ADMITTED), events.of(Kind.LOADED)
    for name, tokens in (("local", admitted.a), ("external", admitted.b), ("loaded", loaded.a)):
        assert not (tokens % block_size).any(), f"{name} hits are not aligned to {block_size}"
    arrived = events.of(Kind.ARRIVED)
    input_len = np.zeros(len(simulation.cluster.sequences), dtype=np.int64)
    input_len[arrived.request] = arrived.a
    full = admitted.a + admitted.b >= input_len[admitted.request]
    assert not full.any(), f"requests {admitted.request[full][:3]} have nothing to compute"


def load_attempts_bounded(simulation: Simulation, events: Events) -> None:
    """A request's loads fail a bounded number of times."""
    if simulation.pool is None:
        return
    loaded, limit = events.of(Kind.LOADED), simulation.pool.policy.max_load_attempts
    failures = Counter(loaded.request[loaded.b > 0].tolist())
    too_many = {index: failed for index, failed in failures.items() if failed > limit}
    assert not too_many, f"failed loads by request {too_many}, at most {limit}"


def log_tells_decisions(simulation: Simulation, events: Events) -> None:
    """The log and the decisions say the same: hits, grants and late misses."""
    admitted, loaded = events.of(Kind.ADMITTED), events.of(Kind.LOADED)
    late = np.bincount(loaded.request, loaded.b, minlength=len(simulation.cluster.sequences))
    decisions = simulation.decisions()
    for index, *hits in zip(admitted.request.tolist(), admitted.a.tolist(), admitted.b.tolist(), strict=True):
        decision = decisions[index]
        decided = [] if decision is None else [decision.local_hit_len, decision.granted_len]
        assert hits == decided, f"request {index}: logged {hits}, decided {decided}"
    for index, machine in _machines(simulation):
        assert machine.decisions.late_misses == late[index], f"request {index}: {late[index]:.0f} late misses logged"


INVARIANTS: dict[int, Callable[[Simulation, Events], None]] = {
    1: requests_conserved,
    2: gpu_blocks_conserved,
    4: bytes_conserved,
    5: clock_monotone,
    7: loads_were_proven,
    8: loads_were_stored,
    9: machines_closed,
    10: lost_blocks_reported,
    11: hits_aligned,
    14: load_attempts_bounded,
    19: pool_objects_conserved,
    20: log_tells_decisions,
    21: lookups_add_up,
}
"""By their number in docs/INVARIANTS.md; the others there are properties under test."""


# --- inside -----------------------------------------------------------------------------------------------------------


def _clients(simulation: Simulation) -> list[PoolClient]:
    """By instance, where there is a pool."""
    return [instance.client for instance in simulation.instances if instance.client is not None]


def _of_pool(moved: dict[Tier, Moved]) -> int:
    """Blocks."""
    return sum(each.num_blocks for tier, each in moved.items() if tier is not Tier.HOST)


def _stored(machine: KVRequest) -> GroupRuns:
    return machine.decisions.stored


def _stored_or_refused(machine: KVRequest) -> GroupRuns:
    return plus(machine.decisions.stored, machine.decisions.rejected)


def _sequences(simulation: Simulation) -> Iterator[Sequence]:
    """Those that were not rejected."""
    return (sequence for sequence in simulation.cluster.sequences if sequence is not None)


def _machines(simulation: Simulation) -> Iterator[tuple[int, KVRequest]]:
    """Machines by request, where there are any."""
    return ((sequence.index, sequence.kv) for sequence in _sequences(simulation) if sequence.kv is not None)


def _contents(simulation: Simulation, blocks: Callable[[KVRequest], tuple[Runs, ...]]) -> dict[Lineage, Runs]:
    """What the blocks of all machines hold, by content."""
    found: defaultdict[Lineage, list[Run]] = defaultdict(list)
    for sequence in _sequences(simulation):
        for group, runs in enumerate(blocks(sequence.kv) if sequence.kv is not None else ()):
            for stream, start, end in sequence.names[group] if runs else ():
                for a, b in runs:
                    if a < end and start < b:
                        found[group, stream].append((max(start, a), min(end, b)))
    return {lineage: normalize(runs) for lineage, runs in found.items()}


def _where(wrong: npt.NDArray[np.bool_]) -> list[int]:
    """The first few indices where `wrong` holds."""
    return [int(index) for index in np.flatnonzero(wrong)[:3]]
