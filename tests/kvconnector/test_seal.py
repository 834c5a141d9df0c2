"""A sealed object is loaded as it was stored, or refused: whatever happened to it in between, and whoever made it."""

import ctypes
import hashlib
import sys
import threading
from types import SimpleNamespace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvconnector import seal as seal_module
from kvconnector.config import ConnectorConfig, Integrity
from kvconnector.pool_config import PoolConfig
from kvconnector.seal import TRAILER_BYTES, Seal, SealedStore, checksum, keyed, require_final_blocks, seal_of

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.ports import StoreOutcome
from kvcore.spec import FullAttention, ModelSpec, Recurrent
from tests.kvconnector.test_worker import AddressedStore

OK, MISSING, BAD_LENGTH = StoreOutcome.OK, StoreOutcome.MISSING, StoreOutcome.BAD_LENGTH
BAD_CONTENT, TIMEOUT, UNAVAILABLE = StoreOutcome.BAD_CONTENT, StoreOutcome.TIMEOUT, StoreOutcome.UNAVAILABLE
SOON_NS = 1 << 62
SECRET, OTHER_SECRET = b"a secret of sixteen bytes", b"a secret of sixteen bytez"
SEALS = {"checksum": checksum(), "keyed": keyed(SECRET)}

seals = st.sampled_from(sorted(SEALS)).map(SEALS.get)
contents = st.binary(min_size=1, max_size=200)


def key(number):
    return BlockKey(Namespace("n"), 0, 0, BlockHash(number.to_bytes(4, "big")))


