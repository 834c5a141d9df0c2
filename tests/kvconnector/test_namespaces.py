"""A namespace is listed with what it holds and removed without touching another one, in a real pool."""

import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvconnector import namespaces
from kvconnector.config import KeyNames
from kvconnector.keys import InTreeFormat, OwnFormat
from kvconnector.keys import Place as Ranks

from connector.testbed.pool import Pool
from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.types import GroupId
from tests.support import PROJECT

OURS, LONGER, NEW = Namespace("0a1b"), Namespace("0a1b2c"), Namespace("ffff")
PREFIX, MODEL = Namespace("fleet"), "model"
FOREIGN = ["filler 17", "0a1b", "0a1b-g0-r0-", "0a1b-g0-r0-zz", "0a1b-g00-r0-aa", "x0a1b-g0-r0-aa-g0-r0-bb"]

HASHES = st.binary(min_size=1, max_size=32).map(BlockHash)
NUMBERS = st.integers(0, 20)


def own(namespace, group, rank, block_hash):
    return OwnFormat(namespace).text(BlockKey(namespace, GroupId(group), rank, block_hash))


def in_tree(prefix, model, rank, block_hash):
    names = InTreeFormat(prefix, model, ((Ranks(rank, 0, 0, 0),),))
    return names.text(BlockKey(prefix, GroupId(0), 0, block_hash))


# -- names ------------------------------------------------------------------------------------------------------------


@given(st.from_regex(r"[0-9A-Za-z]{1,20}", fullmatch=True), NUMBERS, NUMBERS, HASHES)
def test_our_names_belong_to_their_namespace(namespace, group, rank, block_hash):
    place = namespaces.place_of(own(Namespace(namespace), group, rank, block_hash))
    assert place[:2] == (namespace, KeyNames.KVTWIN)


@given(st.text(max_size=20), st.text(min_size=1, max_size=20), NUMBERS, HASHES)
@example("", "tp_rank:0", 0, BlockHash(b"a"))
@example("a@m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@aa", "m", 0, BlockHash(b"a"))
@example("a\nb", "m", 0, BlockHash(b"a"))
def test_names_of_vllm_s_format_belong_to_prefix_and_model(prefix, model, rank, block_hash):
    place = namespaces.place_of(in_tree(Namespace(prefix), model, rank, block_hash))
    assert place[:2] == (f"{prefix}@{model}" if prefix else model, KeyNames.VLLM)


@pytest.mark.parametrize("name", FOREIGN)
def test_other_names_belong_to_nobody(name):
    assert namespaces.place_of(name) is None


def test_the_table_has_a_row_for_each_namespace_and_one_for_the_others():
    names = [own(OURS, 0, 0, b"a"), own(OURS, 0, 0, b"b"), own(OURS, 1, 0, b"a"), in_tree(PREFIX, MODEL, 0, b"a")]
    sizes = {names[0]: 1_000, names[2]: 7}
    table = namespaces.rows(namespaces.content_of([*names, *FOREIGN]), sizes.get)
    assert table == [
        (OURS, "kvtwin", "3", "2,007"),
        ("fleet@model", "vllm", "1", "?"),
        ("(others)", "", str(len(FOREIGN)), ""),
    ]


# -- a pool in memory, that leases -------------------------------------------------------------------------------------


class Leasing:
    """Mooncake's client, to a pool in which objects are leased for so many calls."""

    def __init__(self, leased):
        self.calls_to_come, self.removed, self.forced = dict(leased), [], False

    def batch_remove(self, names, force):
        self.forced |= force
        return [self._remove(name) for name in names]

    def _remove(self, name):
        if self.calls_to_come.get(name, 0) > 0:
            self.calls_to_come[name] -= 1
            return namespaces._LEASED
        self.removed.append(name)
        return 0


def test_what_is_leased_is_removed_later_and_never_by_force(monkeypatch):
    monkeypatch.setattr(namespaces, "RETRY_S", 0.001)
    monkeypatch.setattr(namespaces, "KEYS_PER_CALL", 3)
    client = Leasing({"b": 2, "g": 1})
    assert namespaces.remove(client, list("abcdefgh"), patience_s=5) == []
    assert Counter(client.removed) == Counter("abcdefgh")
    assert not client.forced


def test_what_stays_leased_is_named(monkeypatch):
    monkeypatch.setattr(namespaces, "RETRY_S", 0.001)
    client = Leasing({"b": 10**9})
    assert namespaces.remove(client, list("abc"), patience_s=0.01) == ["b"]


# -- a real pool -------------------------------------------------------------------------------------------------------


