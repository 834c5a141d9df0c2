"""Every code and misbehaviour of Mooncake's client becomes an outcome; connecting is tried again, not insisted on."""

import gc
import os
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from kvconnector.lane import Lane
from kvconnector.link import RETRY_NS
from kvconnector.pool_config import PoolConfig
from kvconnector.replication import Replication
from kvconnector.store import ABANDONED_NS, PIECES_PER_CALL, SILENCE_NS, TCP_PIECES_PER_CALL, MooncakeStore

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.ports import StoreOutcome
from tests.kvconnector.test_transfer import HandClock

OK, MISSING, NO_SPACE, BAD_LENGTH, _, TIMEOUT, UNAVAILABLE = StoreOutcome
SOON_NS = 1 << 60
KEY = BlockKey(Namespace("n"), 0, 0, BlockHash(b"\x01"))


class Client:
    """Answers with what it is told to, and notes how it was called."""

    def __init__(self):
        self.codes = []
        self.sizes = {}
        self.setup_code = 0
        self.calls = []

    def setup(self, *arguments, **options):
        self.calls.append(("setup", arguments, options))
        return self.setup_code

    def register_buffer(self, address, size_bytes):
        self.calls.append(("register", address, size_bytes))
        return 0

    def unregister_buffer(self, address):
        self.calls.append(("unregister", address))
        return 0

    def _answer(self, *call):
        self.calls.append(call)
        if isinstance(self.codes, Exception):
            raise self.codes
        return self.codes

    def batch_is_exist(self, names):
        return self._answer("exists", names)

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        return self._answer("get", names, addresses, sizes)

    def batch_put_from_multi_buffers(self, names, addresses, sizes):
        return self._answer("put", names, addresses, sizes)

    def batch_remove(self, names, force):
        return self._answer("remove", names, force)

    def get_size(self, name):
        self.calls.append(("size", name))
        return self.sizes.get(name, -704)

    def close(self):
        self.calls.append(("close",))


