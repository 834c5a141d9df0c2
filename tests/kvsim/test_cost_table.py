"""Step times of the shipped tables: exact where they were measured, straight between, and refused for anything else."""

import csv
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import catalog, scenario
from kvsim.clock import PS_PER_MS
from kvsim.cost.grid import Grid
from kvsim.cost.shipped import measured_on, read_grid
from kvsim.cost.table import TableSteps
from kvsim.toml import InvalidToml
from tests.kvsim.small_runs import Ask, scenario_of, trace_of
from tests.kvsim.test_jump import both, differs
from tests.support import PROJECT, shared_data

TABLES = catalog.step_tables()
LLAMA = "llama-3.1-8b_h100_tp1"


def steps_of(name):
    return TableSteps(read_grid(name, "prefill"), read_grid(name, "decode"), measured_on(name).data_parallel_size)


def rows(name, phase):
    return [[float(cell) for cell in row] for row in list(csv.reader(catalog.step_times(name, phase).splitlines()))[1:]]


def decode_ps(steps, ranks, batch, context):
    """A decode step with `batch` requests on every rank, each of that context."""
    return steps.step_ps((), batch * ranks, batch * ranks * context)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_was_measured(name):
    steps, ranks = steps_of(name), measured_on(name).data_parallel_size
    for new, prefix, time_ms in rows(name, "prefill"):
        assert steps.step_ps([(int(prefix), int(new))], 0, 0) == round(time_ms * PS_PER_MS)
    for batch, context, time_ms in rows(name, "decode"):
        assert decode_ps(steps, ranks, int(batch), int(context)) == round(time_ms * PS_PER_MS)


@pytest.mark.parametrize("name", [name for name in TABLES if "_h200_tp1" not in name and "_h200_tp2" not in name])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_tables_are_those_that_were_given(name, phase):
    assert catalog.step_times(name, phase) == shared_data("step_times", f"{name}_{phase}.csv").read_text()


def test_every_table_is_of_a_model_and_a_device():
    files = {path.name for path in (PROJECT / "models" / "step_times").iterdir()} - {"README.md"}
    assert files == {f"{name}{end}" for name in TABLES for end in (".toml", "_prefill.csv", "_decode.csv")}


STEPS = {name: steps_of(name) for name in TABLES}
RISING = Grid({x: {y: (x * y + x) * 10**6 for y in (0, 7, 1_000)} for x in (1, 5, 90)})
"""Where nothing falls, nothing may: the shipped tables fall here and there by what was measured."""

tables = st.sampled_from([*STEPS.values(), TableSteps(RISING, RISING, 1), TableSteps(RISING, RISING, 4)])
rising = st.sampled_from([TableSteps(RISING, RISING, 1), TableSteps(RISING, RISING, 4)])
chunk = st.tuples(st.integers(0, 300_000), st.integers(1, 10_000))
num_decodes_of = st.integers(1, 1024)
context_of = st.integers(0, 10**8)


@given(tables, num_decodes_of, context_of, st.floats(0, 1))
def test_a_line_of_decodes_holds_to_its_end_exactly(steps, num_decodes, context, part):
    base_ps, slope_ps, max_context = steps.decode_affine_ps(num_decodes, context)
    end = 10 * context if max_context is None else max_context
    assert end >= context
    for later in (context, context + int(part * (end - context)), end):
        assert steps.step_ps((), num_decodes, later) == base_ps + slope_ps * later > 0


@given(tables, st.lists(chunk, min_size=1, max_size=4), st.integers(0, 64), st.integers(0, 10**6))
def test_a_mixture_takes_as_long_as_each_part(steps, chunks, num_decodes, context):
    context = context if num_decodes else 0
    whole_ps = steps.step_ps(chunks, num_decodes, context)
    assert whole_ps > 0
    assert all(whole_ps >= steps.step_ps([chunk], 0, 0) for chunk in chunks)
    # Context below the first point of a table is free.
    assert whole_ps >= steps.step_ps((), num_decodes, context)


