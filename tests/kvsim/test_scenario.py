"""The configuration object: what is shipped, what is derived, what overrides do, what mistakes say."""

import numpy as np
import pytest

from kvsim import scenario
from kvsim.config.workload import AgenticWorkload, CodexWorkload, TraceWorkload
from kvsim.results import scenario_toml
from kvsim.toml import InvalidToml
from kvsim.workload.codex import MAX_SESSIONS, PROVIDER_SHARED_LEN, Codex, generate
from kvsim.workload.source import parameters, trace_of
from kvsim.workload.trace import columns_of


def test_shipped_scenarios_load_and_describe_themselves():
    shipped = scenario.scenarios()
    assert {"pool-16", "nopool-16"} <= shipped.keys()
    assert all(scenario.load(name).scenario.name == name and description for name, description in shipped.items())


def test_nopool_is_pool_without_the_pool():
    pool, nopool = scenario.load("pool-16"), scenario.load("nopool-16")
    assert pool.pool is not None and nopool.pool is None
    for section in ("model", "device", "cluster", "engine", "workload"):
        assert getattr(pool, section) == getattr(nopool, section), section


def test_derived_numbers_of_pool_16():
    config = scenario.load("pool-16")
    assert config.pool_capacity_bytes == 16 * 256 * 10**9
    assert config.num_gpus == 16
    assert config.block_bytes == (2 * 2**20,)
    assert config.num_gpu_blocks == (int(80 * 2**30 * 0.9) - 2 * 8_030_261_248 - 3_274_912_563) // 2**21
    # vLLM prints about 447,000 tokens on this device (less of it is visible, less is reserved).
    assert 430_000 < config.num_gpu_blocks * 16 < 450_000
    assert scenario.load("nopool-16").pool_capacity_bytes == 0


def test_utilisation_is_the_decimal_that_was_written():
    few = scenario.load("pool-16", ["engine.gpu_memory_utilization=0.3", "engine.reserved_bytes=0"])
    # 0.3 as a binary float is a little less than 3/10.
    assert few.num_gpu_blocks == (80 * 2**30 * 3 // 10 - 2 * 8_030_261_248) // 2**21


def test_overrides():
    config = scenario.load(
        "pool-16",
        [
            "cluster.instances=4",
            "pool.segment_bytes_per_instance=1e9",
            "scenario.description=two words",
            "engine.num_gpu_blocks = 100",
            "workload.delay_s=5.2",
        ],
    )
    assert (config.cluster.instances, config.pool_capacity_bytes, config.num_gpu_blocks) == (4, 4 * 10**9, 100)
    assert config.scenario.description == "two words"
    assert isinstance(config.workload, AgenticWorkload) and config.workload.delay_s == 5.2


def test_a_trace_replaces_the_workload():
    trace = TraceWorkload(trace="conversation.jsonl.gz", format="mooncake")
    assert scenario.load("pool-16", trace=trace).workload == trace


@pytest.mark.parametrize("override", ["workload.sessions=3", " workload.nonsense = 1"])
def test_beside_a_trace_a_setting_of_the_workload_would_say_nothing(override):
    with pytest.raises(InvalidToml, match=r"^--set .*: expected no setting of \[workload\] beside a trace"):
        scenario.load("pool-16", [override], TraceWorkload(trace="t"))


def test_a_home_folder_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    assert TraceWorkload(trace="~/t").trace == "/somebody/t"


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_no_trace(path):
    with pytest.raises(ValueError, match="String should"):
        TraceWorkload(trace=path)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 5000, "x", b"\xff\xfe", "[a]\nb=1\nb=2"])
def test_a_file_that_is_no_toml_is_one_line(tmp_path, text):
    path = tmp_path / "s.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidToml) as caught:
        scenario.load(str(path))
    assert str(caught.value).startswith(f"{path}: expected TOML (") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"[{'x' * 5000}]\na=1", f"scenario = '{'y' * 100_000}'", f"scenario.x = {[1] * 9999}"]
)
def test_a_long_line_of_a_file_makes_a_short_message(tmp_path, text):
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(InvalidToml) as caught:
        scenario.load(str(path))
    assert len(str(caught.value).replace(str(path), "")) < 500


