"""What the page says about a run is what its events, its machines and plotly's own schema say."""

import numpy as np
import plotly.graph_objects as go
import pytest

from kvsim import result_folder, results
from kvsim.capacity import capacity_curve
from kvsim.clock import PS_PER_S
from kvsim.events import Kind
from kvsim.report import figures, summary, theme
from kvsim.report.figures import grouped
from kvsim.report.parts import held, legend_once, log_ticks, nice_step, plain, size
from kvsim.report.run_series import GPU, RunSeries
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.source import trace_of
from tests.kvsim.small_runs import events

SMALL = ["cluster.instances=3", "workload.sessions=13", "workload.turns=5", "workload.output_len=90"]
TIERED = [
    *SMALL,
    "workload.turns=8",
    "host.cpu_bytes_to_use=100e9",
    "engine.num_gpu_blocks=5000",
    "link.bandwidth_bytes_per_s=4e9",
]


def finished(folder, name, settings):
    """(simulation, what the page has of it)."""
    scenario = load(name, settings)
    trace = trace_of(scenario)
    done = simulation(scenario, trace)
    done.run()
    results.write(folder, done, results.document(done, "fast", lambda: 1.0), trace)
    return done, RunSeries(result_folder.read(folder), name)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("tiered"), "pool-16", TIERED)


def lives(log):
    """Per request: when things first happened to it, and its lengths."""
    found = {}
    for time_ps, kind, request, a, b in events(log):
        life = found.setdefault(request, {})
        life.setdefault(Kind(kind), (time_ps, a, b))
    return found


def test_tokens_in_flight(tiered):
    done, run = tiered
    expected = []
    for now_ps in run.edges_ps[1:].tolist():
        tokens = 0.0
        for life in lives(done.log).values():
            (admitted_ps, _, _), (first_ps, _, _), (end_ps, output_len, _) = (
                life[kind] for kind in (Kind.ADMITTED, Kind.FIRST_TOKEN, Kind.FINISHED)
            )
            if admitted_ps <= now_ps < end_ps:
                grown = min(max((now_ps - first_ps) / (end_ps - first_ps), 0), 1)
                tokens += life[Kind.ARRIVED][1] + output_len * grown
        expected.append(tokens)
    assert np.allclose(run.tokens_in_flight(), expected, atol=0.5)
    assert max(expected) > 10_000


def test_states_add_up_to_the_time_that_requests_spend_in_them(tiered):
    done, run = tiered
    width_s = np.diff(run.edges_ps) / PS_PER_S
    spent_s = {state: float((count * width_s).sum()) for state, count in run.states().items()}
    assert sum(spent_s.values()) == pytest.approx(run.latencies()["E2E"].sum())
    assert spent_s["waiting"] + spent_s["loading"] + spent_s["prefill"] == pytest.approx(run.latencies()["TTFT"].sum())
    loading_ps = 0
    for life in lives(done.log).values():
        loading_ps += life[Kind.LOADED][0] - life[Kind.ADMITTED][0] if life[Kind.ADMITTED][2] else 0
    assert spent_s["loading"] == pytest.approx(loading_ps / PS_PER_S) and loading_ps > 0


def test_hits_by_tier_are_the_hits(tiered):
    _, run = tiered
    prompt_tokens = run.requests.input_len.sum()
    rates = {tier: tokens.sum() / prompt_tokens for tier, tokens in run.hit_tokens.items()}
    assert rates[GPU] == pytest.approx(run.metrics["hit_rate_local"])
    assert sum(rates.values()) == pytest.approx(run.metrics["hit_rate"])
    assert rates["host cache"] > 0 and rates["pool"] > 0 and rates["pool, SSD"] == 0
    for rate in run.hit_rates().values():
        assert np.nanmin(rate) >= 0 and np.nanmax(rate) <= 1


