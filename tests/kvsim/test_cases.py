"""The simulator's parts of the cases in docs/CASES.md: failures of other people's KV caches and simulators."""

import json
from functools import partial
from itertools import count

import numpy as np
import pytest

from kvcore.types import GroupId
from kvsim.clock import PS_PER_MS, PS_PER_S
from kvsim.events import Kind
from kvsim.invariants import check
from kvsim.metrics import Events, Requests, measure
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.load import load_trace
from kvsim.workload.source import trace_of
from kvsim.workload.trace import TraceError

SESSIONS = {
    "sessions": 24,
    "turns": 6,
    "common_len": 1_000,
    "first_len": 6_000,
    "turn_len": 1_000,
    "output_len": 100,
    "delay_s": 1.0,
    "start_spread_s": 10.0,
}
WHOLE_POOL_BYTES = 24 * 12_500 * 131_072
"""What the sessions store in all, and a little more."""


def agentic(settings=(), **workload):
    """A run of the sessions on three engines that take turns, before it has run."""
    values = [f"workload.{name}={value}" for name, value in (SESSIONS | workload).items()]
    scenario = load("pool-16", ["cluster.instances=3", *values, *settings])
    return simulation(scenario, trace_of(scenario))


def metrics_of(run):
    run.run()
    assert check(run) == "ok"
    metrics = measure(run.log, run.scenario.num_gpus)
    assert metrics.requests_completed == len(run.cluster.sequences), "nobody sees an error"
    return metrics


# --- S13 ------------------------------------------------------------------------------------------------------------


def late_misses(lease_ttl_ms, pool_share=0.5):
    """Blocks that a lookup promised and that were gone when they were fetched."""
    segment = round(pool_share * WHOLE_POOL_BYTES / 3)
    settings = [
        f"pool.segment_bytes_per_instance={segment}",
        f"pool.lease_ttl_ms={lease_ttl_ms}",
        "link.bandwidth_bytes_per_s=1e9",
        "link.load_threads=1",
        "engine.num_gpu_blocks=3_000",
    ]
    return metrics_of(agentic(settings)).late_misses


def test_what_is_evicted_between_lookup_and_load_is_counted_and_computed():
    """Case S13. A small pool, many writes, loads that wait for a thread: a lease shorter than that wait is none."""
    late = [late_misses(lease_ttl_ms) for lease_ttl_ms in (0, 1_000, 10_000)]
    assert late[0] > late[1] > late[2] == 0
    assert late_misses(0, pool_share=2.0) == 0, "a pool that need not evict has none"


# --- S14 ------------------------------------------------------------------------------------------------------------


