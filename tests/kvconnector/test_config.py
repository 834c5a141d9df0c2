"""Settings: where each value comes from, and that nothing misspelt or malformed passes."""

import json
from dataclasses import replace

import pytest
from kvconnector.config import ConnectorConfig, Integrity, LoadFailure, read_config
from kvconnector.pool_config import MemoryPool, PoolConfig
from kvconnector.replication import Replication

from kvcore.breaker import Tolerance
from kvcore.errors import InvalidArgument
from kvcore.units import NS_PER_MS

MASTER = {"master_server_address": "10.0.0.1:50051"}


def read(extra=None, environment=None, kv_role="kv_both"):
    return read_config({**MASTER, **(extra or {})}, kv_role, environment or {})


def test_a_master_is_all_that_is_needed():
    assert read() == ConnectorConfig(PoolConfig("10.0.0.1:50051"))


def test_extra_config_beats_environment_beats_file_beats_default(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"protocol": "rdma", "device_name": "mlx5_0", "tenant_id": "t", "mode": "embedded"}))
    environment = {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_PROTOCOL": "efa", "MOONCAKE_DEVICE": "mlx5_1"}
    pool = read({"protocol": "tcp"}, environment).pool
    assert (pool.protocol, pool.device_name, pool.tenant_id) == ("tcp", "mlx5_1", "t")
    assert pool.metadata_server == "P2PHANDSHAKE"


def test_mooncake_s_file_is_enough(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({**MASTER, "global_segment_size": "4GB", "local_buffer_size": 1 << 26}))
    pool = read_config({}, "kv_both", {"MOONCAKE_CONFIG_PATH": str(path)}).pool
    assert pool == PoolConfig("10.0.0.1:50051", global_segment_bytes=4 << 30, local_buffer_bytes=1 << 26)


def test_what_mooncake_s_file_leaves_open_is_not_set(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({**MASTER, "device_name": None, "tenant_id": None, "ssd_offload_path": None}))
    assert read_config({}, "kv_both", {"MOONCAKE_CONFIG_PATH": str(path)}).pool == PoolConfig("10.0.0.1:50051")


def test_the_file_does_not_set_what_is_not_mooncake_s(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"offer_ttl_ms": 9, "namespace": {"a": "b"}}))
    config = read({}, {"MOONCAKE_CONFIG_PATH": str(path)})
    assert (config.offer_ttl_ms, config.namespace) == (4_000, {})


@pytest.mark.parametrize(
    ("text", "size_bytes"), [(7, 7), ("7", 7), ("64MB", 64 << 20), ("1.5 gib", 3 << 29), ("2k", 2048), ("0", 0)]
)
def test_sizes(text, size_bytes):
    assert read({"global_segment_size": text}).pool.global_segment_bytes == size_bytes


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lookup_deadline": 50}, "did you mean lookup_deadline_ms"),
        ({"zzz": 1}, "one of .*cache_prefix, .*device_name, .*global_segment_size"),
        ({"lookup_deadline_ms": "50"}, "integer >= 1"),
        ({"lookup_deadline_ms": 0}, "integer >= 1"),
        ({"offer_ttl_ms": True}, "integer >= 1"),
        ({"max_storing_share": 0}, "above 0, at most 1"),
        ({"max_storing_share": 1.5}, "above 0, at most 1"),
        ({"global_segment_size": "4 parsecs"}, "64MB"),
        ({"global_segment_size": -1}, "64MB"),
        ({"global_segment_size": True}, "64MB"),
        ({"protocol": 5}, "a string"),
        ({"namespace": {"epoch": 1}}, "object of strings"),
        ({"namespace": "a"}, "object of strings"),
        ({"master_server_address": ""}, "MOONCAKE_CONFIG_PATH"),
    ],
)
def test_a_wrong_value_is_named_with_the_fix(extra, message):
    with pytest.raises(InvalidArgument, match=message) as error:
        read(extra)
    assert next(iter(extra)) in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "mooncake.json"
    path.write_text(content)
    for environment in ({"MOONCAKE_CONFIG_PATH": str(path)}, {"MOONCAKE_CONFIG_PATH": str(tmp_path / "none")}):
        with pytest.raises(InvalidArgument, match="MOONCAKE_CONFIG_PATH"):
            read({}, environment)


def test_a_role_that_vllm_does_not_know_is_refused():
    with pytest.raises(InvalidArgument, match="kv_producer, kv_consumer, kv_both"):
        read(kv_role="kv_observer")


def test_the_scheduler_s_client_lends_and_moves_nothing():
    pool = read({"global_segment_size": "1GB"}).pool.lookup_only()
    assert (pool.global_segment_bytes, pool.local_buffer_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("kv_role", "extra", "loads", "stores"),
    [
        ("kv_both", {}, True, True),
        ("kv_producer", {}, False, True),
        ("kv_consumer", {}, True, False),
        ("kv_consumer", {"loads": False}, False, False),
        ("kv_consumer", {"stores": True, "loads": False}, False, True),
    ],
)
def test_a_role_says_what_is_done_unless_the_user_does(kv_role, extra, loads, stores):
    config = read(extra, kv_role=kv_role)
    assert (config.loads, config.stores) == (loads, stores)


