"""Several ranks of one engine over one store: replicas are written once, in turn, and each rank loads what it holds."""

from collections import Counter
from dataclasses import replace
from functools import reduce

import pytest
from kvconnector.config import PoolConfig
from kvconnector.jobs import Ended, LoadJob, StoreJob

from connector.testbed.pool import Pool
from kvcore.errors import InvalidArgument
from kvcore.keys import BlockKey, Namespace, parse_key
from kvcore.ports import StoreOutcome
from kvcore.ranks import RankLayout, Sharding
from tests.kvconnector.test_transfer import MonotonicClock, until
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
USED = [5, 2, 0, 1, 4]
"""The block ids in it."""


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


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_engines_of_two_tensor_parallel_sizes_load_what_the_other_stored(workers, store, num_kv_heads):
    """A latent on one rank and on four, or two KV heads on two ranks and on four; each shard is stored once."""
    import torch

    few, many = Sharding(RankLayout(tp=num_kv_heads), num_kv_heads), Sharding(FOUR, num_kv_heads)
    for namespace, writing, reading in ((Namespace("up"), few, many), (Namespace("down"), many, few)):
        heads = [random_cache(2, 3) for _ in range(num_kv_heads)]
        written = [heads[writing.shard_of(rank)].clone() for rank in range(writing.layout.num_ranks)]
        for rank, cache in enumerate(written):
            writer = workers([cache], rank=rank, cuts=(writing,))
            step(writer, stores=[StoreJob(1, "a", namespace, BLOCKS)])
            outcome(writer)
        stored = Counter(key for key in store.put_keys if key.namespace == namespace)
        assert stored == Counter(key for block in range(5) for key in reading.keys(namespace, 0, b"h%d" % block))
        for rank in range(reading.layout.num_ranks):
            cache = random_cache(2, 3)
            reader = workers([cache], rank=rank, cuts=(reading,))
            step(reader, loads=[LoadJob(2, "b", namespace, BLOCKS)])
            assert outcome(reader)[3] == [Ended(2, 1, ())]
            assert torch.equal(cache[USED], heads[reading.shard_of(rank)][USED])


# --- pipeline stages --------------------------------------------------------------------------------------------------

STAGES = (Sharding(RankLayout(pp=2), 1),)
LAYERS = [(2, 3), (2, 3)], [(4,)]
"""Of the group on each stage: shape of a layer's block."""


def stage_layers():
    return [[random_cache(*shape) for shape in layers] for layers in LAYERS]


def store_and_load_on_two_stages(stores, workers):
    """Each stage stores what is in its layers, and loads it into an engine's that has other bytes there."""
    import torch

    written, read = stage_layers(), stage_layers()
    for caches, jobs in (
        (written, {"stores": [StoreJob(1, "a", N, BLOCKS)]}),
        (read, {"loads": [LoadJob(1, "b", N, BLOCKS)]}),
    ):
        for rank, layers in enumerate(caches):
            worker = workers(stores[rank], layers, rank)
            step(worker, **jobs)
            assert outcome(worker)[3] == [Ended(1, 1, ())]
    for layers, wanted in zip(read, written, strict=True):
        for layer, right in zip(layers, wanted, strict=True):
            assert torch.equal(layer[USED], right[USED])


def test_two_stages_store_and_load_their_own_layers(workers, store):
    store_and_load_on_two_stages((store, store), lambda _, layers, rank: workers(layers, rank=rank, cuts=STAGES))
    assert Counter(key.rank for key in store.put_keys) == {0: len(BLOCKS), 1: len(BLOCKS)}
    assert [len(store.raw(BlockKey(N, 0, stage, b"h0"))) for stage in (0, 1)] == [2 * 2 * 3 * 4, 4 * 4]


@pytest.mark.store
@pytest.mark.slow
def test_two_stages_store_and_load_their_own_layers_in_the_real_pool(tmp_path):
    """Each through a client of its own, as in a process of its own."""
    from kvconnector.store import MooncakeStore

    pool, made = Pool(tmp_path), []
    config = PoolConfig(pool.master.address, local_hostname="127.0.0.1")

    def make(client, layers, rank):
        made.append(make_worker(client, [layers], rank, cuts=STAGES))
        return made[-1]

    clients = [MooncakeStore(config, MonotonicClock()) for _ in LAYERS]
    try:
        store_and_load_on_two_stages(clients, make)
        assert Counter(parse_key(key).rank for key in pool.master.stored_keys()) == {0: len(BLOCKS), 1: len(BLOCKS)}
    finally:
        for worker in made:
            assert worker.close()
        for client in clients:
            client.close()
        pool.kill()


def test_control_a_stage_cannot_load_what_another_one_stored(workers, store):
    layers = stage_layers()
    writer = workers(layers[1], rank=1, cuts=STAGES)
    step(writer, stores=[StoreJob(1, "a", N, BLOCKS)])
    outcome(writer)
    for rank, caches in ((0, layers[0]), (1, layers[0])):  # not there; there, and of another length
        reader = workers(caches, rank=rank, cuts=STAGES)
        step(reader, loads=[LoadJob(2, "b", N, BLOCKS)])
        assert len(outcome(reader)[3][0].failed) == len(BLOCKS)


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