def library(new_client):
    """In place of `mooncake.store`."""
    return SimpleNamespace(MooncakeDistributedStore=new_client)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What is set here for Mooncake is not meant for the tests after these."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def master():
    """A port that closes every connection, as a master does that is sent nonsense."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def store(master, client, clock):
    return MooncakeStore(PoolConfig(master), clock, library(lambda: client))


@pytest.mark.parametrize(
    ("code", "exists", "get", "put", "remove"),
    [
        (0, MISSING, BAD_LENGTH, OK, OK),
        (1, OK, BAD_LENGTH, UNAVAILABLE, UNAVAILABLE),
        (8, UNAVAILABLE, OK, UNAVAILABLE, UNAVAILABLE),
        (-1, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE),
        (-200, NO_SPACE, NO_SPACE, NO_SPACE, NO_SPACE),
        (-600, BAD_LENGTH, BAD_LENGTH, BAD_LENGTH, BAD_LENGTH),
        (-703, MISSING, MISSING, MISSING, MISSING),
        (-704, MISSING, MISSING, MISSING, MISSING),
        (-707, MISSING, MISSING, MISSING, MISSING),
        (-800, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE),
        (-900, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE),
        (-901, TIMEOUT, TIMEOUT, TIMEOUT, TIMEOUT),
        (-1700, NO_SPACE, NO_SPACE, NO_SPACE, NO_SPACE),
        (-1701, NO_SPACE, NO_SPACE, NO_SPACE, NO_SPACE),
    ],
)
def test_codes(store, client, code, exists, get, put, remove):
    client.codes = [code]
    pieces = [(64, 5), (128, 3)]
    assert store.exists([KEY], SOON_NS) == [exists]
    assert store.get([KEY], [pieces], SOON_NS) == [get]
    assert store.put([KEY], [pieces], SOON_NS) == [put]
    assert store.remove([KEY], SOON_NS) == [remove]
    assert [call for call in client.calls if call[0] not in ("setup", "size")] == [
        ("exists", ["n-g0-r0-01"]),
        ("get", ["n-g0-r0-01"], [[64, 128]], [[5, 3]]),
        ("put", ["n-g0-r0-01"], [[64, 128]], [[5, 3]]),
        ("remove", ["n-g0-r0-01"], True),
    ]
    assert store.counts["get", get] == 1


def test_a_transfer_that_fails_for_its_length_is_told_from_a_holder_that_is_gone(store, client):
    client.codes = [-800]
    client.sizes = {"n-g0-r0-01": 8}
    assert store.get([KEY], [[(0, 9)]], SOON_NS) == [BAD_LENGTH]
    assert store.get([KEY], [[(0, 8)]], SOON_NS) == [UNAVAILABLE]


@pytest.mark.parametrize("codes", [RuntimeError("gone"), [], [1, 1]])
def test_an_exception_or_an_answer_of_the_wrong_length_is_unavailable(store, client, codes):
    client.codes = codes
    for call in (store.exists, store.remove):
        assert call([KEY], SOON_NS) == [UNAVAILABLE]
    for call in (store.get, store.put):
        assert call([KEY], [[(0, 1)]], SOON_NS) == [UNAVAILABLE]


def test_a_caller_s_mistake_raises(store):
    with pytest.raises(InvalidArgument, match="one per key, 1"):
        store.get([KEY], [], SOON_NS)
    with pytest.raises(InvalidArgument, match="block_hash"):
        store.exists([KEY._replace(block_hash=b"")], SOON_NS)


def test_memory_is_registered_whenever_the_pool_is_joined(store, client):
    store.register(64, 10)
    assert client.calls == []
    assert store.join(SOON_NS)
    store.register(128, 20)
    assert [call for call in client.calls if call[0] == "register"] == [("register", 64, 10), ("register", 128, 20)]


def test_an_unreachable_master_is_left_alone_for_a_while(master, client):
    clock = HandClock()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store = MooncakeStore(PoolConfig(f"127.0.0.1:{port}"), clock, library(lambda: client))
    client.codes = [1]
    assert store.exists([KEY], SOON_NS) == [UNAVAILABLE]
    with socket.create_server(("127.0.0.1", port)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        assert store.exists([KEY], SOON_NS) == [UNAVAILABLE]
        clock.time_ns += RETRY_NS
        assert store.exists([KEY], SOON_NS) == [OK]
    assert [call[0] for call in client.calls] == ["setup", "exists"]


def test_after_a_lost_call_the_master_is_probed_before_the_next(store, client):
    client.codes = [1]
    assert store.exists([KEY], SOON_NS) == [OK]
    client.codes = [-900]
    assert store.exists([KEY], SOON_NS) == [UNAVAILABLE]
    client.codes = [1]
    assert store.exists([KEY], SOON_NS) == [OK]
    assert [call[0] for call in client.calls] == ["setup", "exists", "exists", "exists"]


def test_a_setup_that_fails_is_tried_again_later(master, client):
    clock = HandClock()
    store = MooncakeStore(PoolConfig(master), clock, library(lambda: client))
    client.setup_code, client.codes = -1, [1]
    assert not store.join(SOON_NS)
    client.setup_code = 0
    assert store.exists([KEY], SOON_NS) == [UNAVAILABLE]
    clock.time_ns += RETRY_NS
    assert store.exists([KEY], SOON_NS) == [OK]


def test_after_close_nothing_is_called(store, client):
    client.codes = [1]
    assert store.exists([KEY], SOON_NS) == [OK]
    store.close()
    assert store.exists([KEY], SOON_NS) == [UNAVAILABLE]
    assert client.calls[-1] == ("close",)


# -- transfers are cut into calls -------------------------------------------------------------------------------------


def many(number, pieces_each):
    """Keys, and for each as many pieces of one byte."""
    keys = [KEY._replace(block_hash=BlockHash(bytes([index]))) for index in range(number)]
    return keys, [[(64 * index + piece, 1) for piece in range(pieces_each)] for index in range(number)]


def answer_by_call(client, *answers):
    """The i-th get or put answers `answers[i]`: codes, or a function that makes them."""
    waiting = list(answers)

    def answer(*call):
        client.calls.append(call)
        codes = waiting.pop(0)
        return codes() if callable(codes) else codes

    client._answer = answer


def transfers(client):
    return [len(call[1]) for call in client.calls if call[0] in ("get", "put")]


@pytest.mark.parametrize(
    ("protocol", "pieces_each", "calls"),
    [
        ("tcp", TCP_PIECES_PER_CALL // 2, [2, 2, 1]),
        ("tcp", TCP_PIECES_PER_CALL // 2 + 1, [1] * 5),
        ("tcp", TCP_PIECES_PER_CALL * 2, [1] * 5),
        ("tcp", 1, [5]),
        ("rdma", PIECES_PER_CALL // 4, [4, 1]),
    ],
)
def test_a_call_has_a_bounded_number_of_pieces(master, client, clock, protocol, pieces_each, calls):
    store = MooncakeStore(PoolConfig(master, protocol=protocol), clock, library(lambda: client))
    answer_by_call(client, *[[0] * size for size in calls])
    assert store.put(*many(5, pieces_each), SOON_NS) == [OK] * 5
    assert transfers(client) == calls
    moved = [address for call in client.calls if call[0] == "put" for group in call[2] for address in group]
    assert moved == [address for pieces in many(5, pieces_each)[1] for address, _ in pieces]


@pytest.mark.parametrize(
    ("transfer_bytes", "calls"),
    [(1 << 20, [5]), (2 * (96 << 10) + 4 * 4_096, [2, 2, 1]), (2 * (96 << 10), [1] * 5), (1, [1] * 5)],
)
def test_a_call_moves_no_more_than_fits_where_ssd_is_read_into(master, client, clock, transfer_bytes, calls):
    """Each of three times 32 KiB, read into whole pages and two more; what does not fit at all is tried alone."""
    store = MooncakeStore(PoolConfig(master, transfer_bytes=transfer_bytes), clock, library(lambda: client))
    answer_by_call(client, *[[96 << 10] * size for size in calls], *[[0] * size for size in calls])
    keys, _ = many(5, 1)
    buffers = [[(1 + number, 32 << 10), (9, 32 << 10), (17, 32 << 10)] for number in range(5)]
    assert store.get(keys, buffers, SOON_NS) == [OK] * 5
    assert store.put(keys, buffers, SOON_NS) == [OK] * 5
    assert transfers(client) == calls * 2


def test_outcomes_of_several_calls_keep_the_order_of_the_keys(master, client, clock):
    store = MooncakeStore(PoolConfig(master, transfer_bytes=1), clock, library(lambda: client))
    answer_by_call(client, [1], [-704], [0], [-800], [1], [])
    keys, buffers = many(6, 1)
    assert store.get(keys, buffers, SOON_NS) == [OK, MISSING, BAD_LENGTH, UNAVAILABLE, OK, UNAVAILABLE]
    assert [call[1] for call in client.calls if call[0] == "get"] == [[f"n-g0-r0-{number:02x}"] for number in range(6)]


def test_what_a_call_loses_at_once_is_all_that_is_lost(store, client):
    answer_by_call(client, [0, -200], [-800, -800], [], [0])
    outcomes = store.put(*many(7, TCP_PIECES_PER_CALL // 2), SOON_NS)
    assert outcomes == [OK, NO_SPACE, *[UNAVAILABLE] * 4, OK]
    assert transfers(client) == [2, 2, 2, 1]


def test_after_a_call_that_waited_in_vain_the_rest_is_not_begun(store, client, clock):
    def silent():
        clock.time_ns += SILENCE_NS
        return [0, -800]

    answer_by_call(client, [0, -200], silent, [0])
    outcomes = store.put(*many(5, TCP_PIECES_PER_CALL // 2), SOON_NS)
    assert (outcomes, transfers(client)) == ([OK, NO_SPACE, OK, UNAVAILABLE, UNAVAILABLE], [2, 2])


def test_a_master_that_dies_meanwhile_is_not_waited_for_again(store, client, monkeypatch):
    answer_by_call(client, [0], [-900], [0])
    monkeypatch.setattr("kvconnector.link._answers", lambda address: not transfers(client))
    outcomes = store.put(*many(5, TCP_PIECES_PER_CALL), SOON_NS)
    assert (outcomes, transfers(client)) == ([OK, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE], [1, 1])


def test_no_call_begins_at_the_deadline(store, client, clock):
    def slow():
        clock.time_ns += 10
        return [TCP_PIECES_PER_CALL]

    answer_by_call(client, slow, slow, slow)
    outcomes = store.get(*many(3, TCP_PIECES_PER_CALL), clock.time_ns + 20)
    assert outcomes == [OK, OK, TIMEOUT]


def test_the_master_is_asked_for_one_length_when_a_holder_is_gone(store, client):
    client.codes = [-800] * 4
    client.sizes = {"n-g0-r0-00": 2}
    assert store.get(*many(4, 1), SOON_NS) == [BAD_LENGTH, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE]
    assert [call for call in client.calls if call[0] == "size"] == [("size", "n-g0-r0-00"), ("size", "n-g0-r0-01")]


# -- what Mooncake is told ---------------------------------------------------------------------------------------------


class Replicate:
    """Mooncake's `ReplicateConfig`."""

    replica_num, preferred_segment, preferred_segments = 1, "", ()
    soft_pin_action, soft_pin_ttl_ms, group_ids = None, None, None


