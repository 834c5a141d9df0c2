"""The testbed's driver with what only tests need: faults on order, aborts and resets at any time, what was decided."""

import random
import time

from connector.testbed.driver import Driver, greedy, serve


class FaultyDriver(Driver):
    COMMANDS = (
        *Driver.COMMANDS,
        "abort_storm",
        "abort_while_loading",
        "begin_load",
        "finish",
        "reset_under_requests",
        "free_blocks",
        "break_gets",
        "break_puts",
        "take_gets",
        "outcomes",
        "metrics",
        "sleep",
        "decisions",
    )

    def __init__(self, config):
        super().__init__(config)
        self.num_preemptions = 0
        self._count_preemptions()
        self.gets, self.faults = [], {}
        self.decided = []
        if (config.get("connector") or {}).get("name") == "KVTwinConnector":
            self._intercept("get", self.gets)
            self._intercept("put", [])
            self.scheduler.connector._scheduler.on_closed = self._record_decisions

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
        """With the preemptions that the batch cost."""
        before = self.num_preemptions
        answer = super().generate(prompts, max_tokens)
        return answer | {"preemptions": self.num_preemptions - before}

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

    def sleep(self, seconds):
        time.sleep(seconds)


def name_of(sample):
    own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
    return f"{sample.name.removeprefix('vllm:kvtwin_')}{{{','.join(own)}}}"


if __name__ == "__main__":
    serve(FaultyDriver)
