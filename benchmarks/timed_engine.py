"""An engine of the testbed that serves several requests at a time, and says what its connector cost.

Runs in its own process; `bench_connector.py` starts it.
"""

import statistics
import time
from collections import deque
from functools import wraps

from connector.testbed.driver import Driver, greedy, serve

IDLE_S = 0.001
"""What vLLM's own core process sleeps after a step that computed nothing, so that other threads run."""


class Meter:
    """Time the engine's thread spends inside a connector, whichever it is: in its outermost call, both halves.

    Wall time: the clock of a thread's CPU time costs more than most of these calls.
    """

    def __init__(self):
        self.inside = False
        self.took_ns = {}

    def watch(self, connector):
        """Measure every public method of the connector from now on."""
        for name in dir(type(connector)):
            if not name.startswith("_") and callable(getattr(type(connector), name)):
                setattr(connector, name, self._timed(getattr(connector, name), f"{connector.role.name} {name}"))

    def _timed(self, method, name):
        @wraps(method)
        def timed(*args, **kwargs):
            if self.inside:
                return method(*args, **kwargs)
            self.inside = True
            began_ns = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.took_ns.setdefault(name, []).append(time.perf_counter_ns() - began_ns)
                self.inside = False

        return timed

    def total_s(self, part=""):
        """In all calls whose name ends so."""
        return sum(sum(took_ns) for name, took_ns in self.took_ns.items() if name.endswith(part)) / 1e9

    def typical_s(self):
        """The same without what interrupts: as if every call took the median of its method's."""
        return sum(statistics.median(took_ns) * len(took_ns) for took_ns in self.took_ns.values()) / 1e9


class TimedDriver(Driver):
    COMMANDS = (*Driver.COMMANDS, "serve")

    def __init__(self, config):
        super().__init__(config)
        self.meter, self.steps = Meter(), 0
        self._step_as_the_core_process_does()
        if self.scheduler.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.meter.watch(self.scheduler.connector)
            self.meter.watch(get_kv_transfer_group())

    def _step_as_the_core_process_does(self):
        core = self.llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def patient():
            outputs, executed = step()
            self.steps += executed
            if not executed and self.scheduler.has_requests():
                time.sleep(IDLE_S)
            return outputs, executed

        core.step_fn = patient

    def serve(self, prompts, concurrency, max_tokens):
        """Greedy answers, `concurrency` requests at a time: tokens, hits and TTFT per prompt; costs of the batch."""
        self.computed.clear()
        self.granted.clear()
        self.meter.took_ns.clear()
        self.steps = 0
        cpu_s, start_s = time.process_time(), time.perf_counter()
        done, ttft_s = self._run(prompts, concurrency, max_tokens)
        return {
            "wall_s": time.perf_counter() - start_s,
            "cpu_s": time.process_time() - cpu_s,
            "ttft_s": ttft_s,
            "tokens": [list(output.outputs[0].token_ids) for output in done],
            "cached": [output.num_cached_tokens for output in done],
            "granted": sum(self.granted.values()),
            "computed": sum(self.computed.values()),
            "steps": self.steps,
            "connector_s": self.meter.total_s(),
            "connector_typical_s": self.meter.typical_s(),
            "lookup_s": self.meter.total_s("get_num_new_matched_tokens"),
        }

    def _run(self, prompts, concurrency, max_tokens):
        """(last output, time to first token) per prompt."""
        engine, waiting, running = self.llm.llm_engine, deque(range(len(prompts))), {}
        done, ttft_s, began_s = [None] * len(prompts), [None] * len(prompts), {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                number = waiting.popleft()
                request_id = f"{time.monotonic_ns()} {number}"
                running[request_id], began_s[number] = number, time.perf_counter()
                engine.add_request(request_id, {"prompt_token_ids": prompts[number]}, greedy(max_tokens))
            for output in engine.step():
                number = running[output.request_id]
                if ttft_s[number] is None and output.outputs[0].token_ids:
                    ttft_s[number] = time.perf_counter() - began_s[number]
                if output.finished:
                    done[running.pop(output.request_id)] = output
        return done, ttft_s


if __name__ == "__main__":
    serve(TimedDriver)