class Teller(Client):
    """A client whose puts take a `ReplicateConfig`, and whose `setup` takes what the docstring says."""

    def setup(self, *arguments, **options):
        """(tenant_id, enable_ssd_offload, ssd_offload_path)"""
        return super().setup(*arguments, **options)

    def batch_put_from_multi_buffers(self, names, addresses, sizes, *told):
        return self._answer("put", names, *told)


def telling(client, **library_parts):
    class Made:
        setup = type(client).setup

        def __new__(cls):
            return client

    parts = {"ReplicateConfig": Replicate, "SoftPinAction": SimpleNamespace(ENABLE="enable"), **library_parts}
    return SimpleNamespace(MooncakeDistributedStore=Made, **parts)


def told(master, clock, replication, num_keys=2):
    client = Teller()
    client.codes = [0] * num_keys
    store = MooncakeStore(PoolConfig(master, replication=replication), clock, telling(client))
    keys = [KEY, KEY._replace(rank=1), KEY._replace(block_hash=BlockHash(b"\x02"))][:num_keys]
    assert store.put(keys, [[(0, 1)]] * num_keys, SOON_NS) == [OK] * num_keys
    (put,) = (call for call in client.calls if call[0] == "put")
    return put[2:]


def test_nothing_is_told_unless_it_is_set(master, clock):
    assert told(master, clock, Replication()) == ()