def test_machines_did_what_they_did(tiered):
    done, run = tiered
    assert np.allclose((run.gpu_busy * np.diff(run.edges_ps)).sum(axis=1), run.balance.busy * run.end_ps)
    assert run.balance.requests.sum() == run.metrics["requests_completed"]
    served = [life[Kind.FINISHED][2] for life in lives(done.log).values()]
    assert run.balance.requests.tolist() == [served.count(instance) for instance in range(3)]
    steps = done.log.usage.steps.columns()
    for instance, busy in zip(done.instances, run.balance.busy, strict=True):
        mine = steps["instance"] == instance.index
        assert busy == pytest.approx((steps["end_ps"] - steps["start_ps"])[mine].sum() / run.end_ps)
        assert run.balance.computed_tokens[instance.index] == steps["computed_tokens"][mine].sum() > 0
    fill = run.fills[0]
    assert fill.used_bytes.max() <= done.pool.store.used_bytes <= fill.capacity_bytes


def test_a_link_that_takes_turns_is_as_used_as_it_is_busy(tiered):
    done, run = tiered
    use = {link.kind: link for link in run.links}
    assert set(use) == {"pool get", "pool put", "host to GPU", "GPU to host"}
    busy_ps = sum(path.get_link.busy_ps for path in done.pool.paths)
    assert use["pool get"].whole_run == pytest.approx(busy_ps / run.end_ps / 3)
    assert (use["pool get"].mean <= use["pool get"].busiest + 1e-9).all()
    assert all(link.busiest.max() <= 1 + 1e-9 for link in run.links)


def test_links_of_a_network_carry_what_they_carried(tmp_path):
    base = [setting for setting in TIERED if not setting.startswith("link.")]
    text = results.scenario_toml(load("pool-16", base)).partition("[link]")
    source = tmp_path / "network.toml"
    source.write_text(text[0] + "[network]\nnic_bytes_per_s = 2_000_000_000\n\n" + text[2][text[2].index("[") :])
    (tmp_path / "out").mkdir()
    done, run = finished(tmp_path / "out", str(source), [])
    use = {link.kind: link for link in run.links}
    nic = next(link for link in run.run["links"] if link["kind"] == "NICs in")
    moved = sum(path.fetched_bytes for path in done.pool.paths)
    capacity = 3 * nic["bandwidth_bytes_per_s"] * run.end_ps / PS_PER_S
    assert 0 < use["NICs in"].whole_run <= moved / capacity * 1.001


def test_the_curve_of_the_folder_is_that_of_the_trace(tiered):
    done, run = tiered
    everyone = np.ones(len(done.cluster.sequences), dtype=bool)
    curve = capacity_curve(trace_of(done.scenario), done.scenario.engine.block_size, everyone).to_json()
    assert run.run["capacity"]["infinite_hit_tokens"] == curve["infinite_hit_tokens"]
    assert [point["hit_tokens"] for point in run.run["capacity"]["opt"]] == [
        point["hit_tokens"] for point in curve["opt"]
    ]
    bound = curve["infinite_hit_tokens"] / curve["prompt_tokens"]
    assert run.metrics["hit_rate"] <= bound


# --- what plotly takes ------------------------------------------------------------------------------------------------