def hits_of_newcomers(probe_ms, lease_ttl_ms, pool_share=0.4, asks_all=True):
    """Tokens that the later half of the requests had from the pool, while somebody asks for what it holds.

    Each time for every prompt that there was, or for one.
    """
    segment = round(pool_share * WHOLE_POOL_BYTES / 3)
    settings = [f"pool.segment_bytes_per_instance={segment}", f"pool.lease_ttl_ms={lease_ttl_ms}"]
    run = agentic(settings, start_spread_s=120.0)
    store, turns = run.pool.store, count()

    def probe():
        known = [sequence for sequence in run.cluster.sequences if sequence is not None]
        for sequence in known if asks_all else known[next(turns) % max(1, len(known)) :][:1]:
            store.exists(GroupId(0), sequence.segments, ((0, sequence.input_len // 16),), run.clock.now_ns)

    for at_ms in range(0, 130_000, probe_ms):
        run.clock.at(at_ms * PS_PER_MS, probe)
    run.run()
    num_requests = len(run.cluster.sequences)
    assert measure(run.log, 1).requests_completed == num_requests
    admitted = Events(run.log).of(Kind.ADMITTED)
    return int(admitted.b[admitted.request >= num_requests // 2].sum())


def test_probing_everything_keeps_everything_alive_so_that_nothing_new_is_kept():
    """Case S14. Probe rate x lease x size of the pool: it stalls when all of it is asked for within each lease."""
    calm = hits_of_newcomers(probe_ms=500, lease_ttl_ms=5_000, asks_all=False)
    assert calm > 100_000, "who asks for little keeps little alive"
    assert hits_of_newcomers(probe_ms=500, lease_ttl_ms=5_000) < calm / 100
    assert hits_of_newcomers(probe_ms=10_000, lease_ttl_ms=1_000) > calm / 2, "leases end between two probes"
    assert hits_of_newcomers(probe_ms=500, lease_ttl_ms=5_000, pool_share=2.0) >= calm, "there is room for all"


# --- S22 ------------------------------------------------------------------------------------------------------------

OUTAGE_S = (60, 180)


def outage_run(tmp_path, is_out):
    """Sessions with pauses, over a pool all of whose clients die, and come back 120 s later."""
    died, returned = OUTAGE_S
    faults = "".join(
        f'[[faults]]\nkind = "pool_client_{kind}"\nat_s = {at_s}\ninstance = {instance}\n'
        for instance in range(3)
        for kind, at_s in (("dies", died), ("returns", returned))
    )
    path = tmp_path / "outage.toml"
    workload = "".join(f"{name} = {value}\n" for name, value in (SESSIONS | {"turns": 30, "delay_s": 8.0}).items())
    path.write_text(
        '[scenario]\nname = "outage"\ndescription = "a pool that goes and comes back"\n'
        '[model]\nname = "llama-3.1-8b"\n[device]\nname = "h100-sxm"\n[cluster]\ninstances = 3\n'
        "[engine]\nnum_gpu_blocks = 4_000\n"
        "[pool]\nsegment_bytes_per_instance = 256e9\n[link]\n"
        f'[workload]\ngenerator = "agentic"\n{workload}{faults if is_out else ""}'
    )
    scenario = load(str(path))
    return simulation(scenario, trace_of(scenario))


def by_time(run):
    """Admission time in seconds, share of the prompt that came from the pool, and time to first token, by request."""
    requests, admitted = Requests(Events(run.log)), Events(run.log).of(Kind.ADMITTED)
    loaded = Events(run.log).of(Kind.LOADED)
    valid = dict(zip(loaded.request.tolist(), loaded.a.tolist(), strict=True))
    external = [
        max(0, valid.get(r, 0) - a) for r, a in zip(admitted.request.tolist(), admitted.a.tolist(), strict=True)
    ]
    order = np.argsort(admitted.request)
    share = (np.array(external) / requests.input_len[admitted.request])[order]
    return admitted.time_ps[order] / PS_PER_S, share, requests.ttft_ps() / PS_PER_S


def test_a_pool_that_goes_costs_hits_for_a_while_and_nothing_else(tmp_path):
    """Case S22. Requests keep finishing without hits, wait as long as computing takes, and hits come back."""
    run, calm = outage_run(tmp_path, True), outage_run(tmp_path, False)
    late_misses = [metrics_of(each).late_misses for each in (run, calm)]
    assert late_misses[0] > 0 == late_misses[1], "the master believes for a while in clients that are dead"
    died, returned = OUTAGE_S
    at_s, hits, ttft_s = by_time(run)
    before, during, after = at_s < died, (at_s > died) & (at_s < returned), at_s > returned + 30
    assert hits[before].mean() > 0.4 and hits[during].max() == 0 and hits[after].mean() > 0.8
    calm_at_s, calm_hits, calm_ttft_s = by_time(calm)
    assert calm_hits[(calm_at_s > died) & (calm_at_s < returned)].mean() > 0.8, "the outage it is"
    longest = max(sequence.input_len for sequence in run.cluster.sequences)
    computed_s = run.scenario.step_time.step_ps([(0, longest)], 0, 0) / PS_PER_S
    assert ttft_s.max() < calm_ttft_s.max() + computed_s


# --- S25 ------------------------------------------------------------------------------------------------------------

PROMPT_LEN, ANSWER_LEN, ROOM = 1_000, 400, 68


def closed_loop(num_clients, num_requests, answer_len, stream_of):
    """So many clients, each of which sends its next prompt when it has an answer."""
    builder = TraceBuilder()
    for at in range(num_requests):
        builder.start(at, at - num_clients if at >= num_clients else None, 0, at % num_clients)
        builder.hold(PROMPT_LEN, answer_len, [(stream_of(at), PROMPT_LEN)], 10**6 + at, 0)
    return builder.build("loop", "loop", 1)


def throughput(num_clients, room=ROOM, answer_len=ANSWER_LEN, stream_of=lambda at: at):
    """Prompt tokens per second of one engine that has room for so many requests."""
    num_gpu_blocks = 1 + room * -(-(PROMPT_LEN + answer_len) // 16)
    scenario = load("nopool-16", ["cluster.instances=1", f"engine.num_gpu_blocks={num_gpu_blocks}"])
    run = simulation(scenario, closed_loop(num_clients, 3_072, answer_len, stream_of))
    metrics = metrics_of(run)
    assert (metrics.preemptions > 0) is (room < num_clients)
    return 3_072 * PROMPT_LEN / metrics.simulated_s


def roofline():
    """Prompt tokens per second that an engine computes when it does nothing else: the cheapest full step."""
    step_time = load("nopool-16").step_time
    return 8_192 * PS_PER_S / step_time.step_ps([(0, PROMPT_LEN)] * 8 + [(0, 192)], 0, 0)


def test_throughput_does_not_grow_with_a_crowd_that_does_not_fit():
    """Case S25. Room for about 68 requests, 256 and 1,024 clients, prompts that share nothing."""
    few, many = throughput(256), throughput(1_024)
    assert many < 1.15 * few
    assert max(few, many) < roofline()
    assert throughput(1_024, room=1_100) > 1.15 * few, "with room for all it does grow"
    reused = throughput(256, room=300, answer_len=1, stream_of=lambda at: at % 8)
    assert reused > roofline() > throughput(256, room=300, answer_len=1), "with reuse there is no such bound"


# --- S26 ------------------------------------------------------------------------------------------------------------


def asked_again(num_gpu_blocks, host_bytes):
    """Hit of each of ten prompts that come twice, in the same order, one after the other."""
    builder, length = TraceBuilder(), 8_000
    for at in range(20):
        builder.start(at * 100 * PS_PER_S, None, 0, 0)
        builder.hold(length, 1, [(at % 10, length)], 100 + at, 0)
    settings = [
        "cluster.instances=1",
        f"engine.num_gpu_blocks={num_gpu_blocks}",
        "pool.segment_bytes_per_instance=3e6",
        f"host.cpu_bytes_to_use={host_bytes}",
    ]
    run = simulation(load("pool-16", settings), builder.build("twice", "twice", 1))
    metrics_of(run)
    admitted = Events(run.log).of(Kind.ADMITTED)
    return [(local, external) for local, external in zip(admitted.a.tolist(), admitted.b.tolist(), strict=True)][10:]


def test_what_the_gpu_lost_and_the_host_has_is_a_hit_whatever_the_gpu_has_room_for():
    """Case S26. The host is asked when the GPU has free blocks, too, and the size of the GPU only says who answers."""
    whole = 8_000 // 16 * 16 - 16
    sizes = (600, 1_200, 3_000, 6_000)
    with_host = {size: asked_again(size, host_bytes=20 * 8_000 * 131_072) for size in sizes}
    assert with_host[600] == [(0, whole)] * 10, "all from the host, though all of the GPU is free"
    assert with_host[6_000] == [(whole, 0)] * 10
    assert all(sum(hit) == whole for hits in with_host.values() for hit in hits)
    without = [sum(map(sum, asked_again(size, host_bytes=0))) for size in sizes]
    assert without[0] == 0 < without[-1] == 10 * whole, "without a host the GPU's size is all there is"


# --- S27 ------------------------------------------------------------------------------------------------------------

ROWS = [(0, 700, 5), (1.5, 1_600, 7), (2.000_25, 700, 3), (60, 1_601, 9)]
"""Start in ms, prompt, answer: one with a fraction in microseconds."""


def ids(granule_len):
    """Content ids of the four prompts: the second continues the first, the third repeats it, the fourth the second."""
    return [list(range(-(-length // granule_len))) for _, length, _ in ROWS]


def mooncake_row(start, length, answer, names):
    return {"timestamp": start, "input_length": length, "output_length": answer, "hash_ids": names}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def the_same_four(folder, unit, granule_len):
    """A file whose times count so many ms, with ids of so many tokens."""
    rows = [
        mooncake_row(start / unit, length, answer, names)
        for (start, length, answer), names in zip(ROWS, ids(granule_len), strict=True)
    ]
    if granule_len != 512:
        rows = [{**row, "block_size": granule_len} for row in rows]
    return written(folder / f"{granule_len}-{unit}.jsonl", rows)


@pytest.mark.parametrize(("unit", "in_ms"), [("ms", 1), ("s", 1_000), ("us", 0.001)])
@pytest.mark.parametrize("granule_len", [512, 16])
def test_times_are_the_same_in_every_unit_and_granule(tmp_path, unit, in_ms, granule_len):
    """Case S27. The same requests in ms, in s, with fractions of a microsecond, with ids of 512 and of 16 tokens."""
    trace = load_trace(the_same_four(tmp_path, in_ms, granule_len), time_unit=unit, use_cache=False)
    assert trace.arrival_ps.tolist() == [0, 1_500_000_000, 2_000_250_000, 60_000_000_000]
    assert trace.input_len.tolist() == [length for _, length, _ in ROWS]
    assert trace.granule_len == granule_len


def test_an_impossible_number_of_ids_and_a_unit_that_does_not_fit_are_errors_with_their_line(tmp_path):
    """Case S27. Never a guess."""
    good = the_same_four(tmp_path, 1, 512)
    assert load_trace(good, use_cache=False).arrival_ps[-1] == 60 * PS_PER_MS, "Mooncake's unit is ms"
    lines = [json.loads(line) for line in good.read_text().splitlines()]
    read = partial(load_trace, use_cache=False)
    lines[2]["hash_ids"] = [0]
    with pytest.raises(TraceError, match=r":3: .*ceil\(input_length / 512\)"):
        read(written(tmp_path / "ids.jsonl", lines))
    with pytest.raises(TraceError, match=r":1: .*time unit"):
        read(the_same_four(tmp_path, 1, 16))
    lines[2] = {**lines[1], "timestamp": 1e12}
    with pytest.raises(TraceError, match=r":3: .*timestamp"):
        read(written(tmp_path / "unit.jsonl", lines), time_unit="s")