def test_numbers_of_an_engine_of_several_gpus():
    kimi = ["model.name=kimi-k2.5-nvfp4", "device.name=gb200", "engine.gpu_memory_utilization=0.85"]
    prefill = scenario.load("pool-16", [*kimi, "engine.tensor_parallel_size=4"])
    assert prefill.block_bytes == (64 * 35_136,) and prefill.kv_bytes_per_token == 35_136
    assert prefill.gpu_block_bytes == 64 * 35_136 and prefill.num_gpus == 64
    assert prefill.num_gpu_blocks * 64 == pytest.approx(461_216, rel=0.02)
    parallel = ["engine.data_parallel_size=8", "engine.enable_expert_parallel=true", "engine.kv_cache_dtype=fp8_ds_mla"]
    decode = scenario.load("pool-16", [*kimi, *parallel])
    assert decode.block_bytes == (64 * 40_016,) and decode.num_gpu_blocks % 8 == 0
    # An eighth of the experts, and attention and all else as often as there are ranks.
    assert decode.rank_weights.size_bytes < prefill.rank_weights.size_bytes


def test_gpu_blocks_of_heads_that_are_divided():
    two, four = (scenario.load("pool-16", [f"engine.tensor_parallel_size={tp}"]) for tp in (2, 4))
    assert two.block_bytes == four.block_bytes == (2 * 2**20,)
    assert (two.gpu_block_bytes, four.gpu_block_bytes) == (2**20, 2**19)


def test_lookup_time():
    pool = scenario.load("pool-16", ["pool.lookup_rtt_us=7", "pool.lookup_per_key_ns=3"]).pool
    assert pool.lookup_ps(1000) == 7_000_000 + 3_000_000


def test_is_immutable():
    config = scenario.load("pool-16")
    with pytest.raises(ValueError, match="frozen"):
        config.engine.block_size = 32


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("engine.blok_size=3", "engine.blok_size = 3: expected a known key; did you mean block_size?"),
        ("workload.session=3", "workload.session = 3: expected a known key; did you mean sessions?"),
        ("pol.capacity=3", "pol = {'capacity': 3}: expected a known key; did you mean pool or model?"),
        ("engine.block_size=x", "engine.block_size = 'x': expected a valid integer"),
        ("engine.block_size=0", "engine.block_size = 0: expected greater than 0"),
        ("engine.block_size=1.5", "engine.block_size = 1.5: expected a valid integer"),
        ("engine.block_size=" + "9" * 5000, "engine.block_size = '999"),
        ("engine.block_size=" + "[" * 5000 + "]" * 5000, "engine.block_size = '[[["),
        ("engine.block_size=16\nmax_num_seqs=3", r"engine.block_size = '16\nmax_num_seqs=3': expected a valid integer"),
        ("engine.num_gpu_blocks=1", "engine.num_gpu_blocks = 1: expected greater than or equal to 2"),
        ("cluster.instances=1e18", "cluster.instances = 1e+18: expected less than or equal to 65536"),
        ("engine.block_size=true", "engine.block_size = True: expected a valid integer"),
        ("engine.gpu_memory_utilization=1.5", "engine.gpu_memory_utilization = 1.5: expected less than or equal to 1"),
        ("engine.gpu_memory_utilization=nan", "engine.gpu_memory_utilization = nan: expected a finite number"),
        ("pool.segments_per_instance=1000000", "pool.segments_per_instance = 1000000: expected less than or equal to"),
        (
            "engine.gpu_memory_utilization=0.1",
            "expected room for two KV blocks: of 8.6 GB of a GPU (h100-sxm x engine.gpu_memory_utilization) weights"
            " take 16.1 GB and engine.reserved_bytes 3.3 GB; raise engine.tensor_parallel_size",
        ),
        (
            "engine.tensor_parallel_size=3",
            "expected engine.tensor_parallel_size to be a divisor or a multiple of 8 heads, not 3",
        ),
        ("engine.kv_cache_dtype=fp4", "engine.kv_cache_dtype = 'fp4': expected"),
        ("model.name=lama-3", "model.name = 'lama-3': expected a known name; did you mean llama-3.1-8b?"),
        (
            "cluster.routing=random",
            "cluster.routing = 'random': expected one of round_robin, least_loaded, session_aff",
        ),
        ("cluster.routing=prefix", "cluster.routing = 'prefix': expected a known name; did you mean prefix_aware?"),
        ("cluster.routing=7", "cluster.routing = 7: expected a valid string"),
        (
            "routing.overlap_score_weight=1",
            "routing.overlap_score_weight = 1: expected a known key; did you mean overlap_sc",
        ),
        ("routing.overlap_score_credit=1.5", "routing.overlap_score_credit = 1.5: expected less than or equal to 1"),
        ("routing.snapshot_interval_ms=-1", "routing.snapshot_interval_ms = -1: expected greater than or equal to 0"),
        ("workload.trace=x", "workload.generator = 'agentic': expected no such key beside the others"),
        ("workload.delay_s=inf", "workload.delay_s = inf: expected a finite number"),
        ("workload.generator=codx", "workload.generator = 'codx': expected a known name; did you mean codex?"),
        ("workload.generator=codex", "workload.turns = 30: expected no such key beside the others"),
        ("workload.generator=3", "workload.generator = 3: expected a valid string"),
    ],
)
def test_a_wrong_value_names_file_key_and_fix(override, expected):
    with pytest.raises(InvalidToml) as error:
        scenario.load("pool-16", [override])
    assert f"pool-16.toml: {expected}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo", "--set foo: expected section.key=value"),
        ("engine=3", "--set engine=3: expected section.key=value"),
        ("model.name.x=3", "--set model.name.x=3: expected a section, and name is a value"),
        ("x" * 5000, f"--set {'x' * 117}...: expected section.key=value"),
    ],
)
def test_a_wrong_override_says_so(override, expected):
    with pytest.raises(InvalidToml) as error:
        scenario.load("pool-16", [override])
    assert str(error.value) == expected