def test_copies_places_and_pins_are_told_with_each_put(master, clock):
    (config,) = told(master, clock, Replication(2, ("a:1",), soft_pin=True, soft_pin_ttl_ms=9))
    assert vars(config) == {
        "replica_num": 2,
        "preferred_segment": "a:1",
        "soft_pin_action": "enable",
        "soft_pin_ttl_ms": 9,
    }
    (config,) = told(master, clock, Replication(preferred_segments=("a:1", "b:2")))
    assert vars(config) == {"replica_num": 1, "preferred_segments": ["a:1", "b:2"]}


def test_each_call_names_the_groups_of_its_own_keys(master, clock):
    (config,) = told(master, clock, Replication(grouped=True), num_keys=3)
    assert config.group_ids == ["kvtwin:n-01", "kvtwin:n-01", "kvtwin:n-02"]
    client = Teller()
    answer_by_call(client, [0], [0])
    settings = PoolConfig(master, replication=Replication(grouped=True), transfer_bytes=1)
    store = MooncakeStore(settings, clock, telling(client))
    assert store.put(*many(2, 1), SOON_NS) == [OK, OK]
    assert [call[2].group_ids for call in client.calls if call[0] == "put"] == [["kvtwin:n-00"], ["kvtwin:n-01"]]


def test_tenant_and_ssd_are_told_when_joining(master, clock, tmp_path):
    client = Teller()
    folder = tmp_path / "engine0-rank1"
    store = MooncakeStore(PoolConfig(master, tenant_id="t", ssd_path=str(folder)), clock, telling(client))
    assert store.join(SOON_NS)
    ((_, _, options),) = (call for call in client.calls if call[0] == "setup")
    assert options == {"tenant_id": "t", "enable_ssd_offload": True, "ssd_offload_path": str(folder)}
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replication": Replication(2)}, "replica_num.*ReplicateConfig has replica_num"),
        ({"replication": Replication(preferred_segments=("a:1",))}, "preferred_segment.*has preferred_segment,"),
        ({"replication": Replication(preferred_segments=("a:1", "b:2"))}, "preferred_segment.*has preferred_segments,"),
        ({"replication": Replication(soft_pin=True)}, "soft_pin.*has soft_pin_action"),
        ({"replication": Replication(grouped=True)}, "enable_group_semantics.*has group_ids"),
        ({"tenant_id": "t"}, "tenant_id.*setup takes tenant_id"),
        ({"ssd_path": "/nowhere/rank0"}, "enable_ssd_offload.*setup takes enable_ssd_offload"),
    ],
)
def test_what_the_installed_mooncake_does_not_have_is_refused_at_the_start(master, clock, settings, message):
    class Old(Client):
        def setup(self, *arguments):
            """(local_hostname, metadata_server)"""

    with pytest.raises(InvalidArgument, match=message):
        MooncakeStore(PoolConfig(master, **settings), clock, telling(Old(), ReplicateConfig=SimpleNamespace))


