"""The testbed's driver with what only tests need: faults on order, aborts and resets at any time, what was decided."""

import random
import time

from connector.testbed.driver import Driver, greedy, serve
from tests.e2e.faulty_client import Faults, faulty


class FaultyDriver(Driver):
    COMMANDS = (
        *Driver.COMMANDS,
        "abort_storm",
        "abort_while_loading",
        "abort_after_steps",
        "begin_load",
        "finish",
        "reset_under_requests",
        "free_blocks",
        "order_faults",
        "calls",
        "promise",
        "wrong_tables",
        "longest_step_s",
        "namespace",
        "outcomes",
        "keep_pace",
        "metrics",
        "sleep",
        "decisions",
    )

    def __init__(self, config):
        self.faults = Faults()
        if config.get("connector"):
            self._make_clients_faulty()
        super().__init__(config)
        self.num_preemptions = 0
        self._count_preemptions()
        self.step_s = 0.0
        self._time_steps()
        self.decided, self.tables, self.received = [], [], []
        if (config.get("connector") or {}).get("name") == "KVTwinConnector":
            self.half = self.scheduler.connector._scheduler
            self.half.on_closed = self._record_decisions
            self._compare_tables()

    def _make_clients_faulty(self):
        import mooncake.store

        mooncake.store.MooncakeDistributedStore = faulty(mooncake.store.MooncakeDistributedStore, self.faults)

    def _count_preemptions(self):
        preempt = self.scheduler._preempt_request

        def counted(*args, **kwargs):
            self.num_preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def _time_steps(self):
        step = self.llm.llm_engine.step

        def timed():
            start = time.perf_counter()
            try:
                return step()
            finally:
                self.step_s = max(self.step_s, time.perf_counter() - start)

        self.llm.llm_engine.step = timed

    def longest_step_s(self):
        """What the longest step since the last call took."""
        longest_s, self.step_s = self.step_s, 0.0
        return longest_s

    def _compare_tables(self):
        """What each job reads or writes, beside the table that the engine has for its request in this step."""
        build = self.half.build_connector_meta

        def compared(output):
            metadata = build(output)
            for job in (*metadata.loads, *metadata.stores):
                if job.request_id in self.scheduler.requests:
                    table = self.scheduler.kv_cache_manager.get_block_ids(job.request_id)
                    named = [(entry.block_id, table[entry.group][entry.position]) for entry in job.entries]
                    self.tables.append([job.request_id, *named] if any(ours != its for ours, its in named) else None)
            return metadata

        self.half.build_connector_meta = compared

    def wrong_tables(self):
        """(jobs compared since the last call, those with blocks that are not their request's)."""
        tables, self.tables = self.tables, []
        return len(tables), [table for table in tables if table]

    def namespace(self):
        """Of this engine's keys."""
        return self.half.namespace

    def promise(self, promised_len):
        """What the sibling promises each prompt from now on, in tokens; of each it kept since, the puts before that."""
        from tests.e2e.sibling import Sibling

        received, self.received = self.received, []
        Sibling.promised_len = promised_len
        Sibling.on_received = staticmethod(lambda: self.received.append(self.calls("put")))
        return received

    def order_faults(self, faults):
        """From now on the store's client has these faults and no others; see faulty_client."""
        self.faults.order(faults)

    def calls(self, operation):
        """The keys of each such call of the store's client since faults were last ordered, none or some."""
        return self.faults.calls(operation)

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
        before = len(self.faults.calls("get"))
        (request_id,) = self._begin([prompt], max_tokens)
        while len(self.faults.calls("get")) == before:
            assert self.llm.llm_engine.has_unfinished_requests(), "finished without a load"
            self.llm.llm_engine.step()
        return request_id

    def abort_after_steps(self, prompt, num_steps):
        """Abort a request after so many steps, and step until everything has been reported."""
        request_ids = self._begin([prompt], 16)
        for _ in range(num_steps):
            self.llm.llm_engine.step()
        self.llm.llm_engine.abort_request(request_ids)
        self.settle()

    def finish(self, request_id):
        """The tokens of the request that was begun."""
        return self._finish([request_id])[0]

    def abort_while_loading(self, prompt, times):
        """So many times abort a request once its load has begun, and step until everything has been reported."""
        for _ in range(times):
            assert self.reset_local()
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

    def keep_pace(self):
        """From now on the jobs of a step have ended before the next one, however busy the machine is."""
        step, threads = self.llm.llm_engine.step, transfer_threads().values()

        def step_and_wait():
            outputs = step()
            for thread in threads:
                thread.drain()
            return outputs

        self.llm.llm_engine.step = step_and_wait

    def outcomes(self):
        """Blocks loaded and stored so far, by outcome."""
        return {
            name: {outcome.value: count for outcome, count in thread.outcomes.items()}
            for name, thread in transfer_threads().items()
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


def transfer_threads():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    return {"load": worker._loads, "store": worker._stores}


def name_of(sample):
    own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
    return f"{sample.name.removeprefix('vllm:kvtwin_')}{{{','.join(own)}}}"


if __name__ == "__main__":
    serve(FaultyDriver)