CODEX = """
[scenario]
name = "codex"
description = "as small as it gets"
[model]
name = "llama-3.1-8b"
[device]
name = "h100-sxm"
[cluster]
instances = 2
[workload]
generator = "codex"
sessions = 3
shared_len = 902
"""


def test_codex_is_a_workload(tmp_path):
    path = tmp_path / "codex.toml"
    path.write_text(CODEX)
    config = scenario.load(str(path), ["scenario.seed=5"])
    assert isinstance(config.workload, CodexWorkload)
    trace, expected = trace_of(config), generate(Codex(sessions=3, shared_len=902), seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(columns_of(trace), columns_of(expected), strict=True))
    again = tmp_path / "again.toml"
    again.write_text(scenario_toml(config))
    assert scenario.load(str(again)) == config
    with pytest.raises(InvalidToml, match=r"workload.shared_len = 11521: expected less than or equal to 11520"):
        scenario.load(str(path), ["workload.shared_len=11521"])


def test_both_sides_have_the_same_bounds():
    """A scenario's mistakes are told with their place: by its own bounds, which are those of the generator."""
    for field, largest in (("sessions", MAX_SESSIONS), ("shared_len", PROVIDER_SHARED_LEN)):
        sizes = {"generator": "codex", "sessions": 1, field: largest}
        assert Codex(**parameters(CodexWorkload(**sizes)))
        with pytest.raises(ValueError):
            CodexWorkload(**{**sizes, field: largest + 1})


def test_pool_and_link_come_together():
    with pytest.raises(InvalidToml, match=r"^nopool-16.toml: expected \[pool\] beside \[link\], "):
        scenario.load("nopool-16", ["link.latency_us=1"])


def test_required_keys_are_named():
    with pytest.raises(InvalidToml, match=r"pool.segment_bytes_per_instance: expected a value; this key is required"):
        scenario.load("nopool-16", ["pool.lease_ttl_ms=1"])


def test_a_file_is_named_as_the_user_wrote_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[scenario]\nname = 'mine'\n", encoding="utf-8")
    with pytest.raises(InvalidToml) as error:
        scenario.load(str(path))
    assert str(error.value).startswith(f"{path}: ")


def test_unknown_scenario_suggests_a_near_one():
    with pytest.raises(InvalidToml, match=r"^pool-17: expected a .toml file or a known name; did you mean pool-16\?$"):
        scenario.load("pool-17")
    with pytest.raises(InvalidToml, match=r"^x{117}\.\.\.: expected a .toml file or one of"):
        scenario.load("x" * 5000)


def test_a_segment_has_a_byte():
    with pytest.raises(
        InvalidToml, match=r"segment_bytes_per_instance of at least 10 \(segments_per_instance\), not 9"
    ):
        scenario.load("pool-16", ["pool.segment_bytes_per_instance=9", "pool.segments_per_instance=10"])
