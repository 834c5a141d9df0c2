"""The faults that other tests order do strike, where they were ordered and nowhere else."""

import threading
import time

import pytest

from tests.e2e.faulty_client import MISSING, NO_SPACE, RPC_FAILED, Faults, faulty

NAMES = ["n-g0-r0-aa", "n-g1-r0-aa", "n-g0-r0-bb"]
PIECES = [[[1], [2], [3]], [[10], [20], [30]]]


class Client:
    """As much of Mooncake's client as the faults need."""

    def __init__(self):
        self.objects = dict.fromkeys(NAMES, b"0123")
        self.asked = []

    def setup(self):
        return 0

    def batch_is_exist(self, names):
        self.asked.append(names)
        return [int(name in self.objects) for name in names]

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        self.asked.append((names, addresses, sizes))
        return [len(self.objects[name]) if name in self.objects else MISSING for name in names]

    def batch_put_from_multi_buffers(self, names, addresses, sizes):
        self.asked.append((names, addresses, sizes))
        self.objects.update(dict.fromkeys(names, b"4567"))
        return [0] * len(names)

    def batch_remove(self, names, force):
        return [0 if self.objects.pop(name, None) else MISSING for name in names]

    def get(self, name):
        return self.objects.get(name, b"")

    def put(self, name, data):
        self.objects[name] = data
        return 0


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def client(faults):
    return faulty(Client, faults)()


def get(client):
    return client.batch_get_into_multi_buffers(NAMES, *PIECES)


def test_without_faults_the_client_is_as_it_was_and_its_calls_are_counted(client, faults):
    assert client.setup() == 0
    assert client.batch_is_exist(NAMES) == [1, 1, 1]
    assert get(client) == [4, 4, 4]
    assert (faults.calls("exists"), faults.calls("get"), faults.calls("put")) == ([NAMES], [NAMES], [])
    faults.order([])
    assert faults.calls("get") == []


@pytest.mark.parametrize(
    ("where", "struck"),
    [
        ({}, [[0, 1, 2], [0, 1, 2]]),
        ({"calls": [1, 2]}, [[], [0, 1, 2]]),
        ({"keys": [1, 3]}, [[1], [0]]),
        ({"group": 0}, [[0, 2], [0, 2]]),
        ({"group": 0, "keys": [1, 2]}, [[2], [0]]),
        ({"thread": "another"}, [[], []]),
        ({"thread": threading.current_thread().name}, [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_a_fault_strikes_where_it_was_ordered(client, faults, where, struck):
    faults.order([{"on": "get", "do": "lie", "code": RPC_FAILED, **where}])
    for positions in struck:
        assert [at for at, code in enumerate(get(client)) if code == RPC_FAILED] == positions
    assert client.batch_is_exist(NAMES) == [1, 1, 1]


def test_what_fails_is_not_asked_for(client, faults):
    faults.order([{"on": "get", "do": "fail", "code": NO_SPACE, "keys": [1]}])
    assert get(client) == [4, NO_SPACE, 4]
    assert client.asked == [([NAMES[0], NAMES[2]], [[1], [3]], [[10], [30]])]
    faults.order([{"on": "get", "do": "fail", "code": NO_SPACE}, {"on": "put", "do": "raise"}])
    assert get(client) == [NO_SPACE] * 3
    with pytest.raises(RuntimeError, match="a test ordered"):
        client.batch_put_from_multi_buffers(NAMES, *PIECES)
    assert len(client.asked) == 1


def test_objects_are_removed_or_damaged_before_a_get_and_after_a_put(client, faults):
    faults.order([{"on": "get", "do": "truncate", "keys": [0]}, {"on": "get", "do": "remove", "keys": [2]}])
    assert get(client) == [2, 4, MISSING]
    faults.order([{"on": "put", "do": "corrupt", "group": 1}])
    client.batch_put_from_multi_buffers(NAMES, *PIECES)
    assert [client.objects[name] for name in NAMES] == [b"4567", b"4566", b"4567"]


@pytest.mark.parametrize("do", ["delay", "late"])
def test_a_call_or_its_answer_waits(client, faults, do):
    faults.order([{"on": "exists", "do": do, "seconds": 0.05}])
    start = time.monotonic()
    assert client.batch_is_exist(NAMES) == [1, 1, 1]
    assert time.monotonic() - start >= 0.05


def test_a_call_that_is_held_goes_on_when_other_faults_are_ordered(client, faults):
    faults.order([{"on": "get", "do": "hold"}])
    held = threading.Thread(target=get, args=(client,))
    held.start()
    while not faults.calls("get"):
        time.sleep(0.001)
    assert client.asked == []
    faults.order([])
    held.join(5)
    assert len(client.asked) == 1