def test_a_failed_load_is_recomputed_unless_the_user_wants_an_error():
    assert read().on_load_failure is LoadFailure.RECOMPUTE
    assert read({"on_load_failure": "fail"}).on_load_failure is LoadFailure.FAIL
    with pytest.raises(InvalidArgument, match="one of recompute, fail"):
        read({"on_load_failure": "retry"})


def test_loads_are_asynchronous_or_the_engine_does_not_start():
    assert read({"load_async": True}) == read()
    with pytest.raises(InvalidArgument, match=r"load_async.*False.*true, or nothing"):
        read({"load_async": False})


# -- transport ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "changed"),
    [
        ({"device_name": "mlx5_0, mlx5_1"}, {"device_name": "mlx5_0,mlx5_1"}),
        ({"device_name": ["mlx5_0", "mlx5_1"]}, {"device_name": "mlx5_0,mlx5_1"}),
        ({"tenant_id": " "}, {"tenant_id": "default"}),
        ({"mode": "standalone-store"}, {}),
        ({"mode": "embedded"}, {"global_segment_bytes": 4 << 30}),
        ({"mode": "embedded", "global_segment_size": "1GB"}, {"global_segment_bytes": 1 << 30}),
        ({"transfer_size": "64MB"}, {"transfer_bytes": 64 << 20}),
        ({"custom_mem_pool": "NVLINK"}, {"memory_pool": MemoryPool.NVLINK}),
        ({"custom_mem_pool": "barex"}, {"memory_pool": MemoryPool.BAREX}),
        ({"replica_num": 2}, {"replication": Replication(2)}),
        ({"preferred_segment": "a:1"}, {"replication": Replication(preferred_segments=("a:1",))}),
        ({"preferred_segment": ["a:1", "b:2"]}, {"replication": Replication(preferred_segments=("a:1", "b:2"))}),
        ({"soft_pin": True}, {"replication": Replication(soft_pin=True)}),
        ({"soft_pin": True, "soft_pin_ttl_ms": 5}, {"replication": Replication(soft_pin=True, soft_pin_ttl_ms=5)}),
        ({"enable_group_semantics": "True"}, {"replication": Replication(grouped=True)}),
        (
            {"enable_ssd_offload": True, "ssd_offload_path": "/ssd/", "global_segment_size": 9},
            {"ssd_path": "/ssd", "global_segment_bytes": 9},
        ),
        ({"ssd_offload_path": "/ssd"}, {}),
    ],
)
def test_what_mooncake_is_told(extra, changed):
    assert read(extra).pool == replace(PoolConfig("10.0.0.1:50051"), **changed)


def test_mooncake_s_variables_and_file_say_the_same(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({**MASTER, "mode": "embedded", "enable_ssd_offload": True}))
    environment = {
        "MOONCAKE_CONFIG_PATH": str(path),
        "MOONCAKE_PREFERRED_SEGMENT": "a:1",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/ssd",
    }
    pool = read_config({}, "kv_both", environment).pool
    assert (pool.global_segment_bytes, pool.ssd_path) == (4 << 30, "/ssd")
    assert pool.replication == Replication(preferred_segments=("a:1",))
    for text, path in (("false", ""), ("0", ""), ("", ""), ("1", "/ssd"), (" Yes", "/ssd")):
        assert read_config({}, "kv_both", environment | {"MOONCAKE_OFFLOAD_ENABLED": text}).pool.ssd_path == path


def test_each_worker_has_a_folder_of_its_own():
    pool = read({"enable_ssd_offload": True, "ssd_offload_path": "/ssd", "global_segment_size": 9}).pool
    assert pool.of_worker("engine0-rank1").ssd_path == "/ssd/engine0-rank1"
    assert pool.lookup_only().ssd_path == ""
    assert read().pool.of_worker("engine0-rank1") == read().pool


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"device_name": 5}, "device_name = 5: expected a name, or a list of names"),
        ({"device_name": ["mlx5_0", 1]}, "device_name.*a list of names"),
        ({"mode": "both"}, "mode = 'both': expected one of embedded, standalone-store"),
        ({"mode": "embedded", "global_segment_size": 0}, "global_segment_size = 0.*standalone-store"),
        ({"mode": "standalone-store", "global_segment_size": 1}, "global_segment_size = 1.*embedded"),
        ({"custom_mem_pool": "cuda"}, "custom_mem_pool = 'cuda': expected one of , nvlink, barex"),
        ({"replica_num": 0}, "replica_num = 0"),
        ({"soft_pin": "perhaps"}, "soft_pin = 'perhaps': expected true or false"),
        ({"soft_pin_ttl_ms": 5}, "soft_pin_ttl_ms = 5: expected nothing but with soft_pin true"),
        ({"soft_pin": True, "soft_pin_ttl_ms": 0}, "soft_pin_ttl_ms = 0"),
        ({"enable_ssd_offload": True, "ssd_offload_path": "/ssd"}, "enable_ssd_offload = True.*global_segment_size"),
        ({"enable_ssd_offload": True, "global_segment_size": 9}, "ssd_offload_path = ''.*a folder"),
        ({"transfer_size": "a lot"}, "transfer_size = 'a lot'"),
    ],
)
def test_a_transport_that_cannot_be_is_refused_with_the_fix(extra, message):
    with pytest.raises(InvalidArgument, match=message):
        read(extra)