def coloured(value, colours):
    """As the page does it."""
    if isinstance(value, str) and value.startswith("@"):
        name, _, alpha = value[1:].partition("/")
        return colours[name] + alpha
    if isinstance(value, dict):
        return {key: coloured(part, colours) for key, part in value.items()}
    return [coloured(part, colours) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_picture_is_one_by_plotlys_schema_in_both_themes(tiered, tmp_path, mode):
    _, alone = finished(tmp_path, "nopool-16", SMALL)
    colours = theme.colours(mode)
    for runs in ([alone], [tiered[1]], [alone, tiered[1]] * 4):
        for figure in figures.figures(runs):
            go.Figure(coloured({"data": figure.data, "layout": figure.layout}, colours))
    with pytest.raises(ValueError, match="colour"):
        go.Figure({"data": [], "layout": {"xaxis": {"colour": "red"}}})


def test_many_instances_are_drawn_in_groups():
    assert grouped(np.arange(5.0))[0] == [0, 1, 2, 3, 4]
    first, mean = grouped(np.arange(300.0))
    assert len(first) <= 128 and first[:3] == [0, 3, 6] and mean[:2].tolist() == [1.0, 4.0]
    first, mean = grouped(np.array([1.0, 3.0, 8.0]), max_bars=2)
    assert (first, mean.tolist()) == ([0, 2], [2.0, 8.0])


def test_small_parts():
    assert plain([1 / 3, float("nan")]) == [0.33333, None]
    assert [size(value) for value in (999, 1_500, 58_000_000_000, 4.096e12)] == ["999 B", "1.5 kB", "58 GB", "4.1 TB"]
    shown = [trace["showlegend"] for trace in legend_once([{"name": "a"}, {"name": "b"}, {"name": "a"}])]
    assert shown == [True, True, False]
    wide, narrow = log_ticks([{"x": [1e-3, 1e4]}]), log_ticks([{"x": [13.2, 17.0]}])
    assert wide["ticktext"][:3] == ["0.001", "0.01", "0.1"] and narrow["ticktext"] == ["14", "15", "16", "17"]
    assert log_ticks([])["ticktext"] and log_ticks([{"x": [0.03, 0.03]}])["ticktext"] == ["0.03"]
    assert [nice_step(least) for least in (0.03, 1, 1.2, 7, 0)] == [pytest.approx(0.05), 1, 2, 10, 1]
    assert held([0, 1, 2, 3], [None, 0.5, None]) == ([1, 3], [0.5, 0.5])
    assert held([0, 1], [None]) == ([], [])


def test_disks_and_faults_are_shown(tmp_path):
    settings = [*SMALL, "pool.segment_bytes_per_instance=4e9", "pool.enable_offload=true", "pool.lease_ttl_ms=1"]
    done, run = finished(tmp_path, "pool-16", settings)
    memory, disk = run.fills
    assert (memory.kind, disk.kind, disk.capacity_bytes) == (
        "pool memory",
        "pool SSD",
        done.pool.store.disks.capacity_bytes,
    )
    assert 0 < disk.used_bytes[-1] <= done.pool.store.disks.used_bytes
    faults = [{"scenario": {"name": "a"}, "fault": [{"at_s": 1}]}, {"scenario": {"name": "b"}}]
    assert summary.differences(faults) == [("fault.*", ['[{"at_s": 1}]', "-"])]


def test_private_caches_are_memory_of_their_own_beside_a_pool_or_alone(tiered, tmp_path):
    _, beside = tiered
    alone = finished(tmp_path, "nopool-16", [*SMALL, "host.cpu_bytes_to_use=20e9"])[1]
    assert [(run.run["host_bytes"], run.run["pool_bytes"]) for run in (beside, alone)] == [
        (300 * 10**9, 768 * 10**9),
        (60 * 10**9, 0),
    ]
    assert [fill.kind for fill in alone.fills] == ["host memory"]
    assert "host memory filled to" in [headline.label for headline, _ in summary.rows([alone])]


def test_a_run_that_was_stopped_ends_there(tmp_path):
    done, run = finished(tmp_path, "pool-16", [*SMALL, "workload.stop_after_s=3"])
    assert run.end_ps == 3 * PS_PER_S and run.metrics["requests_completed"] == 0
    steps = done.log.usage.steps.columns()
    assert steps["end_ps"].max() > run.end_ps, "what is in flight goes on"
    assert 0 < run.balance.busy.min() <= run.balance.busy.max() <= 1
    assert np.allclose(run.gpu_busy.mean(axis=1), run.balance.busy)
    in_system = sum(run.states().values())[-1]
    assert (
        in_system == pytest.approx(run.requests.has(Kind.ARRIVED).sum(), rel=0.1) and run.tokens_in_flight().max() > 0
    )
    assert 0 < run.balance.computed_tokens.sum() < steps["computed_tokens"].sum()
    left = run.metrics["requests_stopped"]
    assert any(f"{left:,} requests it left unfinished" in text for text in summary.warnings([run]))
