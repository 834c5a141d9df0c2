"""One real engine in this process, driven by JSON lines: a command on stdin, its answer on stdout, until stdin ends.

The first line is the engine's configuration: {"model", "connector": null | {"name", "module", "extra"}, "options",
"forced"}; what is forced is set after vLLM's platform has had its say, by section and name of its configuration.
A command is {"op": NAME, ...} with NAME one of `COMMANDS`; the answer is {"ok": ...} or {"error": traceback}.
"""

import json
import os
import random
import sys
import time
import traceback

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the engine prints goes to stderr
sys.setswitchinterval(0.0002)  # before vLLM: else its loop starves the transfer threads


class Driver:
    def __init__(self, config):
        from vllm import LLM

        force(config.get("forced", {}))
        arguments = {
            "model": config["model"],
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
            "max_model_len": 2048,
            "dtype": "float32",
            "disable_log_stats": False,
            **config.get("options", {}),
        }
        connector = config.get("connector")
        if connector:
            arguments["kv_transfer_config"] = {
                "kv_connector": connector["name"],
                "kv_connector_module_path": connector.get("module"),
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector.get("extra", {}),
            }
        self.llm = LLM(**arguments)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.computed, self.num_preemptions = {}, 0
        self._count_computed_tokens()
        self._count_preemptions()
        self.gets, self.faults = [], {}
        self.decided = []
        if connector and connector["name"] == "KVTwinConnector":
            self._intercept("get", self.gets)
            self._intercept("put", [])
            self.scheduler.connector._scheduler.on_closed = self._record_decisions

    def _count_computed_tokens(self):
        schedule = self.scheduler.schedule

        def counted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for request_id, tokens in output.num_scheduled_tokens.items():
                self.computed[request_id] = self.computed.get(request_id, 0) + tokens
            return output

        self.scheduler.schedule = counted

    def _count_preemptions(self):
        preempt = self.scheduler._preempt_request

        def counted(*args, **kwargs):
            self.num_preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def _intercept(self, operation, calls):
        """Record the keys of every get or put, and let `break_gets` or `break_puts` decide what becomes of it."""
        from kvconnector.store import MooncakeStore

        from kvcore.ports import StoreOutcome

        move = getattr(MooncakeStore, operation)

        def intercepted(store, keys, buffers, deadline_ns):
            calls.append([list(key[1:3]) for key in keys])
            fault = self.faults.get(operation) or {}
            time.sleep(fault.get("delay_s", 0))
            while fault.get("hold") and self.faults.get(operation) is fault:
                time.sleep(0.002)
            hit = fault.get("entries") or range(len(keys))
            if fault.get("remove"):
                store.remove([keys[index] for index in hit], deadline_ns)
            outcomes = move(store, keys, buffers, deadline_ns)
            for index in hit if "outcome" in fault else ():
                outcomes[index] = StoreOutcome(fault["outcome"])
            return outcomes

        setattr(MooncakeStore, operation, intercepted)

    def break_gets(self, fault):
        """From now on gets have a fault, or with None no more.

        {"remove": true} removes their keys from the pool right before; {"outcome": NAME} replaces their outcomes;
        {"entries": [index, ...]} limits either to some of a get's keys; {"delay_s": S} delays them;
        {"hold": true} lets none go on until the next call of this.
        """
        self.faults["get"] = fault
        self.gets.clear()

    def break_puts(self, fault):
        """The same for puts."""
        self.faults["put"] = fault

    def take_gets(self):
        """[group, rank] of the keys of each get since `break_gets`."""
        return list(self.gets)

    def generate(self, prompts, max_tokens):
        """Greedy tokens per prompt (lists of token ids), and for the batch: wall time, tokens computed, hits."""
        self.computed.clear()
        num_preemptions, start = self.num_preemptions, time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(max_tokens), use_tqdm=False)
        return {
            "wall_s": time.perf_counter() - start,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "computed": sum(self.computed.values()),
            "preemptions": self.num_preemptions - num_preemptions,
        }

    def _record_decisions(self, request, machine):
        made = machine.decisions
        self.decided.append(
            {
                "local_hit_len": made.local_hit_len,
                "external_hit_len": made.external_hit_len,
                "granted_len": made.granted_len,
                "loaded": self._keys(request, made.loaded),
                "stored": self._keys(request, made.stored),
            }
        )

    def _keys(self, request, blocks):
        """(group, block hash in hex) of runs of blocks; the tests' models hash in their own block size."""
        return [
            (group, request.block_hashes[block].hex())
            for group, runs in enumerate(blocks)
            for start, end in runs
            for block in range(start, end)
        ]

    def decisions(self):
        """What was decided for the requests that are closed, since the last call."""
        decided, self.decided = self.decided, []
        return decided

    def begin_load(self, prompt, max_tokens=16):
        """Step until the prompt's load has begun; the id of its request, for `finish`."""
        before = len(self.gets)
        (request_id,) = self._begin([prompt], max_tokens)
        while len(self.gets) == before:
            assert self.llm.llm_engine.has_unfinished_requests(), "finished without a load"
            self.llm.llm_engine.step()
        return request_id

    def finish(self, request_id):
        """The tokens of the request that was begun."""
        return self._finish([request_id])[0]

    def abort_while_loading(self, prompt):
        """Abort a request once its load has begun, and step until everything has been reported."""
        self.llm.llm_engine.abort_request([self.begin_load(prompt)])
        self.settle()

    def abort_storm(self, prompts, doomed, seed, max_tokens):
        """Begin the prompts at any time, and abort the doomed ones at any time; the tokens of those that ended."""
        engine, rng, waiting, begun = self.llm.llm_engine, random.Random(seed), list(range(len(prompts))), {}
        doomed, tokens = set(doomed), [None] * len(prompts)
        while waiting or engine.has_unfinished_requests():
            if waiting and rng.random() < 0.5:
                number = waiting.pop()
                (begun[number],) = self._begin([prompts[number]], max_tokens)
            aborted = [number for number in doomed & begun.keys() if rng.random() < 0.05]
            doomed.difference_update(aborted)
            engine.abort_request([begun[number] for number in aborted])
            ended = {output.request_id: output for output in engine.step() if output.finished}
            for number in begun:
                if begun[number] in ended:
                    tokens[number] = list(ended[begun[number]].outputs[0].token_ids)
        return tokens

    def _begin(self, prompts, max_tokens):
        """The ids of the prompts' requests, which wait for the engine's next step."""
        request_ids = [f"{time.monotonic_ns()} {number}" for number in range(len(prompts))]
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, greedy(max_tokens))
        return request_ids

    def _finish(self, request_ids):
        """Step until the engine has nothing to do; the tokens of each request."""
        outputs = {}
        while self.llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in self.llm.llm_engine.step() if output.finished}
        return [list(outputs[request_id].outputs[0].token_ids) for request_id in request_ids]

    def reset_local(self, connector=False):
        """Forget the engine's own prefix cache; unless `connector`, it goes on with what the store has."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def reset_under_requests(self, prompts, max_tokens, after_steps, quiet):
        """Take the blocks of all running requests away; whether that worked, and the tokens.

        That is after as many steps as have computed something, and if `quiet` once no load or store is under way.
        """
        engine, request_ids = self.llm.llm_engine, self._begin(prompts, max_tokens)
        while after_steps > 0:
            self.computed.clear()
            engine.step()
            after_steps -= bool(self.computed)
        while quiet and self.scheduler.connector.has_pending_push_work():
            time.sleep(0.02)  # rather than hurry through the decode steps
            engine.step()
        assert self.scheduler.running, "nothing to take away"
        try:
            worked = self.llm.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:  # what vLLM says when it got its blocks not back
            worked = False
        return worked, self._finish(request_ids)

    def outcomes(self):
        """Blocks loaded and stored so far, by outcome."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        return {
            name: {outcome.value: count for outcome, count in thread.outcomes.items()}
            for name, thread in (("load", worker._loads), ("store", worker._stores))
        }

    def metrics(self):
        """The connector's samples in vLLM's Prometheus registry: {"name{values of its own labels}": value}."""
        from prometheus_client import REGISTRY

        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        ours = [sample for sample in samples if sample.name.startswith("vllm:kvtwin_")]
        return {name_of(sample): sample.value for sample in ours if not sample.name.endswith("_created")}

    def free_blocks(self):
        """Blocks of the engine's pool that are free."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def settle(self, patience_s=50):
        """Step until every job has been reported; the seconds it took."""
        start = time.perf_counter()
        while self.scheduler.has_requests():
            assert time.perf_counter() - start < patience_s, "jobs are never reported"
            self.llm.llm_engine.step()
        return time.perf_counter() - start

    def sleep(self, seconds):
        time.sleep(seconds)


def force(sections):
    """Settings that vLLM's CPU platform overrides, though the engine can do them."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_force(platform, config):
        check(platform, config)
        for section, settings in sections.items():
            for name, value in settings.items():
                setattr(getattr(config, section), name, value)

    CpuPlatform.check_and_update_config = classmethod(check_and_force)


def name_of(sample):
    own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
    return f"{sample.name.removeprefix('vllm:kvtwin_')}{{{','.join(own)}}}"


def greedy(max_tokens):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


COMMANDS = (
    "abort_storm",
    "abort_while_loading",
    "begin_load",
    "finish",
    "generate",
    "reset_local",
    "reset_under_requests",
    "free_blocks",
    "break_gets",
    "break_puts",
    "take_gets",
    "outcomes",
    "metrics",
    "settle",
    "sleep",
    "decisions",
)


def answer(value):
    ANSWERS.write(json.dumps(value) + "\n")
    ANSWERS.flush()


def main():
    commands = iter(sys.stdin.readline, "")
    try:
        driver = Driver(json.loads(next(commands)))
    except BaseException:
        answer({"error": traceback.format_exc()})
        raise
    answer({"ok": "started"})
    for line in commands:
        command = json.loads(line)
        name = command.pop("op")
        try:
            assert name in COMMANDS, name
            answer({"ok": getattr(driver, name)(**command)})
        except Exception:
            answer({"error": traceback.format_exc()})
    os._exit(0)  # the engine's own shutdown is not what the tests time


if __name__ == "__main__":
    main()