# -- integrity ---------------------------------------------------------------------------------------------------------

SECRET = "a secret of sixteen bytes"


def test_content_is_not_verified_unless_the_user_wants_it():
    assert (read().integrity, read().integrity_secret) == (Integrity.NONE, b"")
    assert read({"integrity": "checksum"}).integrity is Integrity.CHECKSUM


def test_a_secret_is_read_from_a_file_or_a_variable_and_never_shown(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    for where in (f"file:{path}", "env:OUR_SECRET"):
        config = read({"integrity": "keyed", "integrity_secret": where}, {"OUR_SECRET": f" {SECRET}"})
        assert (config.integrity, config.integrity_secret) == (Integrity.KEYED, SECRET.encode())
        assert SECRET not in repr(config)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"integrity": "sha256"}, "integrity.*one of none, checksum, keyed"),
        ({"integrity": True}, "integrity.*one of none, checksum, keyed"),
        ({"integrity": "keyed"}, "integrity_secret.*0 bytes.*16 bytes or more"),
        ({"integrity": "keyed", "integrity_secret": "env:SHORT"}, "integrity_secret.*5 bytes.*16 bytes or more"),
        ({"integrity": "keyed", "integrity_secret": "env:NONE"}, "integrity_secret.*env:NONE.*that is set"),
        ({"integrity": "keyed", "integrity_secret": "file:/nowhere/at all"}, "integrity_secret.*a readable file"),
        ({"integrity": "checksum", "integrity_secret": "env:OURS"}, 'integrity_secret.*with integrity "keyed"'),
        ({"integrity_secret": "env:OURS"}, 'integrity_secret.*with integrity "keyed"'),
        ({"integrity": "keyed", "integrity_secret": SECRET}, "integrity_secret.*not shown.*file:PATH"),
        ({"integrity": "keyed", "integrity_secret": f"text:{SECRET}"}, "integrity_secret.*not shown.*file:PATH"),
        ({"integrity": "checksum", "key_format": "vllm"}, 'integrity.*checksum.*key_format "vllm"'),
        (
            {"integrity": "keyed", "integrity_secret": "env:OURS", "key_format": "vllm"},
            'integrity.*keyed.*key_format "vllm"',
        ),
    ],
)
def test_integrity_that_cannot_be_is_refused_with_the_fix_and_without_the_secret(extra, message):
    with pytest.raises(InvalidArgument, match=message) as error:
        read(extra, {"OURS": SECRET, "SHORT": "short"})
    assert SECRET not in str(error.value)


# -- incidents ---------------------------------------------------------------------------------------------------------


def test_what_is_put_up_with_follows_the_lookup_s_deadline():
    assert read().breaker == Tolerance()
    extra = {"breaker_failures": 5, "breaker_probe_ms": 200, "breaker_max_probe_ms": 400, "lookup_deadline_ms": 50}
    assert read(extra).breaker == Tolerance(5, 50 * NS_PER_MS, 200 * NS_PER_MS, 400 * NS_PER_MS)
    assert read({"breaker_probe_ms": 60_000}).breaker.max_probe_ns == 60_000 * NS_PER_MS


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"breaker_failures": 0}, "breaker_failures = 0: expected an integer >= 1"),
        ({"breaker_probe_ms": 0}, "breaker_probe_ms"),
        (
            {"breaker_probe_ms": 500, "breaker_max_probe_ms": 499},
            "breaker_max_probe_ms = 499: expected an integer >= 500",
        ),
        ({"control_file": True}, "control_file = True: expected a string"),
        ({"controlfile": "x"}, "did you mean control_file"),
    ],
)
def test_a_breaker_or_control_file_that_makes_no_sense_is_refused(extra, message):
    with pytest.raises(InvalidArgument, match=message):
        read(extra)


def test_there_is_no_control_file_unless_the_user_names_one():
    assert (read().control_file, read({"control_file": "/run/kvtwin.toml"}).control_file) == ("", "/run/kvtwin.toml")