class Memory:
    """A block in registered memory, cut into pieces."""

    def __init__(self, store, data, cuts=()):
        self.memory = ctypes.create_string_buffer(bytes(data), len(data))
        start = ctypes.addressof(self.memory)
        store.register(start, len(data))
        ends = [*sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
        self.pieces = [(start + a, b - a) for a, b in zip([0, *ends], ends, strict=False)]

    @property
    def data(self):
        return self.memory.raw


def stored(seal, objects, cuts=()):
    """A store with the objects, put through the seal: (raw store, its content by key)."""
    raw = AddressedStore()
    sealed = SealedStore(raw, seal)
    memories = [Memory(raw, data, cuts) for data in objects.values()]
    assert sealed.put(list(objects), [memory.pieces for memory in memories], SOON_NS) == [OK] * len(objects)
    return raw


def load(raw, seal, name, size_bytes, cuts=()):
    """(outcome, content) of a get by an engine with this seal; None: one that verifies nothing."""
    store = raw if seal is None else SealedStore(raw, seal)
    memory = Memory(raw, bytes(size_bytes), cuts)
    (outcome,) = store.get([name], [memory.pieces], SOON_NS)
    return outcome, memory.data


# -- what was stored ---------------------------------------------------------------------------------------------------


@given(seals, contents, st.lists(st.integers(0, 200), max_size=5), st.lists(st.integers(0, 200), max_size=5))
def test_what_was_stored_is_loaded_however_memory_is_cut(seal, data, cuts, other_cuts):
    raw = stored(seal, {key(1): data}, cuts)
    assert load(raw, seal, key(1), len(data), other_cuts) == (OK, data)
    assert raw.raw(key(1))[:-TRAILER_BYTES] == data


def test_a_trailer_is_32_bytes_and_says_which_kind_it_is():
    memory = Memory(AddressedStore(), b"content")
    trailers = [seal.trailer(b"name", memory.pieces) for seal in SEALS.values()]
    assert [(trailer[:8], len(trailer)) for trailer in trailers] == [(b"kvtwin1c", 32), (b"kvtwin1k", 32)]


def test_a_trailer_spelled_out():
    """Other versions must make the same ones, or take another tag."""
    memory, said = Memory(AddressedStore(), b"content", [3]), b"\0\0\0\x04" + b"name" + b"content"
    plain = b"kvtwin1c" + xxhash.xxh3_128_digest(said) + bytes(8)
    key = hashlib.blake2b(SECRET).digest()
    secret = b"kvtwin1k" + hashlib.blake2b(said, key=key, digest_size=24, person=b"kvtwin trailer").digest()
    assert [seal.trailer(b"name", memory.pieces) for seal in SEALS.values()] == [plain, secret]
    assert plain.hex() == "6b767477696e316311a0511729537ccda77fdff22dcf6a010000000000000000"
    assert secret.hex() == "6b767477696e316b3d1b45a226c705ed93048f14223d334c5c9e0aca8f7ec2e0"


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
def test_more_objects_than_a_call_takes_have_a_trailer_each(seal, monkeypatch):
    monkeypatch.setattr(seal_module, "OBJECTS_PER_CALL", 4)
    objects = {key(number): b"content %d" % number for number in range(11)}
    raw = stored(seal, objects)
    memories = [Memory(raw, bytes(len(data))) for data in objects.values()]
    damaged = raw.raw(key(9))
    raw.plant(key(9), b"C" + damaged[1:])
    outcomes = SealedStore(raw, seal).get(list(objects), [memory.pieces for memory in memories], SOON_NS)
    assert outcomes == [OK] * 9 + [BAD_CONTENT, OK]
    assert [memory.data for memory in memories][:9] == list(objects.values())[:9]


def test_puts_and_gets_of_several_threads_do_not_share_trailers():
    raw, wrong = AddressedStore(), []
    sealed = SealedStore(raw, checksum())

    def work(worker):
        for number in range(worker * 1_000, worker * 1_000 + 40):
            data = b"%032d" % number
            source, target = Memory(raw, data), Memory(raw, bytes(32))
            outcomes = sealed.put([key(number)], [source.pieces], SOON_NS)
            outcomes += sealed.get([key(number)], [target.pieces], SOON_NS)
            wrong.extend([number] if (outcomes, target.data) != ([OK, OK], data) else ())

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- what was not ------------------------------------------------------------------------------------------------------


@given(seals, contents, st.data())
def test_any_flipped_bit_is_refused(seal, data, draw):
    raw = stored(seal, {key(1): data})
    damaged = bytearray(raw.raw(key(1)))
    damaged[draw.draw(st.integers(0, len(damaged) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    raw.plant(key(1), damaged)
    assert load(raw, seal, key(1), len(data))[0] is BAD_CONTENT


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
def test_every_single_flipped_byte_is_refused(seal):
    data = bytes(range(40))
    raw = stored(seal, {key(1): data})
    whole = raw.raw(key(1))
    for place in range(len(whole)):
        raw.plant(key(1), whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        assert load(raw, seal, key(1), len(data))[0] is BAD_CONTENT, place
    raw.plant(key(1), whole)
    assert load(raw, seal, key(1), len(data)) == (OK, data)


@given(seals, contents, st.integers(0, 400))
def test_another_length_is_refused(seal, data, length):
    raw = stored(seal, {key(1): data})
    whole = raw.raw(key(1))
    raw.plant(key(1), (whole * 3)[:length])
    assert load(raw, seal, key(1), len(data))[0] is (OK if length == len(whole) else BAD_LENGTH)


@given(seals, contents, st.integers(1, 3))
def test_an_object_planted_under_another_key_is_refused(seal, data, part):
    names = [key(1), key(2), key(1)._replace(group=1), key(1)._replace(rank=1)]
    raw = stored(seal, dict.fromkeys(names, data))
    whole = [raw.raw(name) for name in names]
    assert len(set(whole)) == 4
    raw.plant(names[0], whole[part])
    assert load(raw, seal, names[0], len(data))[0] is BAD_CONTENT
    assert load(raw, seal, names[part], len(data)) == (OK, data)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(keyed(SECRET), keyed(OTHER_SECRET)), (keyed(SECRET), checksum()), (checksum(), keyed(SECRET))],
    ids=["secret", "checksum reads keyed", "keyed reads checksum"],
)
def test_what_another_seal_made_is_refused(writer, reader):
    raw = stored(writer, {key(1): b"content"})
    assert load(raw, reader, key(1), 7)[0] is BAD_CONTENT
    assert load(raw, writer, key(1), 7) == (OK, b"content")


@given(seals, contents)
def test_an_object_without_trailer_is_refused_also_when_it_is_as_long(seal, data):
    raw = AddressedStore()
    for size_bytes, refused in ((len(data), BAD_LENGTH), (len(data) + TRAILER_BYTES, BAD_CONTENT)):
        raw.memory.put([key(size_bytes)], [bytearray(size_bytes)], SOON_NS)
        assert load(raw, seal, key(size_bytes), len(data))[0] is refused


def forged(name, data, seal):
    """An object by somebody who has read this file and the project's, but knows no secret."""
    memory = Memory(AddressedStore(), data)
    return data + seal.trailer(name.encode(), memory.pieces)


def test_a_checksum_keeps_out_damage_and_a_secret_keeps_out_people():
    name = "n-g0-r0-00000001"
    for seal, forger, refused in (
        (checksum(), checksum(), OK),
        (keyed(SECRET), checksum(), BAD_CONTENT),
        (keyed(SECRET), keyed(b""), BAD_CONTENT),
        (keyed(SECRET), keyed(OTHER_SECRET), BAD_CONTENT),
    ):
        raw = stored(seal, {key(1): b"content"})
        raw.plant(key(1), forged(name, b"planted", forger))
        assert load(raw, seal, key(1), 7) == (refused, b"planted")


# -- controls ----------------------------------------------------------------------------------------------------------


def without_verification(raw, name, size_bytes):
    """A get of the same objects whose trailers are not looked at."""

    class Trusting(SealedStore):
        def _fits(self, trailer, key, pieces):
            return True

    return load_with(Trusting(raw, checksum()), raw, name, size_bytes)


def load_with(store, raw, name, size_bytes):
    memory = Memory(raw, bytes(size_bytes))
    (outcome,) = store.get([name], [memory.pieces], SOON_NS)
    return outcome, memory.data


def test_control_without_verification_damage_is_loaded():
    raw = stored(checksum(), {key(1): b"content", key(2): b"another"})
    raw.plant(key(1), b"C" + raw.raw(key(1))[1:])
    assert without_verification(raw, key(1), 7) == (OK, b"Content")
    raw.plant(key(1), raw.raw(key(2)))
    assert without_verification(raw, key(1), 7) == (OK, b"another")
    plain = AddressedStore()
    plain.memory.put([key(1)], [bytearray(b"planted")], SOON_NS)
    assert load(plain, None, key(1), 7) == (OK, b"planted")


def test_control_a_seal_over_bytes_alone_lets_an_object_be_swapped():
    class Nameless(Seal):
        def trailer(self, name, pieces):
            return super().trailer(b"", pieces)

    start = checksum()
    seal = Nameless(start.identity, start.tag, start.start)
    raw = stored(seal, {key(1): b"content", key(2): b"another"})
    raw.plant(key(1), raw.raw(key(2)))
    assert load(raw, seal, key(1), 7) == (OK, b"another")


# -- failures of the world ---------------------------------------------------------------------------------------------


class Answering(AddressedStore):
    """Answers each put and get with the next of the outcomes it is told."""

    def __init__(self, *answers):
        super().__init__()
        self.answers, self.calls = list(answers), []

    def put(self, keys, buffers, deadline_ns):
        self.calls.append(len(keys))
        return self.answers.pop(0)

    get = put


@pytest.mark.parametrize("operation", ["put", "get"])
@pytest.mark.parametrize("lost", [TIMEOUT, UNAVAILABLE])
def test_after_a_call_that_lost_the_pool_none_begins(operation, lost, monkeypatch):
    monkeypatch.setattr(seal_module, "OBJECTS_PER_CALL", 2)
    raw = Answering([MISSING, MISSING], [MISSING, lost])
    buffers = [Memory(raw, b"content").pieces for _ in range(7)]
    outcomes = getattr(SealedStore(raw, checksum()), operation)([key(n) for n in range(7)], buffers, SOON_NS)
    assert (outcomes, raw.calls) == ([MISSING] * 3 + [lost] * 4, [2, 2])


def test_what_the_store_did_not_deliver_is_not_called_damaged():
    answers = [MISSING, StoreOutcome.NO_SPACE, BAD_LENGTH, TIMEOUT, UNAVAILABLE]
    raw = Answering(list(answers))
    buffers = [Memory(raw, b"content").pieces for _ in answers]
    assert SealedStore(raw, checksum()).get([key(n) for n in range(5)], buffers, SOON_NS) == answers


def test_a_buffer_too_few_is_a_caller_s_mistake():
    raw = AddressedStore()
    for call in (SealedStore(raw, checksum()).get, SealedStore(raw, checksum()).put):
        with pytest.raises(InvalidArgument, match="one per key, 2"):
            call([key(1), key(2)], [Memory(raw, b"content").pieces], SOON_NS)


# -- settings ----------------------------------------------------------------------------------------------------------


def config(integrity, secret=b""):
    return ConnectorConfig(PoolConfig("h:1"), integrity=integrity, integrity_secret=secret)


def test_an_identity_tells_seals_apart_and_no_secret():
    wanted = [config(Integrity.CHECKSUM), config(Integrity.KEYED, SECRET), config(Integrity.KEYED, OTHER_SECRET)]
    identities = [seal_of(each).identity for each in wanted]
    assert len(set(identities)) == 3
    assert seal_of(wanted[1]).identity == keyed(SECRET).identity
    assert not any(SECRET.decode() in text or SECRET.hex() in text for text in [*identities, repr(wanted[1])])
    assert seal_of(config(Integrity.NONE)) is None


def test_without_xxhash_a_checksum_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(InvalidArgument, match=r"integrity.*checksum.*kvtwin\[xxhash\]"):
        checksum()


FULL = FullAttention(32)
UNFINAL = {
    "inside": (ModelSpec((FULL, Recurrent(32)), hash_unit=16, hit_unit=16), "may end inside"),
    "draft": (ModelSpec((FULL,), frozenset({0})), "draft head"),
}


@pytest.mark.parametrize(("model", "why"), UNFINAL.values(), ids=UNFINAL)
def test_models_that_write_a_block_while_it_is_stored_are_refused(model, why):
    for integrity in (Integrity.CHECKSUM, Integrity.KEYED):
        with pytest.raises(InvalidArgument, match=rf"integrity.*{integrity.value}.*{why}"):
            require_final_blocks(integrity, model)
        require_final_blocks(integrity, ModelSpec((FULL, Recurrent(32))))
    require_final_blocks(Integrity.NONE, model)


# -- in the connector --------------------------------------------------------------------------------------------------


def namespace_of(monkeypatch, **extra):
    from tests.kvconnector import modelless_engine as modelless

    make_config = modelless.make_config

    def with_extra(*arguments, **options):
        made = make_config(*arguments, **options)
        made.kv_transfer_config.kv_connector_extra_config.update(extra)
        return made

    with monkeypatch.context() as patch:
        modelless.without_threads(patch)
        patch.setattr(modelless, "make_config", with_extra)
        return modelless.Engine([modelless.full(4)], 16).half.namespace


@pytest.mark.engine
def test_objects_with_other_trailers_are_in_other_namespaces(monkeypatch):
    for variable, secret in (("FIRST", SECRET), ("SECOND", OTHER_SECRET), ("THIRD", SECRET)):
        monkeypatch.setenv(variable, secret.decode())
    settings = [{}, {"integrity": "checksum"}] + [
        {"integrity": "keyed", "integrity_secret": f"env:{variable}"} for variable in ("FIRST", "SECOND", "THIRD")
    ]
    namespaces = [namespace_of(monkeypatch, **extra) for extra in settings]
    assert len(set(namespaces)) == 4
    assert namespaces[2] == namespaces[4]
    assert namespace_of(monkeypatch, integrity="none") == namespaces[0]


@pytest.mark.engine
def test_a_cache_on_a_device_is_refused(monkeypatch):
    import torch
    from kvconnector.worker import WorkerHalf

    from tests.kvconnector.test_transfer import MonotonicClock

    caches = SimpleNamespace(num_blocks=6, kv_cache_groups=[SimpleNamespace(layer_names=["a"])])
    for integrity in Integrity:
        worker = WorkerHalf(config(integrity), AddressedStore(), MonotonicClock(), 0, ModelSpec((FULL,)))
        cache = {"a": torch.empty((6, 4), device="meta")}
        monkeypatch.setattr("kvconnector.worker._storage", lambda tensor: (1 << 20, 96))
        try:
            if integrity is Integrity.NONE:
                worker.register_kv_caches(cache, caches)
                continue
            with pytest.raises(InvalidArgument, match=rf"integrity.*{integrity.value}.*KV cache on meta"):
                worker.register_kv_caches(cache, caches)
        finally:
            worker.close()