@dataclass
class Stored:
    """A real pool and a client of it."""

    pool: Pool
    client: Any

    def names(self):
        return set(self.pool.master.http("get_all_keys").splitlines())

    def of(self, namespace):
        """Names of the objects in it."""
        return {name for name in self.names() if (place := namespaces.place_of(name)) and place[0] == namespace}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Leases end soon, so that no test waits for long."""
    pool = Pool(tmp_path_factory.mktemp("pool"), segment_bytes=64 << 20, flags=("--default_kv_lease_ttl=500",))
    with pool.client() as client:
        yield Stored(pool, client)
    pool.kill()


@pytest.fixture
def full(stored):
    """With objects of three of our namespaces, one of vLLM's format, and foreign ones."""
    for namespace in (OURS, LONGER, NEW):
        for group, size_bytes in ((0, 1_000), (1, 100)):
            for number in range(3):
                stored.client.put(own(namespace, group, 0, bytes([number])), bytes(size_bytes))
    for name in [in_tree(PREFIX, MODEL, 0, b"a"), *FOREIGN]:
        stored.client.put(name, bytes(1_000))
    assert len(stored.names()) == 3 * 6 + 1 + len(FOREIGN)
    return stored


def command(stored, *arguments, typed=""):
    """Where the master is, is read as an engine reads it."""
    paths = f"{PROJECT}:{PROJECT / 'connector'}"
    return subprocess.run(
        [sys.executable, "-m", "kvconnector.namespaces", *admin(stored), *arguments],
        env=stored.pool.environment() | {"PYTHONPATH": paths, "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
    )


def admin(stored):
    return ["--admin", f"127.0.0.1:{stored.pool.master.metrics_port}"]


@pytest.mark.store
def test_the_list_has_objects_and_bytes(full):
    listed = command(full, "list")
    assert listed.returncode == namespaces.DONE, listed.stderr
    table = [line.split() for line in listed.stdout.splitlines()]
    assert sorted(table[1:4]) == [[name, "kvtwin", "6", "3,300"] for name in (OURS, LONGER, NEW)]
    assert table[4:] == [["fleet@model", "vllm", "1", "1,000"], ["(others)", str(len(FOREIGN))]]


@pytest.mark.store
@pytest.mark.parametrize("namespace", [OURS, "fleet@model"])
def test_one_namespace_is_removed_and_nobody_else_s(full, namespace):
    """Also right after a list, which leases some of the objects."""
    before, gone = full.names(), full.of(namespace)
    assert command(full, "list").returncode == namespaces.DONE
    removed = command(full, "remove", namespace, "--yes")
    assert removed.returncode == namespaces.DONE, removed.stderr
    assert removed.stdout.splitlines()[-1] == f"{len(gone)} objects removed"
    assert before - full.names() == gone


@pytest.mark.store
def test_control_a_removal_by_prefix_takes_another_one_s(full):
    before, gone = full.names(), full.of(OURS)
    assert namespaces.remove(full.client, [name for name in before if name.startswith(OURS)], patience_s=5) == []
    assert before - full.names() > gone


@pytest.mark.store
@pytest.mark.parametrize(
    ("namespace", "typed"), [(OURS, ""), (OURS, "y\n"), (OURS, f"{LONGER}\n"), ("0a", "0a\n"), ("fleet", "fleet\n")]
)
def test_nothing_is_removed_unless_it_is_named_twice(full, namespace, typed):
    before = full.names()
    assert command(full, "remove", namespace, typed=typed).returncode == namespaces.REFUSED
    assert full.names() == before


@pytest.mark.store
def test_named_twice_it_is_removed(full):
    assert command(full, "remove", OURS, typed=f"{OURS}\n").returncode == namespaces.DONE
    assert full.of(OURS) == set()


@pytest.mark.store
def test_what_is_in_use_is_left_and_said_to_be(full, monkeypatch, capsys):
    """Somebody asks for it all the time, so that the master leases it all the time."""
    for name, value in full.pool.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(namespaces, "LEASE_PATIENCE_S", 0.1)
    used, enough = own(OURS, 0, 0, b"\0"), threading.Event()

    def use():
        while not enough.wait(0.05):
            full.client.batch_is_exist([used])

    user = threading.Thread(target=use)
    full.client.batch_is_exist([used])
    user.start()
    try:
        assert namespaces.main([*admin(full), "remove", OURS, "--yes"]) == namespaces.IN_USE
    finally:
        enough.set()
        user.join()
    said = capsys.readouterr()
    assert (said.out.splitlines()[-1], f"somebody uses {OURS}" in said.err) == ("5 objects removed", True)
    assert full.of(OURS) == {used}


def test_without_a_master_nothing_is_done(monkeypatch, capsys):
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    assert namespaces.main(["--admin", "127.0.0.1:1", "list"]) == namespaces.REFUSED
    assert "refused" in capsys.readouterr().err
