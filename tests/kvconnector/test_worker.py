"""The worker half on torch tensors and a store in memory: right bytes, and every block not loaded is reported."""

import ctypes
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kvconnector.config import ConnectorConfig, Integrity
from kvconnector.jobs import Ended, LoadJob, StoreJob, Stretch
from kvconnector.pool_config import PoolConfig
from kvconnector.seal import SealedStore, seal_of

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockKey, Namespace
from kvcore.memory_store import MemoryStore
from kvcore.ports import StoreOutcome
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from tests.kvconnector.test_transfer import MonotonicClock, until

pytestmark = pytest.mark.engine

FULL = FullAttention(32)
NUM_BLOCKS = 6
N = Namespace("n")
CONFIG = ConnectorConfig(PoolConfig("nowhere:1"))


class AddressedStore:
    """A MemoryStore whose buffers are addresses, which must be registered; can be held up and made to fail."""

    def __init__(self):
        self.memory = MemoryStore(MonotonicClock())
        self.ranges = []
        self.failing = {}
        self.open = threading.Event()
        self.open.set()

    def register(self, address, size_bytes):
        self.ranges.append((address, size_bytes))

    def unregister(self, address):
        (known,) = [known for known in self.ranges if known[0] == address]
        self.ranges.remove(known)

    def put(self, keys, buffers, deadline_ns):
        self.open.wait()
        values = [bytearray().join(ctypes.string_at(*piece) for piece in self._checked(pieces)) for pieces in buffers]
        return self.memory.put(keys, values, deadline_ns)

    def get(self, keys, buffers, deadline_ns):
        self.open.wait()
        outcomes = []
        for key, pieces in zip(keys, buffers, strict=True):
            value = bytearray(sum(size for _, size in self._checked(pieces)))
            outcome = self.failing.get(key.block_hash) or self.memory.get([key], [value], deadline_ns)[0]
            for address, size in pieces if outcome is StoreOutcome.OK else ():
                ctypes.memmove(address, bytes(value[:size]), size)
                del value[:size]
            outcomes.append(outcome)
        return outcomes

    def exists(self, keys, deadline_ns):
        return self.memory.exists(keys, deadline_ns)

    def remove(self, keys, deadline_ns):
        return self.memory.remove(keys, deadline_ns)

    def raw(self, key):
        """The object's bytes, as anybody sees them who can read the pool."""
        return bytes(self.memory._objects[key])

    def plant(self, key, data):
        """What anybody can do who can write to the pool."""
        assert self.memory.remove([key], 1 << 62) == [StoreOutcome.OK]
        assert self.memory.put([key], [bytearray(data)], 1 << 62) == [StoreOutcome.OK]

    def _checked(self, pieces):
        for address, size in pieces:
            assert any(start <= address and address + size <= start + length for start, length in self.ranges)
        return pieces


def make_worker(store, groups, rank=0, spec=FULL, config=CONFIG, cuts=()):
    """A worker half with one layer per entry of `groups`: a list of layers, each a torch tensor or a list of them."""
    from kvconnector.worker import WorkerHalf

    caches = {f"{number}.{layer}": cache for number, group in enumerate(groups) for layer, cache in enumerate(group)}
    layer_names = [[f"{number}.{layer}" for layer in range(len(group))] for number, group in enumerate(groups)]
    cache_config = SimpleNamespace(
        num_blocks=NUM_BLOCKS, kv_cache_groups=[SimpleNamespace(layer_names=names) for names in layer_names]
    )
    model = ModelSpec(tuple(spec for _ in groups))
    worker = WorkerHalf(config, store, MonotonicClock(), rank, model, cuts=cuts)
    worker.register_kv_caches(caches, cache_config)
    return worker


def random_cache(*shape):
    import torch

    return torch.randn((NUM_BLOCKS, *shape))


def step(worker, loads=(), stores=()):
    from kvconnector.metadata import StepMetadata

    metadata = StepMetadata(tuple(loads), tuple(stores))
    worker.start_load_kv(metadata)
    worker.wait_for_save(metadata)


