"""The connector beside the one that ships in vLLM, on real engines and a real store, in one run.

    python -m benchmarks.bench_connector [--model qwen3|gemma3] [--repetitions N] [--json PATH]

Five engines with a tiny model on this machine's CPU: without a connector, and with this one and vLLM's
MooncakeStoreConnector, each as it is by default and at its best (this one: no loads that take longer than computing;
that one: lookups off the scheduler's thread, answers stored). All get the same prompts; what is measured is measured on
one after another, in an order that changes with each repetition, so that whatever else the machine does hits all.
Counts (keys asked, tokens hit) are exact. Times are medians with quartiles, and ratios to the in-tree connector at its
best those of medians, with the interval in which 90 % of them lie when repetitions are drawn anew.
"""

import argparse
import json
import os
import random
import re
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from connector.testbed import processes
from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model

NONE, OURS, OURS_BEST = "no connector", "kvtwin", "kvtwin, best"
THEIRS, THEIRS_BEST = "in-tree", "in-tree, best"
PATIENT = {"lookup_deadline_ms": 5_000}
"""A deadline that a busy machine keeps, too: theirs waits as long as it takes."""
RATES = {"prefill_ns_per_token": 60_000, "bandwidth_bytes_per_s": 230_000_000, "latency_us": 4_000}
"""As this benchmark found itself (docs/CONNECTOR_BENCHMARK.md): by misses of 6,144 tokens, and hits of two lengths."""
OURS_EXTRA = {OURS: PATIENT, OURS_BEST: {**PATIENT, "loading": "cheaper", **RATES, "namespace": {"settings": "best"}}}
CONNECTORS = {
    NONE: None,
    **{
        name: {"name": "KVTwinConnector", "module": "kvconnector.connector", "extra": extra}
        for name, extra in OURS_EXTRA.items()
    },
    THEIRS: {"name": "MooncakeStoreConnector", "extra": {"cache_prefix": "default"}},
    THEIRS_BEST: {
        "name": "MooncakeStoreConnector",
        "extra": {"cache_prefix": "best", "lookup_async": True, "save_decode_cache": True, "lookup_rpc_port": 1},
    },
}

LONG_LEN, SHORT_LEN, ANSWER_LEN, MESSAGE_LEN, NUM_TURNS = 6_144, 1_024, 32, 64, 4
CONCURRENCY, NUM_REQUESTS, DECODE_LEN = 8, 16, 64
OPTIONS = {"max_model_len": 8_192, "max_num_batched_tokens": 2_048}
CHANGES = {"max_position_embeddings": 8_192}


class TimedEngine(processes.Engine):
    """See timed_engine.py for its further commands."""

    driver = Path(__file__).with_name("timed_engine.py")

    def serve(self, prompts, max_tokens, concurrency=1):
        """When this returns, all stores have ended; their time is not counted."""
        answer = self.call("serve", 300, prompts=prompts, concurrency=concurrency, max_tokens=max_tokens)
        self.call("settle")
        return answer

    def forget(self):
        """As another engine that shares the pool would be: without a cache of its own."""
        assert self.call("reset_local")


@dataclass
class Bench:
    """Engines by contestant, and what was measured: by quantity and contestant one value for each repetition."""

    pool: Pool
    engines: dict
    values: dict = field(default_factory=dict)

    def note(self, quantity, contestant, value):
        self.values.setdefault(quantity, {}).setdefault(contestant, []).append(value)

    def keys_asked(self):
        """By anybody, since the master started."""
        return int(re.search(r"^master_batch_exist_key_items_total (\d+)", self.pool.master.http("metrics"), re.M)[1])

    def each(self, rng, measure):
        """Let every contestant do it, in any order; what it said must be the same."""
        order = list(self.engines)
        rng.shuffle(order)
        said = {name: measure(name, self.engines[name]) for name in order}
        assert all(tokens == said[NONE] for tokens in said.values()), "answers differ"

    def repetition(self, number):
        rng = random.Random(number)
        long, words = _words(rng, LONG_LEN), [_words(rng, MESSAGE_LEN) for _ in range(NUM_TURNS)]
        first, second, *short = [_words(rng, SHORT_LEN) for _ in range(2 + NUM_REQUESTS)]
        decoding = [_words(rng, 64) for _ in range(CONCURRENCY)]
        self.each(rng, lambda *who: self._single(*who, "miss", long))
        for _ in range(3):
            self.each(rng, lambda *who: self._single(*who, "hit in the own cache", long))
            self.each(rng, lambda *who: self._single(*who, "hit in the pool", long, forget=True))
        self.each(rng, lambda *who: self._conversation(*who, "elsewhere", first, words))
        self.each(rng, lambda *who: self._conversation(*who, "at home", second, words))
        self.each(rng, lambda *who: self._many(*who, "misses", short))
        self.each(rng, lambda *who: self._many(*who, "hits in the pool", short))
        self.each(rng, lambda *who: self._decode(*who, decoding))
        self.pool.empty()

    def _single(self, name, engine, what, prompt, forget=False):
        if forget:
            engine.forget()
        before = self.keys_asked()
        answer = engine.serve([prompt], ANSWER_LEN)
        self.note(f"TTFT, {what}, ms", name, answer["ttft_s"][0] * 1e3)
        self.note(f"keys asked, {what}", name, self.keys_asked() - before)
        self.note(f"hit, {what}, tokens", name, answer["cached"][0])
        self.note(f"scheduler held by the lookup, {what}, ms", name, answer["lookup_s"] * 1e3)
        return answer["tokens"]

    def _conversation(self, name, engine, where, said, words):
        """`where` the next turn goes to: to another engine, or to the one that has it in its own cache."""
        before, ttft_s, cached, tokens, lengths = self.keys_asked(), [], 0, [], 0
        for message in words:
            if where == "elsewhere":
                engine.forget()
            answer = engine.serve([said], ANSWER_LEN)
            ttft_s.append(answer["ttft_s"][0])
            cached, lengths = cached + answer["cached"][0], lengths + len(said)
            tokens += answer["tokens"]
            said = said + answer["tokens"][0] + message
        self.note(f"TTFT, next turn {where}, ms", name, statistics.mean(ttft_s[1:]) * 1e3)
        self.note(f"keys asked, {NUM_TURNS} turns {where}", name, self.keys_asked() - before)
        self.note(f"hits, {NUM_TURNS} turns {where}, tokens of {lengths:,}", name, cached)
        return tokens

    def _many(self, name, engine, what, prompts):
        engine.forget()
        before = self.keys_asked()
        answer = engine.serve(prompts, ANSWER_LEN, CONCURRENCY)
        self.note(f"time per request, {CONCURRENCY} at a time, {what}, ms", name, answer["wall_s"] / len(prompts) * 1e3)
        self.note(f"TTFT, {CONCURRENCY} at a time, {what}, ms", name, statistics.median(answer["ttft_s"]) * 1e3)
        self.note(f"process CPU per request, {what}, ms", name, answer["cpu_s"] / len(prompts) * 1e3)
        self.note(f"connector on the engine's thread, per request, {what}, ms", name, self._per_request_ms(answer))
        self.note(f"keys asked, {len(prompts)} requests, {what}", name, self.keys_asked() - before)
        self.note(f"hits, {len(prompts)} requests, {what}, tokens", name, sum(answer["cached"]))
        return answer["tokens"]

    @staticmethod
    def _per_request_ms(answer):
        return answer["connector_typical_s"] / len(answer["ttft_s"]) * 1e3

    def _decode(self, name, engine, prompts):
        engine.forget()
        answer = engine.serve(prompts, DECODE_LEN, CONCURRENCY)
        self.note("step of 8 decoding requests, ms", name, answer["wall_s"] / answer["steps"] * 1e3)
        self.note("connector in such a step, us", name, answer["connector_typical_s"] / answer["steps"] * 1e6)
        return answer["tokens"]


