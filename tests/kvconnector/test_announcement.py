"""One line at the start says what is shared with whom, and differs where anything of it does."""

import logging

import pytest
from kvconnector.config import read_config

from kvcore.keys import Namespace
from kvcore.ranks import RankLayout, Sharding
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow

pytestmark = pytest.mark.engine

FULL, WINDOW = FullAttention(32), SlidingWindow(16, 64)
POOL = {"master_server_address": "store:50051"}


GROUPS = (FULL, WINDOW, FULL)


def line(role="kv_both", namespace="abc", unit=16, ranks=2, groups=GROUPS, hashes="sha256", cuts=(), **extra):
    from kvconnector.announcement import announcement
    from kvconnector.keys import KeySpace

    keys = KeySpace(Namespace(namespace), unit, ranks, cuts)
    return announcement(read_config({**POOL, **extra}, role, {}), keys, ModelSpec(groups), hashes)


def test_the_line_says_it_all():
    assert line(protocol="rdma", device_name="mlx5_0") == (
        "kvtwin: kv_both: loads from and stores to the pool of store:50051 over rdma on mlx5_0, tenant default; "
        "shared with every engine in namespace abc of key format kvtwin, integrity none: "
        "2 x FullAttention in blocks of 32 tokens, 1 x SlidingWindow in blocks of 16 tokens, "
        "hashed every 16 tokens by sha256, 2 shard(s) of each block on 2 rank(s)"
    )


def test_it_says_what_ranks_share():
    two = RankLayout(tp=2)
    assert line(cuts=(Sharding(two, 1),) * 3).endswith(" 1 shard(s) of each block on 2 rank(s)")
    assert line(cuts=(Sharding(two, 1), Sharding(two, 2), Sharding(two, 1))).endswith(
        " 1 + 2 + 1 shard(s) of each block on 2 rank(s)"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"role": "kv_producer"}, {"role": "kv_consumer"}, {"namespace": "abd"}, {"unit": 32}, {"ranks": 1},
        {"groups": (FULL,)}, {"hashes": "xxhash"}, {"master_server_address": "other:50051"}, {"protocol": "rdma"},
        {"tenant_id": "other"}, {"key_format": "vllm"}, {"integrity": "checksum"}, {"loads": False}, {"stores": False},
    ],
    ids=str,
)  # fmt: skip
def test_another_line_where_anything_differs(other):
    assert line(**other) != line()


def test_an_engine_that_does_neither_lends_memory():
    assert "only lends memory to the pool" in line("kv_consumer", loads=False)


@pytest.mark.parametrize(
    ("algorithm", "seed", "said"),
    [
        ("sha256", None, "sha256 with vLLM's own seed"),
        ("xxhash", None, "a seed that no other engine has"),
        ("xxhash", "7", "xxhash with PYTHONHASHSEED (digest 7902699b)"),
    ],
)
def test_the_seed_of_the_hashes_is_named_and_not_told(monkeypatch, algorithm, seed, said):
    from kvconnector.vllm_compat import describe_hashes, has_private_hashes

    from tests.kvconnector.test_vllm_compat import engine_config

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = engine_config(prefix_caching_hash_algo=algorithm)
    assert said in describe_hashes(config)
    assert has_private_hashes(config) == ("no other engine" in said)


def test_an_engine_says_it_once(monkeypatch, caplog):
    from tests.kvconnector import modelless_engine

    said = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("vllm.kvconnector")
    monkeypatch.setattr(logger, "handlers", [handler])
    modelless_engine.without_threads(monkeypatch)
    with caplog.at_level(logging.INFO, "vllm.kvconnector"):
        engine = modelless_engine.Engine([modelless_engine.full(4)], 16)
    (only,) = said
    assert f"namespace {engine.half.namespace} " in only
    assert "1 x FullAttention in blocks of 4 tokens" in only
    assert "the pool of nowhere:1 over tcp" in only
