"""One real engine in this process, driven by JSON lines: a command on stdin, its answer on stdout, until stdin ends.

The first line is the engine's configuration: {"model", "connector": null | {"name", "module", "extra"}, "options"}.
A command is {"op": NAME, ...} with NAME one of `COMMANDS`; the answer is {"ok": ...} or {"error": traceback}.
"""

import json
import os
import sys
import time
import traceback

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the engine prints goes to stderr
sys.setswitchinterval(0.0002)  # before vLLM: else its loop starves the transfer threads


class Driver:
    def __init__(self, config):
        from vllm import LLM

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
        self.computed = {}
        self._count_computed_tokens()
        self.gets = []
        self.fault = None
        self.decided = []
        if connector and connector["name"] == "KVTwinConnector":
            self._intercept_gets()
            self.scheduler.connector._scheduler.on_closed = self._record_decisions

    def _count_computed_tokens(self):
        schedule = self.scheduler.schedule

        def counted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for request_id, tokens in output.num_scheduled_tokens.items():
                self.computed[request_id] = self.computed.get(request_id, 0) + tokens
            return output

        self.scheduler.schedule = counted

    def _intercept_gets(self):
        """Record the keys of every get, and let `break_gets` decide what becomes of it."""
        from kvconnector.store import MooncakeStore

        from kvcore.ports import StoreOutcome

        get, gets = MooncakeStore.get, self.gets

        def intercepted(store, keys, buffers, deadline_ns):
            gets.append([list(key[1:3]) for key in keys])
            fault = self.fault or {}
            time.sleep(fault.get("delay_s", 0))
            hit = fault.get("entries") or range(len(keys))
            if fault.get("remove"):
                store.remove([keys[index] for index in hit], deadline_ns)
            outcomes = get(store, keys, buffers, deadline_ns)
            for index in hit if "outcome" in fault else ():
                outcomes[index] = StoreOutcome(fault["outcome"])
            return outcomes

        MooncakeStore.get = intercepted

    def break_gets(self, fault):
        """From now on gets have a fault, or with None no more.

        {"remove": true} removes their keys from the pool right before; {"outcome": NAME} replaces their outcomes;
        {"entries": [index, ...]} limits either to some of a get's keys; {"delay_s": S} delays them.
        """
        self.fault = fault
        self.gets.clear()

    def take_gets(self):
        """[group, rank] of the keys of each get since `break_gets`."""
        return list(self.gets)

    def generate(self, prompts, max_tokens):
        """Greedy tokens per prompt (lists of token ids), and for the batch: wall time, tokens computed, hits."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.computed.clear()
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return {
            "wall_s": time.perf_counter() - start,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "computed": sum(self.computed.values()),
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

    def abort_while_loading(self, prompt):
        """Abort a request once its load has begun, and step until everything has been reported."""
        from vllm import SamplingParams

        engine, request_id, before = self.llm.llm_engine, f"aborted {time.monotonic_ns()}", len(self.gets)
        engine.add_request(request_id, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
        while len(self.gets) == before:
            assert engine.has_unfinished_requests(), "finished without a load"
            engine.step()
        engine.abort_request([request_id])
        self.settle()

    def reset_local(self):
        """Forget the engine's own prefix cache; the store keeps what it has."""
        return self.llm.reset_prefix_cache()

    def free_blocks(self):
        """Blocks of the engine's pool that are free."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def settle(self, patience_s=20):
        """Step until every job has been reported; the seconds it took."""
        start = time.perf_counter()
        while self.scheduler.has_requests():
            assert time.perf_counter() - start < patience_s, "jobs are never reported"
            self.llm.llm_engine.step()
        return time.perf_counter() - start

    def sleep(self, seconds):
        time.sleep(seconds)


COMMANDS = (
    "abort_while_loading",
    "generate",
    "reset_local",
    "free_blocks",
    "break_gets",
    "take_gets",
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
