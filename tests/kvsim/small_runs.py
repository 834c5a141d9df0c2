"""Small clusters and traces in which much collides: shared prefixes, tiny caches and budgets, bursts, sessions."""

from dataclasses import dataclass
from itertools import count

from hypothesis import strategies as st

from kvcore.units import div_ceil
from kvsim.clock import PS_PER_US
from kvsim.config.cluster import ROUTINGS
from kvsim.config.pool import ADMISSIONS, EVICTIONS
from kvsim.llm.groups import KVGroup
from kvsim.scenario import load
from kvsim.workload.builder import TraceBuilder


def engine(instances, block_size, cache_len, max_num_seqs, max_num_batched_tokens, watermark):
    """Settings of a scenario whose instances cache `cache_len` tokens, rounded up to blocks."""
    return {
        "cluster.instances": instances,
        "engine.block_size": block_size,
        "engine.num_gpu_blocks": 1 + div_ceil(cache_len, block_size),  # one is the engine's null block
        "engine.max_num_seqs": max_num_seqs,
        "engine.max_num_batched_tokens": max_num_batched_tokens,
        "engine.watermark": watermark,
    }


ENGINES = st.builds(
    engine,
    instances=st.sampled_from([1, 1, 2, 3]),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
    cache_len=st.integers(20, 300),
    max_num_seqs=st.sampled_from([1, 2, 3, 5, 1024, 1024, 1024]),
    max_num_batched_tokens=st.one_of(st.integers(1, 80), st.just(8192)),
    watermark=st.sampled_from([0.0, 0.0, 0.0, 0.04, 0.3]),
)

SIZES = st.fixed_dictionaries(
    {
        "pool.segment_bytes_per_instance": st.sampled_from([10**9, 10**7, 3 * 10**6]),
        "pool.lookup_rtt_us": st.sampled_from([0, 200, 5_000]),
        "pool.lookup_per_key_ns": st.sampled_from([0, 2_400]),
        "pool.lookup_deadline_ms": st.sampled_from([1, 100]),
        "pool.lease_ttl_ms": st.sampled_from([1, 50, 10_000]),
        "link.bandwidth_bytes_per_s": st.sampled_from([10**8, 10**10]),
        "host.cpu_bytes_to_use": st.sampled_from([0, 0, 3 * 10**6, 10**9]),
    }
)
POLICIES = st.fixed_dictionaries(
    {
        "cluster.routing": st.sampled_from(ROUTINGS),
        "pool.eviction": st.sampled_from(EVICTIONS),
        "pool.admission": st.sampled_from(ADMISSIONS),
        "pool.session_pin": st.sampled_from(["none", "none", "soft", "hard"]),
        "pool.session_priority": st.sampled_from([0, 0, [0, 3, 1]]),
        "pool.session_ttl_s": st.sampled_from([1, 1_800]),
        "pool.allow_evict_soft_pinned_objects": st.sampled_from(["true", "false"]),
        "pool.eviction_ratio": st.sampled_from([0.05, 0.5]),
        "pool.offer_ttl_ms": st.sampled_from([1, 50, 4_000]),
        "pool.max_load_attempts": st.sampled_from([1, 2, 3]),
        "pool.max_storing_share": st.sampled_from([0.01, 0.25, 1.0]),
    }
)
BUDGETS = st.sampled_from([{}, {"pool.load_budget_ms": 0}, {"pool.load_budget_ms": 1}, {"pool.load_budget_ms": 30}])
LOADING = st.builds(
    lambda name, budget: {"pool.loading": "in_time" if budget else name} | budget,
    st.sampled_from(["always", "always", "cheaper"]),
    BUDGETS,
)
THREADS = st.sampled_from([{}, {}, {"link.load_threads": 1}, {"link.load_threads": 2, "link.store_threads": 1}])
POOLS = st.builds(
    lambda *settings: {key: value for each in settings for key, value in each.items()},
    SIZES,
    POLICIES,
    LOADING,
    THREADS,
)
"""Settings of a scenario with a pool, and who decides about it."""


