"""Hit-rate curves: equal to the published rule token for token, and one pass equal to a cache per capacity."""

import json
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.eviction.fifo import Fifo
from kvcore.eviction.lru import Lru
from kvcore.eviction.policy import Order
from kvsim.hits import CURVES, Accesses, CapacityHits, hits, replayed
from kvsim.workload import mooncake
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.prefix_tree import PrefixTree
from tests.kvcore.oracle_opt import OracleOpt
from tests.support import PROJECT, shared_data

GRANULE_LEN = 4


def trace_of(prompts, last_lens=()):
    """A trace of prompts given as ids; the last block of prompt i holds last_lens[i] tokens, where given."""
    streams = count()
    tree, builder = PrefixTree(streams), TraceBuilder()
    for index, ids in enumerate(prompts):
        input_len = len(ids) * GRANULE_LEN - (GRANULE_LEN - last_lens[index] if last_lens else 0)
        runs = tree.follow(np.array(ids, dtype=np.uint64))
        segments = [(stream, min(end * GRANULE_LEN, input_len)) for stream, end in runs]
        builder.start(0, None, 0, index)
        builder.hold(input_len, 1, segments, next(streams), num_granules=len(ids))
    return builder.build("test", "test", GRANULE_LEN)


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=25)


def seen_before(requests):
    """Per request, its leading blocks that an earlier one had with the same prefix."""
    known: set[tuple[int, ...]] = set()
    found = []
    for ids in requests:
        paths = [ids[: i + 1] for i in range(len(ids))]
        found.append(sum(path in known for path in paths))
        known.update(paths)
    return found


@given(prompts)
def test_one_pass_gives_what_a_cache_of_every_capacity_gives(requests):
    accesses = Accesses(trace_of(requests))
    capacities_blocks = range(1, accesses.num_blocks + 2)
    at_once, one_by_one = CURVES["lru"], replayed(Lru)
    for left, right in zip(at_once(accesses, capacities_blocks), one_by_one(accesses, capacities_blocks), strict=True):
        assert left.tolist() == right.tolist()
    assert accesses.seen.blocks_within(accesses.num_blocks).tolist() == seen_before(requests)


def oracle(accesses):
    """The clairvoyant policy, told every coming use of a block."""
    uses = [key for prompt in accesses.prompts() for key in prompt]
    return replayed(lambda: OracleOpt(uses))


@given(prompts)
def test_the_clairvoyant_bound_on_runs_is_the_one_on_blocks(requests):
    accesses = Accesses(trace_of(requests))
    capacities_blocks = range(1, accesses.num_blocks + 2)
    on_runs, on_blocks = CURVES["opt"], oracle(accesses)
    for left, right in zip(on_runs(accesses, capacities_blocks), on_blocks(accesses, capacities_blocks), strict=True):
        assert left.tolist() == right.tolist()


def test_that_comparison_rejects_a_policy_that_does_not_know_what_comes():
    accesses = Accesses(trace_of([(0, 0, 0), (0, 1), (0, 0, 0), (0, 2), (0, 0, 0)]))
    assert not np.array_equal(*(list(curve(accesses, [2, 3])) for curve in (CURVES["opt"], replayed(Lru))))


class RootFirstLru(Lru[int]):
    order = Order.ROOT_FIRST


@pytest.mark.parametrize("wrong", [RootFirstLru, Fifo])
def test_the_comparison_rejects_another_policy_and_the_other_order(wrong):
    accesses = Accesses(trace_of([(0, 0, 0), (0, 1), (0, 0, 0), (0, 2), (0, 0, 0)]))
    curves = (list(curve(accesses, [2, 3])) for curve in (CURVES["lru"], replayed(wrong)))
    assert not np.array_equal(*curves)


@given(prompts)
def test_prompts_name_blocks_by_their_whole_prefix(requests):
    paths = [[ids[: i + 1] for i in range(len(ids))] for ids in requests]
    names: dict[tuple[int, ...], int] = {}
    for keys, own in zip(Accesses(trace_of(requests)).prompts(), paths, strict=True):
        assert len(keys) == len(own)
        assert all(names.setdefault(path, key) == key for path, key in zip(own, keys, strict=True))
    assert len(set(names.values())) == len(names)


@given(prompts, st.data())
def test_depth_never_falls_along_a_prompt_and_no_policy_beats_the_oracle(requests, data):
    last_lens = [data.draw(st.integers(1, GRANULE_LEN)) for _ in requests]
    trace = trace_of(requests, last_lens)
    report = hits(trace, [1, 2, 4, 8], list(CURVES)).to_json()
    assert json.loads(json.dumps(report)) == report
    curves = {name: [point["hit_tokens"] for point in points] for name, points in report["policies"].items()}
    assert curves["lru"] == sorted(curves["lru"])
    assert all(low <= report["infinite"]["hit_tokens"] for low in curves["opt"])
    seen = Accesses(trace).seen
    same_request = seen.request[1:] == seen.request[:-1]
    rise = seen.depth_blocks[1:] - (seen.depth_blocks + seen.end - seen.start)[:-1]
    assert (rise[same_request] >= 0).all()


