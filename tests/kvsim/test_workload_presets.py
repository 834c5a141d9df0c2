"""Scaling run, chat, RAG, long documents: what is published comes out of any seed; prompts share what they should."""

import math
from collections import Counter

import numpy as np
import pytest

from kvcore.errors import InvalidArgument
from kvsim import scenario
from kvsim.config.workload import ChatWorkload, LongDocumentWorkload, RagWorkload
from kvsim.results import scenario_toml
from kvsim.toml import InvalidToml
from kvsim.workload import agentic, chat, long_document, native, rag
from kvsim.workload.chat import Chat
from kvsim.workload.load import load_trace
from kvsim.workload.long_document import LongDocument
from kvsim.workload.quantiles import LogNormal
from kvsim.workload.rag import Rag
from kvsim.workload.source import trace_of
from kvsim.workload.stats import stats
from kvsim.workload.trace import columns_of
from tests.kvsim.command import inside, refused, under_hash_seeds

SEEDS = (0, 1, 2**40)
SHAPES = {
    "scaling": (agentic, agentic.scaling(4), {"gpus": 4}),
    "chat": (chat, Chat(sessions=40, system_len=30), {"sessions": 40, "system_len": 30}),
    "rag": (rag, Rag(requests=30, chunks=50, top_k=3), {"requests": 30, "chunks": 50, "top_k": 3}),
    "long-document": (long_document, LongDocument(documents=5, readers=2), {"documents": 5, "readers": 2}),
}


def equal(left, right):
    return all(np.array_equal(a, b) for a, b in zip(columns_of(left), columns_of(right), strict=True))


def near(value, published, share):
    return abs(value / published - 1) <= share


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_is_a_file_and_a_scenarios_workload_alike(name, tmp_path):
    module, shape, keys = SHAPES[name]
    expected = module.generate(shape, 7)
    path = tmp_path / "trace.jsonl.gz"
    options = [text for key, value in keys.items() for text in (f"--{key.replace('_', '-')}", value)]
    result = inside("trace", "generate", name, *options, "--seed", 7, "--out", path)
    assert (result.returncode, result.stdout) == (0, ""), result
    assert equal(load_trace(path, use_cache=False), expected)
    file = tmp_path / "scenario.toml"
    file.write_text(
        scenario_toml(scenario.load("nopool-16", ["scenario.seed=7"])).partition("[workload]")[0]
        + f'[workload]\ngenerator = "{name}"\n'
        + "".join(f"{key} = {value}\n" for key, value in keys.items())
    )
    config = scenario.load(str(file))
    assert equal(trace_of(config), expected)
    assert equal(trace_of(scenario.load(str(file), ["workload.starts=all_at_once"])), expected)
    again = tmp_path / "again.toml"
    again.write_text(scenario_toml(config))
    assert scenario.load(str(again)) == config


@pytest.mark.parametrize("name", ["chat", "rag", "long-document"])
def test_one_seed_one_trace(name):
    module, shape, _ = SHAPES[name]
    assert equal(module.generate(shape, 3), module.generate(shape, 3))
    assert not equal(module.generate(shape, 3), module.generate(shape, 4))


PROBE = """
from hashlib import sha256
from kvsim.workload import chat, long_document, rag
from kvsim.workload.trace import columns_of
shapes = ((chat, chat.Chat(30)), (rag, rag.Rag(30, 90, top_k=4)), (long_document, long_document.LongDocument(4)))
for module, shape in shapes:
    print(sha256(b"".join(column.tobytes() for column in columns_of(module.generate(shape, 3)))).hexdigest())
"""


def test_one_trace_under_any_hash_seed():
    assert len(under_hash_seeds(PROBE)) == 1


def test_both_sides_have_the_same_names():
    """A scenario's tables have the generators' parameters and no others."""
    for table, shape in ((ChatWorkload, Chat), (RagWorkload, Rag), (LongDocumentWorkload, LongDocument)):
        own = set(table.model_fields) - set(scenario.Mode.model_fields) - {"generator"}
        assert own == set(shape.__dataclass_fields__), table


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("scaling", ("--gpus", 6), "gpus = 6: expected a multiple of 4, as 75 sessions are on 12 GPUs"),
        ("chat", ("--sessions", 0), "sessions = 0: expected 1 <= sessions"),
        ("chat", ("--pause-scale", -1), "pause_scale = -1.0: expected 0 <= pause_scale <= 100"),
        ("rag", ("--top-k", 2_000), "top_k = 2000: expected at most a tenth of 10000 chunks"),
        ("rag", ("--requests", 10**8), "requests = 100000000: expected at most 1000000"),
        ("long-document", ("--length-spread", 3), "length_spread = 3.0: expected 0 to 2.0"),
        ("long-document", ("--pause-s", "nan"), "pause_s = nan: expected questions that span less than"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, name, options, says):
    assert says in refused("trace", "generate", name, "--out", tmp_path / "t", *options)