def test_a_disk_that_is_not_there_is_refused_at_the_start(master, clock, tmp_path):
    settings = PoolConfig(master, ssd_path=str(tmp_path / "not mounted" / "rank0"))
    with pytest.raises(InvalidArgument, match=r"ssd_offload_path.*not mounted'.*a folder that is there"):
        MooncakeStore(settings, clock, telling(Teller()))


# -- what Mooncake gave up --------------------------------------------------------------------------------------------


def test_memory_that_is_taken_away_is_not_registered_again(master, clock):
    clients = [Client(), Client()]
    made = iter(clients)
    store = MooncakeStore(PoolConfig(master), clock, library(lambda: next(made)))
    for address in (64, 128):
        store.register(address, 10)
    store.unregister(64)
    clients[0].codes = clients[1].codes = [1]
    assert store.exists([KEY], SOON_NS) == [OK]
    store.unregister(128)
    store.register(64, 10)
    store._link.leave()
    assert store.exists([KEY], SOON_NS) == [OK]
    assert [call[:2] for call in clients[0].calls if "register" in call[0]] == [
        ("register", 128), ("unregister", 128), ("register", 64),
    ]  # fmt: skip
    assert [call[:2] for call in clients[1].calls if "register" in call[0]] == [("register", 64)]


def test_a_client_whose_transfer_was_given_up_is_closed_before_the_caller_goes_on(master, clock):
    """Its transport may still write into the caller's memory; nothing but its end stops that."""
    clients = [Client(), Client()]
    made = iter(clients)
    store = MooncakeStore(PoolConfig(master), clock, library(lambda: next(made)))
    store.register(64, 10)

    def given_up():
        clock.time_ns += ABANDONED_NS
        return [-800]

    answer_by_call(clients[0], given_up)
    clients[1].codes = [1]
    assert store.get([KEY], [[(64, 1)]], SOON_NS) == [UNAVAILABLE]
    assert clients[0].calls[-1] == ("close",)
    assert store.get([KEY], [[(64, 1)]], SOON_NS) == [OK]
    assert [call[0] for call in clients[1].calls] == ["setup", "register", "get"]