def test_a_partial_last_block_counts_its_own_tokens_and_the_last_half_starts_in_the_middle():
    trace = trace_of([(1, 2), (1, 2), (1, 2, 3)], last_lens=[2, 2, 1])
    report = hits(trace, [2, 10])
    assert report.to_json() == {
        "requests": 3,
        "total_tokens": 6 + 6 + 9,
        "last_half_tokens": 6 + 9,
        "infinite": {"hit_tokens": 6 + 8, "last_half_hit_tokens": 6 + 8},
        "policies": {
            "lru": [
                {"capacity_blocks": 2, "hit_tokens": 14, "last_half_hit_tokens": 14},
                {"capacity_blocks": 10, "hit_tokens": 14, "last_half_hit_tokens": 14},
            ]
        },
    }


class Mru(Lru[int]):
    """The key used last leaves."""

    def evict(self):
        return self._keys.popitem(last=True)[0]


def test_a_new_policy_is_one_entry():
    trace = trace_of([(1,), (2,), (3,), (1,), (2,)])
    report = hits(trace, [2], ["mru", "lru"], {**CURVES, "mru": replayed(Mru)})
    assert report.policies["lru"] == (CapacityHits(0, 0, 2),)
    assert report.policies["mru"] == (CapacityHits(2 * GRANULE_LEN, 2 * GRANULE_LEN, 2),)


def test_what_the_caller_gets_wrong():
    trace = trace_of([(1,)])
    with pytest.raises(InvalidArgument, match="policy = 'mru': expected one of lru, fifo, leaf, session, opt"):
        hits(trace, [1], ["mru"])
    with pytest.raises(InvalidArgument, match="capacity_blocks = 0: expected at least 1"):
        hits(trace, [5, 0])


def test_nothing_reused_and_nothing_named():
    assert hits(trace_of([(1,), (2,)]), [1], list(CURVES)).infinite.hit_tokens == 0
    nameless = generate(Agentic(sessions=2, turns=1, common_len=0, first_len=10))
    assert hits(nameless, [1], list(CURVES)).to_json()["infinite"] == {"hit_tokens": 0, "last_half_hit_tokens": 0}


# --- recorded traces --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation():
    return mooncake.read(shared_data("mooncake_conversation_trace.jsonl.gz"))


def test_lru_on_the_conversation_trace_is_exact(conversation):
    oracle = json.loads(shared_data("oracle_lru_conversation.json").read_text())
    report = hits(conversation, [row["cap"] for row in oracle["rows"]]).to_json()
    assert (report["requests"], report["total_tokens"]) == (oracle["requests"], oracle["total_tokens"])
    assert report["last_half_tokens"] == oracle["last_half_tokens"]
    assert report["infinite"] == {"hit_tokens": 54_098_411, "last_half_hit_tokens": 27_038_068}
    assert report["policies"]["lru"] == [
        {
            "capacity_blocks": row["cap"],
            "hit_tokens": row["whole_hit_tokens"],
            "last_half_hit_tokens": row["last_half_hit_tokens"],
        }
        for row in oracle["rows"]
    ]


def test_fifo_and_the_oracle_on_the_conversation_trace_are_exact(conversation):
    """FIFO's number is given with the oracle file; OPT's at 5,000 blocks is kvcache-simulator 0.1.3's `optimal`."""
    report = hits(conversation, [20_000], ["fifo"])
    assert report.policies["fifo"][0].last_half_hit_tokens == 18_136_580
    opt = hits(conversation, [5_000, 20_000], ["opt"])
    assert opt.policies["opt"][0].last_half_hit_tokens == 24_669_143
    assert opt.policies["opt"][1].hit_tokens == opt.infinite.hit_tokens == 54_098_411


def test_three_million_tokens_reach_less_than_half_of_what_is_ideal_and_fifty_nearly_all(conversation):
    """As Mooncake's paper says of local caches (FAST 2025), of whose traces this is one."""
    report = hits(conversation, [tokens // 512 for tokens in (3_000_000, 50_000_000)])
    small, large = (curve.hit_tokens / report.infinite.hit_tokens for curve in report.policies["lru"])
    assert small == pytest.approx(0.371, abs=5e-4) and large == pytest.approx(0.992, abs=5e-4)


@pytest.mark.slow
def test_what_returns_is_worth_more_than_what_is_new_on_the_conversation_trace(conversation):
    """Of a small cache; and by content alone, as the trace names no sessions."""
    curves = hits(conversation, [5_000], ["lru", "leaf", "session", "opt"]).policies
    lru, leaf, session, opt = (curves[name][0].hit_tokens for name in ("lru", "leaf", "session", "opt"))
    assert lru == leaf == 16_505_817
    assert 1.4 * lru < session < opt


PROBE = """
import json, sys
from kvsim.hits import hits
from kvsim.workload.load import load_trace
report = hits(load_trace(sys.argv[1], use_cache=False), [1, 3], ["lru", "fifo", "opt"]).to_json()
heavy = [name for name in ("simpy", "pyarrow", "pydantic", "rich") if name in sys.modules]
print(json.dumps([report, heavy]))
"""


def test_one_result_under_any_hash_seed_and_a_light_import(tmp_path):
    rows = [
        {"timestamp": i, "input_length": 1200, "output_length": 1, "hash_ids": [i % 3, 9, i % 2]} for i in range(40)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", PROBE, path]
    results = [
        subprocess.run(command, env={"PYTHONHASHSEED": seed}, cwd=PROJECT, capture_output=True, text=True, check=True)
        for seed in ("1", "4242")
    ]
    assert results[0].stdout == results[1].stdout
    report, heavy = json.loads(results[0].stdout)
    assert report["infinite"]["hit_tokens"] == (40 - 6) * 1200 + 3 * 1024
    assert heavy == []
