"""Several ranks of one engine over one store: replicas are written once, in turn, and each rank loads what it holds."""

from collections import Counter
from dataclasses import replace
from functools import reduce

import pytest
from kvconnector.jobs import Ended, LoadJob, StoreJob

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockKey
from kvcore.ports import StoreOutcome
from kvcore.ranks import RankLayout, Sharding
from tests.kvconnector.test_transfer import until
from tests.kvconnector.test_worker import CONFIG, AddressedStore, N, entries, make_worker, outcome, random_cache, step

pytestmark = pytest.mark.engine

FOUR = RankLayout(tp=4)


class Shared(AddressedStore):
    """Remembers what was put, and has no room for some."""

    def __init__(self):
        super().__init__()
        self.put_keys, self.full = [], set()

    def put(self, keys, buffers, deadline_ns):
        self.put_keys += keys
        outcomes = super().put(keys, buffers, deadline_ns)
        full = [key.block_hash in self.full for key in keys]
        return [StoreOutcome.NO_SPACE if no else outcome for no, outcome in zip(full, outcomes, strict=True)]


@pytest.fixture
def store():
    return Shared()


@pytest.fixture
def workers(store):
    """Makes the worker half of a rank, with the groups given."""
    made = []

    def make(*groups, rank=0, cuts=(), config=CONFIG):
        made.append(make_worker(store, groups, rank, config=config, cuts=cuts))
        return made[-1]

    yield make
    store.open.set()
    assert all(worker.close() for worker in made)


def aggregated(ranks):
    """What the scheduler half is told of the one job that has ended on every rank."""
    from kvconnector.metadata import WorkerReport

    reports = [WorkerReport(tuple(outcome(rank)[3])) for rank in ranks]
    (ended,) = reduce(WorkerReport.aggregate, reports).finished
    return ended


BLOCKS = entries((0, 5), (1, 2), (2, 0), (3, 1), (4, 4))


