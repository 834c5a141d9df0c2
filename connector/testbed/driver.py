"""One real engine in this process, driven by JSON lines: a command on stdin, its answer on stdout, until stdin ends.

The first line is the engine's configuration: {"model", "connector": null | {"name", "module", "extra", "role"},
"transfer", "options", "forced"}. `transfer` is vLLM's kv_transfer_config itself, in place of a connector; what is
forced is set after vLLM's platform has had its say, by section and name of its configuration.
A command is {"op": NAME, ...} with NAME one of the driver's `COMMANDS`; the answer is {"ok": ...} or {"error":
traceback}.
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
    """What any engine can be asked to do, whatever its connector."""

    COMMANDS = ("generate", "reset_local", "settle")

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
        if transfer := transfer_config(config):
            arguments["kv_transfer_config"] = transfer
        ranks = arguments.get("tensor_parallel_size", 1) > 1
        if ranks:
            from connector.testbed.patience import Patience

            arguments["worker_extension_cls"] = f"{Patience.__module__}.{Patience.__qualname__}"
        self.llm = LLM(**arguments)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        if ranks:
            pause_between_empty_steps(core)
        self.computed, self.granted = {}, {}
        self._count_computed_tokens()
        for connector in self.connectors():
            self._count_granted_tokens(connector)

    def connectors(self):
        """The scheduler halves: none, one, or those of a MultiConnector."""
        connector = self.scheduler.connector
        return [] if connector is None else getattr(connector, "sub_connectors", [connector])

    def _count_computed_tokens(self):
        schedule = self.scheduler.schedule

        def counted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for request_id, tokens in output.num_scheduled_tokens.items():
                self.computed[request_id] = self.computed.get(request_id, 0) + tokens
            return output

        self.scheduler.schedule = counted

    def _count_granted_tokens(self, connector):
        name, update = type(connector).__name__, connector.update_state_after_alloc

        def counted(request, blocks, num_external_tokens):
            self.granted[name] = self.granted.get(name, 0) + num_external_tokens
            return update(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = counted

    def generate(self, prompts, max_tokens, transfers=None):
        """Greedy tokens, hit and time to first token per prompt (lists of token ids).

        For the batch: wall time, tokens computed, and tokens that were to be loaded, by which connector. `transfers`
        has the kv_transfer_params of each prompt, and the answer those that came back.
        """
        self.computed.clear()
        self.granted.clear()
        sampling = [greedy(max_tokens, transfer) for transfer in transfers or [None] * len(prompts)]
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return {
            "wall_s": time.perf_counter() - start,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "ttft_s": [output.metrics and output.metrics.first_token_latency for output in outputs],
            "computed": sum(self.computed.values()),
            "granted": sum(self.granted.values()),
            "granted_by": {name: num_tokens for name, num_tokens in self.granted.items() if num_tokens},
            "transfers": [output.kv_transfer_params for output in outputs],
        }

    def reset_local(self, connector=False):
        """Forget the engine's own prefix cache; unless `connector`, it goes on with what the store has."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def settle(self, patience_s=50):
        """Step until every job has been reported; the seconds it took."""
        start = time.perf_counter()
        while self.scheduler.has_requests():
            assert time.perf_counter() - start < patience_s, "jobs are never reported"
            self.llm.llm_engine.step()
        return time.perf_counter() - start


def transfer_config(config):
    """What vLLM is told of connectors, or None."""
    connector = config.get("connector")
    if not connector:
        return config.get("transfer")
    return {
        "kv_connector": connector["name"],
        "kv_connector_module_path": connector.get("module"),
        "kv_role": connector.get("role", "kv_both"),
        "kv_connector_extra_config": connector.get("extra", {}),
    }


def pause_between_empty_steps(core):
    """As in an engine core with a process of its own: a step that computed nothing leaves the others a millisecond."""
    step = core.step_fn

    def step_and_pause():
        outputs, computed = step()
        if not computed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, computed

    core.step_fn = step_and_pause


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


def greedy(max_tokens, transfer=None):
    """Sampling that gives as many tokens, and the same ones each time; `transfer` is kv_transfer_params."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": transfer} if transfer else None
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra)


def answer(value):
    """One line to whoever asked."""
    ANSWERS.write(json.dumps(value) + "\n")
    ANSWERS.flush()


def serve(make_driver):
    """Make the driver, then carry out one command after another."""
    commands = iter(sys.stdin.readline, "")
    try:
        driver = make_driver(json.loads(next(commands)))
    except BaseException:
        answer({"error": traceback.format_exc()})
        raise
    answer({"ok": "started"})
    for line in commands:
        command = json.loads(line)
        name = command.pop("op")
        try:
            assert name in driver.COMMANDS, name
            answer({"ok": getattr(driver, name)(**command)})
        except Exception:
            answer({"error": traceback.format_exc()})
    os._exit(0)  # the engine's own shutdown is not what anybody times


if __name__ == "__main__":
    serve(Driver)
