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

    def _count_computed_tokens(self):
        schedule = self.scheduler.schedule

        def counted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for request_id, tokens in output.num_scheduled_tokens.items():
                self.computed[request_id] = self.computed.get(request_id, 0) + tokens
            return output

        self.scheduler.schedule = counted

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

    def reset_local(self):
        """Forget the engine's own prefix cache; the store keeps what it has."""
        return self.llm.reset_prefix_cache()

    def free_blocks(self):
        """Blocks of the engine's pool that are free."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def sleep(self, seconds):
        time.sleep(seconds)


COMMANDS = ("generate", "reset_local", "free_blocks", "sleep")


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