def test_a_generator_that_is_mistyped_is_named():
    with pytest.raises(InvalidToml, match="did you mean chat"):
        scenario.load("pool-16", ["workload.generator=chatt"])


# --- the scaling run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [12, 24, 36, 48, 60])
def test_the_scaling_run_has_75_sessions_for_12_gpus(gpus):
    shape = agentic.scaling(gpus)
    assert (shape.sessions, shape.turns, shape.delay_s) == (75 * gpus // 12, 30, 0)
    assert shape.input_len(29) + shape.output_len == 116_392


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_chat_has_the_published_turns_lengths_and_pauses(seed):
    trace = chat.generate(Chat(sessions=20_000), seed)
    turns = np.bincount(trace.session)
    assert near(turns.mean(), 2.54, 0.005)
    assert near((turns > 1).mean(), 0.41, 0.005)
    assert 0.02 < (turns > 10).mean() < 0.037, "published 3.7 %: one probability gives both mean and share of singles"
    later = trace.after != np.arange(trace.num_requests)
    held = np.where(later, (trace.input_len + trace.output_len)[trace.after], 500)
    prompts = trace.input_len - held
    assert near(prompts.mean(), 295.58, 0.05) and near(prompts.std(), 1_609.18, 0.35)
    assert near(trace.output_len.mean(), 441.34, 0.01) and near(trace.output_len.std(), 410.91, 0.02)
    p50, p80, p99 = np.percentile(trace.delay_ps[later] / 1e12, (50, 80, 99))
    assert near(p50, 110.6, 0.15) and near(p80, 372.4, 0.10) and near(p99, 2_207, 0.10)


def test_the_check_of_the_lengths_rejects_another_law():
    wrong = LogNormal.of(295.58 * 1.1, 410.91).at(np.random.default_rng(1).standard_normal(50_000))
    assert not near(wrong.mean(), 295.58, 0.05)
    assert not near(wrong.std(), 1_609.18, 0.35)


@pytest.mark.parametrize(("mean", "deviation"), [(441.34, 410.91), (10.0, 1.0)])
def test_two_moments_make_one_lognormal(mean, deviation):
    law = LogNormal.of(mean, deviation)
    assert math.exp(law.log_median + law.spread**2 / 2) == pytest.approx(mean)
    assert mean * math.sqrt(math.expm1(law.spread**2)) == pytest.approx(deviation)


def test_turns_at_the_ends_of_their_law():
    assert chat.turn_counts(np.array([0.0, 0.58, 0.5899, 0.6, 0.85, 0.9999])) == [1, 1, 1, 2, 5, 28]


def test_a_conversation_holds_all_that_was_said_in_it_and_the_system_prompt_of_all():
    trace = chat.generate(Chat(sessions=50, system_len=64), 1)
    for request in range(trace.num_requests):
        (system, start, end), (own, _, _) = trace.segments(request, 16)[:2]
        assert (system, start, end, own) == (0, 0, 4, 1 + trace.session[request])
        before = trace.after[request]
        if before != request:
            assert trace.input_len[request] > trace.input_len[before] + trace.output_len[before]
            assert trace.session[before] == trace.session[request]


# --- RAG --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [100, 10_000, 300_000])
def test_three_percent_of_the_chunks_are_in_sixty_percent_of_the_retrievals(chunks):
    shares = rag.popularity(chunks)
    assert shares.sum() == pytest.approx(1)
    assert shares[: round(0.03 * chunks)].sum() == pytest.approx(0.6, abs=1e-6)
    assert (np.diff(shares) < 0).all()
    ratio = np.log(shares[0] / shares[9]) / np.log(10)
    assert np.log(shares[0] / shares[99 if chunks > 100 else 49]) / np.log(
        100 if chunks > 100 else 50
    ) == pytest.approx(ratio), "Zipf's law is a line in logarithms"


@pytest.mark.parametrize("seed", SEEDS)
def test_retrievals_are_of_different_chunks_and_as_popular_as_the_law_says(seed):
    shape = Rag(requests=3_000, chunks=10_000, top_k=5)
    chosen = rag.retrieved(shape, seed)
    assert chosen.shape == (3_000, 5)
    assert all(len(set(row)) == 5 for row in chosen.tolist())
    assert near((chosen < 300).mean(), 0.60, 0.05), "a little less: the most popular are in a prompt only once"
    uniform = np.random.default_rng(seed).integers(10_000, size=chosen.shape)
    assert not near((uniform < 300).mean(), 0.60, 0.05)


def test_prompts_share_what_they_begin_with_alike():
    shape = Rag(requests=400, chunks=30, chunk_len=32, top_k=3, system_len=16, question_len=16, order="popularity")
    trace, chosen = rag.generate(shape, 1), rag.retrieved(shape, 1).tolist()
    assert trace.input_len.tolist() == [16 + 3 * 32 + 16] * 400
    streams = [trace.segment_stream[5 * i : 5 * i + 5].tolist() for i in range(400)]
    for left in range(0, 400, 7):
        for right in range(left):
            alike = next((k for k in range(3) if chosen[left][k] != chosen[right][k]), 3)
            assert streams[left][: 1 + alike] == streams[right][: 1 + alike]
            assert not set(streams[left][1 + alike :]) & set(streams[right][1 + alike :])


def test_an_order_of_popularity_shares_more_than_one_of_relevance():
    rates = [
        stats(rag.generate(Rag(requests=1_000, order=order), seed))["ideal_hit_rate"]
        for order in ("relevance", "popularity")
        for seed in (1, 2)
    ]
    assert max(rates[:2]) < 0.5 * min(rates[2:])


def test_the_native_format_takes_every_preset(tmp_path):
    """Streams of it are entered at one place, which a reader checks."""
    for module, shape, _ in SHAPES.values():
        path = tmp_path / "t.jsonl"
        path.write_bytes(b"".join(native.lines(module.generate(shape))))
        assert equal(load_trace(path, use_cache=False), module.generate(shape))


# --- long documents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_long_documents_have_the_published_sizes(seed):
    trace = long_document.generate(LongDocument(), seed)
    numbers = stats(trace)
    assert numbers["sessions"] == 105
    assert near(numbers["requests"], 2_410, 0.01)
    assert near(numbers["input_tokens"]["mean"], 21_613, 0.01)
    assert near(numbers["output_tokens"]["mean"], 15.6, 0.05)
    assert near(numbers["call_delay_s"]["mean"], 60, 0.02)
    assert near(numbers["call_delay_s"]["p50"], 60 * math.log(2), 0.03), "exponential"
    firsts = trace.input_len[trace.after == np.arange(trace.num_requests)] - 50
    assert near(np.log(firsts).std(), 0.5, 0.05)
    narrative = long_document.generate(LongDocument(50, 54_747, questions=29, output_len=13), seed)
    assert near(narrative.input_len.mean(), 54_797, 0.02) and near(narrative.num_requests, 1_461, 0.01)


def test_readers_share_a_document_and_nothing_else():
    shape = LongDocument(documents=3, document_len=320, length_spread=0, questions=4, readers=2, question_len=32)
    trace = long_document.generate(shape)
    assert trace.num_sessions == 6
    assert set(trace.input_len.tolist()) == {352}
    documents = Counter(trace.segments(i, 32)[0] for i in range(24))
    assert sorted(documents.values()) == [8, 8, 8]
    assert len({trace.segments(i, 32)[1][0] for i in range(24)}) == 24, "each question is its own"


def test_a_conversation_about_a_document_keeps_what_was_said():
    shape = LongDocument(2, 320, 0.0, 3, 1, 32, output_len=32, keeps="conversation", pause_s=0.0, system_len=64)
    trace = long_document.generate(shape)
    assert trace.input_len.tolist() == [416, 480, 544] * 2
    assert [stream for stream, _, _ in trace.segments(2, 32)] == [0, 1, 3]
    assert trace.after.tolist() == [0, 0, 1, 3, 3, 4]


def test_one_document_after_the_other_is_reused_but_for_its_questions():
    numbers = stats(long_document.generate(LongDocument(documents=20, questions=23)))
    assert near(numbers["ideal_hit_rate"], 22 / 23, 0.01)


@pytest.mark.parametrize("shape", [{"documents": 0}, {"keeps": "all"}, {"document_len": 2**21}])
def test_what_the_caller_gets_wrong(shape):
    with pytest.raises(InvalidArgument):
        LongDocument(**shape)