def _words(rng, length):
    return [rng.randrange(3, 1_024) for _ in range(length)]


def table(values):
    """Markdown: a row for each quantity."""
    titles = ["", *CONNECTORS, *(f"{name} / {THEIRS_BEST}" for name in (OURS, OURS_BEST))]
    rows = [titles, ["---"] * len(titles)]
    for quantity, by_name in values.items():
        ratios = [ratio(by_name[name], by_name[THEIRS_BEST]) for name in (OURS, OURS_BEST)]
        rows.append([quantity, *(shown(by_name[name]) for name in CONNECTORS), *ratios])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown(series):
    """Median and quartiles; one number when all are equal."""
    if min(series) == max(series):
        return f"{series[0]:,.0f}"
    digits = 2 if statistics.median(series) < 10 else 1 if statistics.median(series) < 1_000 else 0
    low, middle, high = (f"{mark:,.{digits}f}" for mark in quartiles(series))
    return f"{middle} ({low}-{high})"


def ratio(ours, theirs):
    """Of the medians, and where 90 % of these ratios lie when the pairs are drawn anew."""
    if not any(theirs):
        return "-"
    pairs, rng = np.array([ours, theirs]), np.random.default_rng(0)
    drawn = np.median(pairs[:, rng.integers(0, len(ours), (2_000, len(ours)))], axis=2)
    low, high = np.quantile(drawn[0] / drawn[1], [0.05, 0.95])
    middle = np.median(pairs[0]) / np.median(pairs[1])
    return f"{middle:.2f}" if low == high else f"{middle:.2f} ({low:.2f}-{high:.2f})"


def quartiles(series):
    return statistics.quantiles(series, n=4) if len(series) > 1 else series * 3


def start(ended, folder, model_name):
    """The bench, all engines up; `ended` ends everything."""
    # A lease that outlives everything: theirs fails a request whose lease runs out.
    pool = Pool(folder, segment_bytes=1 << 30, flags=("--default_kv_lease_ttl=60000",))
    ended.callback(pool.kill)
    model = write_tiny_model(model_name, folder / "model", changes=CHANGES)
    engines = {}
    for number, (name, connector) in enumerate(CONNECTORS.items()):
        config = {"model": model, "connector": connector, "options": OPTIONS}
        environment = {**pool.environment(), "VLLM_RPC_BASE_PATH": str(folder), "TMPDIR": str(folder)}
        engines[name] = TimedEngine(config, folder / f"{number}.log", environment)
        ended.callback(engines[name].kill)
        if connector is None:
            engines[name].ready()  # it compiles for all
    return Bench(pool, {name: engine.ready() for name, engine in engines.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3", choices=["qwen3", "gemma3"])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write every value there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        bench = start(ended, Path(folder), arguments.model)
        bench.repetition(0)  # connections, caches
        bench.values.clear()
        for number in range(1, arguments.repetitions + 1):
            bench.repetition(number)
            print(f"{number}: load average {os.getloadavg()[0]:.1f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.values))
    print(f"\n{arguments.model}\n\n{table(bench.values)}")


if __name__ == "__main__":
    main()