@dataclass(frozen=True)
class Ask:
    """One request, told by the earlier ones: every combination of numbers is a valid trace.

    start "fresh": shares nothing. "fork": the first tokens of the prompt of an earlier request, then its own. "turn":
    starts delay_us after an earlier request has completed, and continues its prompt and output.
    """

    start: str = "fresh"
    of: int = 0
    cut: int = 0
    new_len: int = 1
    output_len: int = 1
    gap_us: int = 0
    delay_us: int = 0


LENGTHS = st.one_of(st.integers(0, 70), st.integers(0, 9), st.integers(0, 5).map(lambda n: n * 16))
ASKS = st.lists(
    st.builds(
        Ask,
        start=st.sampled_from(["fresh", "fork", "fork", "turn"]),
        of=st.integers(0, 39),
        cut=LENGTHS,
        new_len=LENGTHS,
        output_len=st.one_of(st.integers(0, 3), LENGTHS),
        gap_us=st.sampled_from([0, 0, 0, 1, 5_000, 20_000, 400_000]),
        delay_us=st.sampled_from([0, 0, 1, 7_000, 100_000]),
    ),
    min_size=1,
    max_size=40,
)


@dataclass(frozen=True)
class Content:
    """(stream, end) of the prompt's segments in tokens, and the stream that what is generated belongs to."""

    prompt: list[tuple[int, int]]
    output_stream: int
    input_len: int
    output_len: int

    def whole(self):
        """The segments of prompt and output."""
        end = self.input_len + self.output_len
        return joined(self.prompt, self.output_stream, end)


def trace_of(asks):
    """The trace that the asks describe."""
    builder, streams, contents = TraceBuilder(), count(), []
    continued, arrival_ps = set(), 0
    for index, ask in enumerate(asks):
        start = ask.start if index else "fresh"
        of = ask.of % index if index else 0
        arrival_ps += ask.gap_us * PS_PER_US
        if start == "turn":
            before = contents[of].whole()
            # The first to continue a lineage keeps its stream, as the readers name it.
            stream = next(streams) if of in continued else contents[of].output_stream
            continued.add(of)
            output_stream = stream
        else:
            before = cut_at(contents[of].prompt, ask.cut) if start == "fork" else []
            stream = output_stream = next(streams)
        input_len = max(1, (before[-1][1] if before else 0) + ask.new_len)
        content = Content(joined(before, stream, input_len), output_stream, input_len, ask.output_len)
        contents.append(content)
        builder.start(arrival_ps, of if start == "turn" else None, ask.delay_us * PS_PER_US, 0)
        builder.hold(input_len, ask.output_len, content.prompt, output_stream, 1)
    return builder.build("small", "asks", 1)


def cut_at(segments, cut):
    """The first `cut` tokens."""
    starts = [0, *(end for _, end in segments)]
    return [(stream, min(end, cut)) for (stream, end), start in zip(segments, starts, strict=False) if start < cut]


def joined(segments, stream, end):
    """The segments, then `stream` up to `end`."""
    last_stream, last_end = segments[-1] if segments else (None, 0)
    if end == last_end:
        return segments
    kept = segments[:-1] if last_stream == stream else segments
    return [*kept, (stream, end)]


def scenario_of(settings, name="nopool-16"):
    """The shipped scenario with these settings."""
    return load(name, [f"{key}={value}" for key, value in settings.items()])


def of_model(scenario, model, retention=0):
    """The scenario with other KV cache groups, all blocks of one size in bytes."""
    engine = scenario.engine.model_copy(update={"prefix_cache_retention_interval": retention})
    scenario = scenario.model_copy(update={"engine": engine})
    for name in ("kv_groups", "kv_model", "block_bytes"):
        scenario.__dict__.pop(name, None)
    scenario.__dict__["kv_groups"] = tuple(KVGroup(spec, 1, 10_000, 10_000, 1) for spec in model.groups)
    return scenario


def events(log):
    """(time_ps, kind, request, a, b) of each event."""
    rows = log.rows.tolist()
    return [tuple(rows[at : at + log.WIDTH]) for at in range(0, len(rows), log.WIDTH)]