@given(rising, st.lists(chunk, min_size=1, max_size=4), chunk, st.integers(1, 64), st.integers(0, 10**6))
def test_more_work_never_takes_less(steps, chunks, more, num_decodes, context):
    step_ps = steps.step_ps(chunks, num_decodes, context)
    assert steps.step_ps([*chunks, more], num_decodes, context) >= step_ps
    assert steps.step_ps(chunks, num_decodes, context + 1) >= step_ps
    # One more of the same kind. The slope is a whole number of ps: a ps per token may be lost by rounding.
    same = context // num_decodes * num_decodes
    one_more_ps = steps.step_ps(chunks, num_decodes + 1, same // num_decodes * (num_decodes + 1))
    assert one_more_ps >= steps.step_ps(chunks, num_decodes, same) - same


def test_a_mixture_by_hand():
    steps, at = STEPS[LLAMA], read_grid(LLAMA, "prefill").at
    # Two prompts of 2,048 behind 4,096 and 0 tokens, and 8 decodes at 32,768 each.
    decodes_ps = steps.step_ps((), 8, 8 * 32_768) - steps.step_ps((), 8, 0)
    by_hand_ps = at(2 * 2_048 + 8, 0) + at(2_048, 4_096) - at(2_048, 0) + decodes_ps
    assert steps.step_ps([(4_096, 2_048), (0, 2_048)], 8, 8 * 32_768) == by_hand_ps


def test_a_prompt_is_the_sum_of_its_chunks():
    """Of Kimi-K2.5's 65,536 tokens: one row of the table, and 8 chunks of 8,192."""
    steps = STEPS["kimi-k2.5-nvfp4_gb200_tp4ep4"]
    assert steps.step_ps([(0, 65_536)], 0, 0) == 2_331_623 * PS_PER_MS // 1_000
    chunks_ps = sum(steps.step_ps([(start, 8_192)], 0, 0) for start in range(0, 65_536, 8_192))
    assert chunks_ps / PS_PER_MS == pytest.approx(2_603, rel=1e-3)


def test_ranks_of_data_parallelism_wait_for_the_busiest():
    """Requests 1 to 8 of a step lie on ranks of their own; the ninth makes one of them hold two."""
    steps = STEPS["kimi-k2.5-nvfp4_gb200_dp8ep8"]
    one, eight, nine = (steps.step_ps((), num, num * 65_536) / PS_PER_MS for num in (1, 8, 9))
    assert one == eight == pytest.approx(23.028) and nine == pytest.approx(25.189, abs=1e-3)
    eight_chunks = steps.step_ps([(0, 1_024)] * 8, 0, 0)
    assert eight_chunks == steps.step_ps([(0, 1_024)], 0, 0)


BENT = {"engine.step_time": f"table:{LLAMA}", "cluster.instances": 1}
# Contexts that cross the table's points at 1,024 and 4,096 tokens while others come and go.
CROSSING = [
    Ask(new_len=900, output_len=400),
    Ask(new_len=1_000, output_len=300, gap_us=1_000),
    Ask(new_len=4_000, output_len=250, gap_us=500_000),
    Ask(new_len=900, output_len=700, gap_us=2_000_000),
]


FALLING = {
    "engine.step_time": "table:kimi-k2.5-nvfp4_gb200_tp4ep4",
    "engine.tensor_parallel_size": 4,
    "engine.enable_expert_parallel": "true",
    "model.name": "kimi-k2.5-nvfp4",
    "device.name": "gb200",
    "cluster.instances": 1,
}
"""Two requests of Kimi-K2.5 take less at 4,096 tokens than at 1,024."""


def test_a_measured_line_may_fall():
    steps = scenario_of(FALLING, "nopool-16").step_time
    assert steps.decode_affine_ps(2, 2 * 2_000).slope_ps < 0 < steps.decode_affine_ps(2, 2 * 5_000).slope_ps


@pytest.mark.parametrize("settings", [BENT, FALLING])
def test_decode_steps_jump_from_piece_to_piece(settings):
    jumping, stepping = both(scenario_of(settings, "nopool-16"), trace_of(CROSSING))
    assert jumping.clock.num_events < stepping.clock.num_events / 10


def test_a_jump_that_overlooks_where_a_piece_ends_is_found(monkeypatch):
    pieces = TableSteps.decode_affine_ps
    monkeypatch.setattr(TableSteps, "decode_affine_ps", lambda *args: pieces(*args)._replace(max_context=None))
    assert differs(scenario_of(BENT, "nopool-16"), trace_of(CROSSING))


def test_a_scenario_names_its_table():
    config = scenario.load("pool-16", [f"engine.step_time=table:{LLAMA}"])
    assert config.step_time.step_ps([(0, 8_192)], 0, 0) == 199_719 * PS_PER_MS // 1_000


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("table:llama-3.1-8b", "did you mean table:llama-3.1-8b_h"),
        ("rooflines", "did you mean roofline?"),
        (
            "table:deepseek-v3_h200_tp8",
            "expected model deepseek-v3, device h200, tensor_parallel_size 8, data_parallel_size 1, "
            "enable_expert_parallel false, as table:deepseek-v3_h200_tp8 was measured on, instead of "
            "model llama-3.1-8b, device h100-sxm, tensor_parallel_size 1; table:llama-3.1-8b_h100_tp1 fits",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(setting, expected):
    with pytest.raises(InvalidToml) as error:
        scenario.load("pool-16", [f"engine.step_time={setting}"])
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_where_no_table_fits_the_roofline_is_offered():
    with pytest.raises(InvalidToml, match=r'no table fits, engine.step_time = "roofline" does'):
        scenario.load("pool-16", [f"engine.step_time=table:{LLAMA}", "engine.tensor_parallel_size=2"])


def test_another_kv_cache_dtype_than_was_measured_is_refused():
    with pytest.raises(InvalidToml, match=r'engine.kv_cache_dtype "auto" with step_time table:.*of bfloat16, not fp8'):
        scenario.load("pool-16", [f"engine.step_time=table:{LLAMA}", "engine.kv_cache_dtype=fp8"])
    halved = scenario.load("pool-16", ["engine.kv_cache_dtype=fp8"]).step_time
    own = scenario.load("pool-16").step_time
    assert halved.decode_affine_ps(1, 0).slope_ps == pytest.approx(own.decode_affine_ps(1, 0).slope_ps / 2, rel=1e-3)


def test_a_lookup_is_fast():
    steps, started_s = STEPS["kimi-k2.5-nvfp4_gb200_tp4ep4"], time.process_time()
    for step in range(10_000):
        steps.step_ps([(70_000 + step, 1_500), (50_000, 2_000)], 40, 2_000_000 + step)
    assert (time.process_time() - started_s) / 10_000 < 200e-6