def outcome(worker):
    """(received, failed, blocks without data, ended jobs) of the first step in which a job has ended."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        results = worker.get_transfer_results()
        blocks, report = worker.take_unloaded_block_ids(), worker.take_report()
        if report is not None:
            return results.finished_recving, results.failed_recving, blocks, list(report.finished)
        assert not results.finished_recving
        assert not blocks
    raise AssertionError("no job ended")


@pytest.fixture
def store():
    return AddressedStore()


@pytest.fixture
def workers(store):
    made = []

    def make(*groups, rank=0, spec=FULL, store=store, config=CONFIG, cuts=()):
        made.append(make_worker(store, groups, rank, spec, config, cuts))
        return made[-1]

    yield make
    store.open.set()
    assert all(worker.close() for worker in made)


def entries(*blocks, group=0):
    """(position, block id) ..., each a stretch of its own."""
    return tuple(Stretch(group, range(at, at + 1), [b"h%d" % at], [block]) for at, block in blocks)


def test_what_one_worker_stored_another_one_loads_into_other_blocks(workers, store):
    import torch

    written, read = ([random_cache(2, 4, 3), random_cache(2, 4, 3)] for _ in range(2))
    before = [layer.clone() for layer in read]
    writer, reader = workers(written), workers(read)
    step(writer, stores=[StoreJob(1, "a", N, entries((0, 5), (1, 2)))])
    assert outcome(writer) == (set(), set(), set(), [Ended(1, 1, ())])
    step(reader, loads=[LoadJob(7, "b", N, entries((1, 0), (0, 3)))])
    assert outcome(reader) == ({"b"}, set(), set(), [Ended(7, 1, ())])
    for source, target, kept in zip(written, read, before, strict=True):
        assert torch.equal(target[0], source[2])
        assert torch.equal(target[3], source[5])
        assert torch.equal(target[[1, 2, 4, 5]], kept[[1, 2, 4, 5]])


def test_a_recurrent_layer_s_states_travel_together(workers):
    import torch

    written, read = ([[random_cache(3), random_cache(2, 2)]] for _ in range(2))
    writer, reader = workers(written), workers(read)
    step(writer, stores=[StoreJob(1, "a", N, entries((4, 1)))])
    outcome(writer)
    step(reader, loads=[LoadJob(2, "b", N, entries((4, 0)))])
    outcome(reader)
    for source, target in zip(written[0], read[0], strict=True):
        assert torch.equal(target[0], source[1])


def test_with_one_group_exactly_the_blocks_without_data_are_reported(workers, store):
    worker = workers([random_cache(2)])
    step(worker, stores=[StoreJob(1, "a", N, entries((0, 0), (1, 1), (2, 2)))])
    outcome(worker)
    store.failing[b"h1"] = StoreOutcome.TIMEOUT
    step(worker, loads=[LoadJob(2, "b", N, entries((0, 3), (1, 4), (9, 5)), unwritten=(2,))])
    assert outcome(worker) == ({"b"}, set(), {4, 5, 2}, [Ended(2, 1, failed=(1, 2), gone=(2,))])
    assert (worker.take_unloaded_block_ids(), worker.take_report()) == (set(), None)


def test_with_several_groups_the_request_is_reported_because_block_ids_are_ambiguous(workers, store):
    worker = workers([random_cache(2)], [random_cache(2)])
    good, bad = entries((0, 0)) + entries((0, 0), group=1), entries((0, 1)) + entries((3, 1), group=1)
    step(worker, stores=[StoreJob(1, "a", N, good)])
    outcome(worker)
    step(worker, loads=[LoadJob(2, "b", N, good), LoadJob(3, "c", N, bad), LoadJob(4, "d", N, (), unwritten=(5,))])
    received, failed, blocks, ended = set(), set(), set(), []
    while len(ended) < 3:
        for total, new in zip((received, failed, blocks, ended), outcome(worker), strict=True):
            total.extend(new) if isinstance(total, list) else total.update(new)
    assert (received, failed, blocks) == ({"b", "c", "d"}, {"c", "d"}, set())
    assert ended == [Ended(2, 1, ()), Ended(3, 1, (1,), (1,)), Ended(4, 1, ())]


def test_with_a_window_the_request_is_reported_because_its_past_is_missing(workers, store):
    worker = workers([random_cache(2)], spec=SlidingWindow(32, 64))
    step(worker, loads=[LoadJob(1, "a", N, entries((7, 3)))])
    assert outcome(worker) == ({"a"}, {"a"}, set(), [Ended(1, 1, (0,), (0,))])


def test_groups_and_ranks_and_namespaces_never_answer_for_each_other(workers):
    writer = workers([random_cache(2)], [random_cache(2)])
    step(writer, stores=[StoreJob(1, "a", N, entries((0, 0)))])
    outcome(writer)
    wrong = [
        (workers([random_cache(2)]), Namespace("other"), 0),
        (workers([random_cache(2)], rank=1), N, 0),
        (writer, N, 1),
    ]
    for worker, namespace, group in wrong:
        step(worker, loads=[LoadJob(2, "b", namespace, entries((0, 1), group=group))])
        assert outcome(worker)[3] == [Ended(2, 1, (0,), (0,))]


def test_nothing_is_reported_while_a_byte_may_still_move(workers, store):
    worker = workers([random_cache(2)])
    store.open.clear()
    step(worker, loads=[LoadJob(1, "a", N, entries((0, 0)))], stores=[StoreJob(2, "b", N, entries((1, 1)))])
    time.sleep(0.02)
    results = worker.get_transfer_results()
    assert (results.finished_recving, worker.take_report()) == (set(), None)
    store.open.set()
    ended = []
    until(lambda: ended.extend(outcome(worker)[3]) or len(ended) == 2)
    assert sorted(ended) == [Ended(1, 1, (0,), (0,)), Ended(2, 1, ())]


def test_an_engine_falls_asleep_when_nothing_moves_and_wakes_with_its_memory_registered(workers, store):
    cache = random_cache(2)
    worker, before = workers([cache]), list(store.ranges)
    store.open.clear()
    step(worker, stores=[StoreJob(1, "a", N, entries((0, 0)))])
    asleep = threading.Thread(target=worker.unregister_kv_caches)
    asleep.start()
    asleep.join(0.05)
    assert (asleep.is_alive(), store.ranges) == (True, before), "its memory is being read"
    store.open.set()
    asleep.join(5)
    assert (asleep.is_alive(), store.ranges) == (False, [])
    worker.unregister_kv_caches()
    for _ in range(2):
        worker.restore_kv_caches()
    assert store.ranges == before
    step(worker, loads=[LoadJob(2, "b", N, entries((0, 1)))])
    until(lambda: worker._loads._ended)
    assert sorted(outcome(worker)[3]) == [Ended(1, 1, ()), Ended(2, 1, ())]
    assert (cache[1] == cache[0]).all()


SECRET = b"a secret of sixteen bytes"
SEALED = {
    Integrity.CHECKSUM: replace(CONFIG, integrity=Integrity.CHECKSUM),
    Integrity.KEYED: replace(CONFIG, integrity=Integrity.KEYED, integrity_secret=SECRET),
}


def flipped(value):
    return bytes([value[0] ^ 1]) + value[1:]


@pytest.mark.parametrize("integrity", Integrity)
def test_a_damaged_object_is_refused_counted_and_removed_or_not_noticed(workers, store, integrity):
    import torch

    config = SEALED.get(integrity, CONFIG)
    source, target = random_cache(2), random_cache(2)
    sealed = store if integrity is Integrity.NONE else SealedStore(store, seal_of(config))
    writer, reader = (workers([cache], store=sealed, config=config) for cache in (source, target))
    step(writer, stores=[StoreJob(1, "a", N, entries((0, 0), (1, 1), (2, 2)))])
    outcome(writer)
    damaged, shortened = (BlockKey(N, 0, 0, b"h%d" % number) for number in (1, 2))
    store.plant(damaged, flipped(store.raw(damaged)))
    store.plant(shortened, store.raw(shortened)[1:])
    step(reader, loads=[LoadJob(2, "b", N, entries((0, 3), (1, 4), (2, 5)))])
    refused = {5} if integrity is Integrity.NONE else {4, 5}
    indices = tuple(block - 3 for block in sorted(refused))
    assert outcome(reader) == ({"b"}, set(), refused, [Ended(2, 1, indices, indices)])
    assert torch.equal(target[3], source[0])
    counts = {name: count for name, count in reader.tally.take().items() if name.startswith("keys_total")}
    if integrity is Integrity.NONE:
        assert counts == {"keys_total:load:ok": 2, "keys_total:load:bad_length": 1}
        assert not torch.equal(target[4], source[1]), "the control: nobody verified it"
        assert store.exists([damaged, shortened], 1 << 62) == [StoreOutcome.OK] * 2
        return
    assert counts == {"keys_total:load:ok": 1, "keys_total:load:bad_content": 1, "keys_total:load:bad_length": 1}
    assert store.exists([damaged, shortened], 1 << 62) == [StoreOutcome.MISSING] * 2
    # What is computed instead takes their place.
    step(writer, stores=[StoreJob(3, "b", N, entries((1, 1), (2, 2)))])
    outcome(writer)
    step(reader, loads=[LoadJob(4, "c", N, entries((0, 3), (1, 4), (2, 5)))])
    assert outcome(reader) == ({"c"}, set(), set(), [Ended(4, 1, ())])
    assert torch.equal(target[3:], source[:3])


def test_a_layer_without_cache_is_named(store):
    with pytest.raises(InvalidArgument, match="missing layer"):
        from kvconnector.worker import WorkerHalf

        model = ModelSpec((FULL,))
        worker = WorkerHalf(CONFIG, store, MonotonicClock(), 0, model)
        groups = [SimpleNamespace(layer_names=["missing layer"])]
        try:
            worker.register_kv_caches({"a": random_cache(1)}, SimpleNamespace(num_blocks=6, kv_cache_groups=groups))
        finally:
            worker.close()


# --- what crosses between the halves --------------------------------------------------------------------------------


def test_reports_of_several_ranks_add_up_in_any_order():
    from kvconnector.metadata import WorkerReport

    left = WorkerReport((Ended(1, 1, (0, 2), (2,)), Ended(2, 1, ())))
    right = WorkerReport((Ended(3, 1, (1,)), Ended(1, 2, (2, 5), (5,))))
    assert left.aggregate(right).finished == (Ended(1, 3, (0, 2, 5), (2, 5)), Ended(2, 1, ()), Ended(3, 1, (1,)))
    assert sorted(right.aggregate(left).finished) == sorted(left.aggregate(right).finished)


def test_messages_survive_pickling():
    import pickle

    from kvconnector.metadata import StepMetadata, WorkerReport

    step_metadata = StepMetadata((LoadJob(1, "a", N, entries((0, 1))),), (StoreJob(2, "b", N, ()),))
    for message in (step_metadata, WorkerReport((Ended(1, 1, (0,)),))):
        copy = pickle.loads(pickle.dumps(message))
        assert (copy, type(copy)) == (message, type(message))
    assert bool(WorkerReport(()))  # the engine drops a falsy report