def test_a_transfer_that_fails_in_time_has_ended_and_a_slow_one_that_succeeds_too(store, client, clock):
    def slowly(codes, duration_ns):
        def answer():
            clock.time_ns += duration_ns
            return codes

        return answer

    answer_by_call(client, slowly([-800], ABANDONED_NS - 1), slowly([1], ABANDONED_NS), [1])
    assert store.get([KEY], [[(64, 1)]], SOON_NS) == [UNAVAILABLE]
    assert store.get([KEY], [[(64, 1)]], SOON_NS) == [OK]
    assert ("close",) not in client.calls


def test_a_client_is_not_closed_under_another_call(store, client, clock):
    begun, may_end = threading.Event(), threading.Event()

    def long():
        begun.set()
        may_end.wait(10)
        return [0]

    def given_up():
        clock.time_ns += ABANDONED_NS
        return [-800]

    answer_by_call(client, long, given_up)
    putter = threading.Thread(target=lambda: store.put([KEY], [[(64, 1)]], SOON_NS))
    putter.start()
    assert begun.wait(10)
    getter = threading.Thread(target=lambda: store.get([KEY], [[(64, 1)]], SOON_NS))
    getter.start()
    time.sleep(0.05)
    assert ("close",) not in client.calls and getter.is_alive()
    assert store.exists([KEY], SOON_NS) == [UNAVAILABLE], "no call begins meanwhile"
    may_end.set()
    getter.join(10)
    putter.join(10)
    assert client.calls[-1] == ("close",)


# -- what is wrong with the client itself -----------------------------------------------------------------------------


def test_without_mooncake_the_engine_does_not_start(master, monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(InvalidArgument, match=r"kvtwin\[connector\]"):
        MooncakeStore(PoolConfig(master), HandClock())


def test_a_call_that_raises_does_not_end_the_lane():
    lane = Lane("test", HandClock())
    assert lane.call(lambda: 1 // 0, SOON_NS) is None
    assert lane.call(lambda: "alive", SOON_NS) == "alive"


def test_a_client_that_cannot_be_made_is_tried_again_later(master):
    made = iter([lambda: 1 // 0, Client])
    store = MooncakeStore(PoolConfig(master), HandClock(), library(lambda: next(made)()))
    assert not store.join(SOON_NS)
    assert store.join(SOON_NS)


def test_two_engines_that_would_share_a_folder_on_ssd_are_refused(master, clock, tmp_path):
    settings = PoolConfig(master, ssd_path=str(tmp_path / "engine0-rank0"))
    first = MooncakeStore(settings, clock, telling(Teller()))
    with pytest.raises(InvalidArgument, match=r"ssd_offload_path.*no other engine's"):
        MooncakeStore(settings, clock, telling(Teller()))
    del first
    gc.collect()
    assert MooncakeStore(settings, clock, telling(Teller()))


def test_each_client_has_its_own_timeout_unless_the_user_has_set_one(master, clock, monkeypatch):
    monkeypatch.delenv("MC_RPC_TIMEOUT_MS", raising=False)
    for timeout_ms in (1_000, 9_000):
        store = MooncakeStore(PoolConfig(master, rpc_timeout_ms=timeout_ms), clock, library(Client))
        assert store.join(SOON_NS)
        assert os.environ["MC_RPC_TIMEOUT_MS"] == str(timeout_ms)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "77")
    assert MooncakeStore(PoolConfig(master), clock, library(Client)).join(SOON_NS)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "77"
