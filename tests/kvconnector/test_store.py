"""Every code and misbehaviour of Mooncake's client becomes an outcome; connecting is tried again, not insisted on."""

import socket
import threading

import pytest
from kvconnector.config import PoolConfig
from kvconnector.store import RETRY_NS, MooncakeStore

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.ports import StoreOutcome
from tests.kvconnector.test_transfer import HandClock

OK, MISSING, NO_SPACE, BAD_LENGTH, TIMEOUT, UNAVAILABLE = StoreOutcome
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
        return self.sizes.get(name, -704)

    def close(self):
        self.calls.append(("close",))


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
def store(master, client):
    return MooncakeStore(PoolConfig(master), HandClock(), lambda: client)


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
    ],
)
def test_codes(store, client, code, exists, get, put, remove):
    client.codes = [code]
    pieces = [(64, 5), (128, 3)]
    assert store.exists([KEY], SOON_NS) == [exists]
    assert store.get([KEY], [pieces], SOON_NS) == [get]
    assert store.put([KEY], [pieces], SOON_NS) == [put]
    assert store.remove([KEY], SOON_NS) == [remove]
    assert client.calls[1:] == [
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
    store = MooncakeStore(PoolConfig(f"127.0.0.1:{port}"), clock, lambda: client)
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
    store = MooncakeStore(PoolConfig(master), clock, lambda: client)
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