@pytest.mark.parametrize("cut", [Sharding(FOUR, 2), Sharding(RankLayout(tp=2, pp=2), 1)], ids=["heads", "stages"])
def test_each_replica_writes_in_turn_and_every_rank_loads(workers, store, cut):
    """Two KV heads on four ranks, or a latent on two stages of two: 0 and 1 hold the same, and so do 2 and 3."""
    import torch

    heads = [random_cache(2, 3) for _ in range(2)]
    written = [[heads[rank // 2].clone()] for rank in range(4)]
    writers = [workers(written[rank], rank=rank, cuts=(cut,)) for rank in range(4)]
    job = StoreJob(1, "a", N, BLOCKS)
    for rank, writer in enumerate(writers):
        step(writer, stores=[job])
        (ended,) = outcome(writer)[3]
        own = [key for key in store.put_keys if cut.owner(key.rank, 0, int(key.block_hash[1:])) == rank]
        assert store.put_keys[-len(own) :] == own
        assert ended == Ended(1, 1, ())
    assert Counter(store.put_keys) == Counter(
        BlockKey(N, 0, shard, entry.block_hash) for entry in StoreJob(1, "a", N, BLOCKS).entries for shard in range(2)
    )
    read = [[random_cache(2, 3)] for _ in range(4)]
    readers = [workers(read[rank], rank=rank, cuts=(cut,)) for rank in range(4)]
    for rank, reader in enumerate(readers):
        step(reader, loads=[LoadJob(2, "b", N, entries((0, 0), (1, 1), (2, 2), (3, 3), (4, 4)))])
        assert outcome(reader) == ({"b"}, set(), set(), [Ended(2, 1, ())])
        assert torch.equal(read[rank][0][:5], heads[rank // 2][[5, 2, 0, 1, 4]])


def test_control_without_turns_each_writes_everything(workers, store):
    for rank in range(2):
        worker = workers([random_cache(2)], rank=rank)
        step(worker, stores=[StoreJob(1, "a", N, BLOCKS)])
        outcome(worker)
    assert len(store.put_keys) == 2 * len(BLOCKS)


def test_what_its_owner_could_not_store_has_failed_for_all(workers, store):
    cut = Sharding(FOUR, 1)
    ranks = [workers([random_cache(2)], rank=rank, cuts=(cut,)) for rank in range(4)]
    store.full = {b"h1", b"h4"}
    for rank in ranks:
        step(rank, stores=[StoreJob(3, "a", N, BLOCKS)])
    assert aggregated(ranks) == Ended(3, 4, failed=(1, 4))
    assert len(store.put_keys) == len(BLOCKS)


def test_a_rank_that_has_no_turn_reports_too(workers):
    cut = Sharding(FOUR, 1)
    ranks = [workers([random_cache(2)], rank=rank, cuts=(cut,)) for rank in range(4)]
    for rank in ranks:
        step(rank, stores=[StoreJob(3, "a", N, entries((6, 0)))])
    assert aggregated(ranks) == Ended(3, 4, ())


def test_a_rank_that_comes_too_late_fails_with_its_own_part_only(workers, store):
    """A job that its thread has not begun by its deadline ends unmoved."""
    cut, impatient = Sharding(RankLayout(tp=2), 1), replace(CONFIG, store_deadline_ms=300)
    late = workers([random_cache(2)], rank=0, cuts=(cut,), config=impatient)
    timely = workers([random_cache(2)], rank=1, cuts=(cut,))
    store.open.clear()
    step(late, stores=[StoreJob(2, "a", N, entries((8, 3)))])  # holds its thread up
    until(lambda: not late._stores.num_waiting)
    for rank in (late, timely):
        step(rank, stores=[StoreJob(3, "a", N, BLOCKS)])
    assert outcome(late)[3] == [Ended(3, 1, failed=(0, 2, 4))]
    store.open.set()
    assert outcome(timely)[3] == [Ended(3, 1, ())]


def test_a_latent_beside_kv_heads_has_one_object_and_they_have_one_per_rank(workers, store):
    two = RankLayout(tp=2)
    cuts = Sharding(two, 1), Sharding(two, 2)
    for rank in range(2):
        worker = workers([random_cache(2)], [random_cache(3)], rank=rank, cuts=cuts)
        both = entries((0, 0), (1, 1)) + entries((0, 2), (1, 3), group=1)
        step(worker, stores=[StoreJob(1, "a", N, both)])
        outcome(worker)
    assert Counter((key.group, key.rank) for key in store.put_keys) == {(0, 0): 2, (1, 0): 2, (1, 1): 2}


def test_a_shard_that_is_lost_is_missed_by_its_rank_and_gone_for_all(workers, store):
    cut = Sharding(RankLayout(tp=2), 2)
    ranks = [workers([random_cache(2)], rank=rank, cuts=(cut,)) for rank in range(2)]
    for rank in ranks:
        step(rank, stores=[StoreJob(1, "a", N, BLOCKS)])
        outcome(rank)
    assert store.remove([BlockKey(N, 0, 1, b"h2")], 1 << 62) == [StoreOutcome.OK]
    for rank in ranks:
        step(rank, loads=[LoadJob(2, "b", N, BLOCKS)])
    assert aggregated(ranks) == Ended(2, 2, failed=(2,), gone=(2,))


def test_a_stage_without_layers_of_a_group_is_refused(workers):
    with pytest.raises(InvalidArgument, match="layers of every KV cache group on every pipeline stage"):
        workers([random_cache(2)], [])


# --- with vLLM's scheduler --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_kv_heads", "objects"), [(1, 10), (64, 20)])
def test_an_engine_of_two_ranks_has_one_object_where_they_hold_the_same(monkeypatch, num_kv_heads, objects):
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    engine = modelless_engine.Engine([modelless_engine.full(4)], 80, num_ranks=2, num_kv_heads=num_kv_heads)
    text, moved = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN", []
    for rank in engine.ranks:
        rank.half._stores.submit = lambda job, ready, rank=rank, submit=rank.half._stores.submit: (
            moved.append((rank.number, len(job.entries))), submit(job, ready)
        )  # fmt: skip
    engine.add("writer", text, 1)
    engine.drain()
    assert len(engine.pool) == objects
    shares = Counter()
    for number, count in moved:
        shares[number] += count
    assert shares == ({0: 5, 1: 5} if num_kv_heads == 1 else {0: 10, 1: 10})
    assert engine.scheduler.reset_prefix_cache()
    engine.add("reader", text, 1)
    engine.drain()
    assert engine.decisions[-1].granted_len == 36
    assert engine.outputs["reader"] == engine.outputs["writer"]
    lost = next(key for key in engine.pool if key.rank == engine.cuts[0].num_shards - 1 and len(key.block_hash) == 12)
    del engine.pool[lost]
    assert engine.scheduler.reset_prefix_cache()
    engine.add("after a loss", text, 1)
    engine.drain()
    assert engine.decisions[-1].granted_len == 8, "the hit ends before the block that one rank lacks"
