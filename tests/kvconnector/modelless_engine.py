"""vLLM's real scheduler and both halves of the real connector, without a model: blocks hold tags instead of numbers.

What a token's KV is, is the text up to and including that token, and the version of the weights. A step that reads
anything else, or an object in the pool that holds anything else than its key names, is a wrong token: both are asserted
on the spot. Steps overlap as under vLLM's asynchronous scheduling; loads and stores move bytes at any time in between.
"""

import json
import zlib
from collections import deque
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from kvconnector import connector as connector_module
from kvconnector import worker as worker_module
from kvconnector.config import ConnectorConfig
from kvconnector.jobs import Ended
from kvconnector.pool_config import PoolConfig
from kvconnector.vllm_compat import describe_model, shardings
from kvconnector.worker import WorkerHalf
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcore.access import ALL_ACCESS
from kvcore.breaker import BreakerState
from kvcore.keys import BlockKey
from kvcore.ports import StoreOutcome

MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip
MAX_LEN = 64
GARBAGE = "garbage"
OUTCOMES = {True: StoreOutcome.OK, False: StoreOutcome.MISSING}
ENDLESS = 2_000
"""Far more steps than all requests of a test need."""


def full(block_size):
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def window(block_size, sliding_window):
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=sliding_window
    )


def continuation(text, length):
    """The text of `length` that greedy decoding makes of `text`."""
    while len(text) < length:
        text += "xyz"[zlib.crc32(text.encode()) % 3]
    return text


def text_of(token_ids):
    return "".join(map(chr, token_ids))


def tokens_of(text):
    return [ord(token) for token in text]


class Lookups:
    """In place of the lookup thread: a dialogue goes on, a round at a time, when the test says so."""

    def __init__(self, store, clock):
        self.asked, self.answered = deque(), []

    def submit(self, asker, lookup, ask):
        self.asked.append((asker, lookup, ask))

    def take_answers(self):
        answered, self.answered = self.answered, []
        return answered

    def forget(self, asker):
        """The request has ended; what is answered after that must be ignored."""

    @property
    def num_waiting(self):
        return len(self.asked)

    def answer(self, pool):
        """The next question of the oldest dialogue, from what the pool holds now."""
        if not self.asked:
            return
        asker, lookup, ask = self.asked[0]
        keys, told = ask(lookup.dialogue.question)
        lookup.dialogue.answered(told([OUTCOMES[key in pool] for key in keys]))
        if not lookup.dialogue.open:
            self.asked.popleft()
            self.answered.append((asker, lookup))

    def close(self):
        return True


class Thread:
    """In place of a transfer thread: a job ends when the test says so."""

    def __init__(self, name, move, deadline_ms, clock):
        self.waiting, self.ended = deque(), []

    def __class_getitem__(cls, job_type):
        return cls

    def submit(self, job, ready=lambda: None):
        self.waiting.append(job)

    def take_ended(self):
        ended, self.ended = self.ended, []
        return ended

    def end(self, job, failed):
        self.ended.append((job, Ended(job.job_id, 1, tuple(failed))))


def without_threads(monkeypatch):
    """Every connector made from here on has no thread and no Mooncake."""
    store = SimpleNamespace(
        join=lambda deadline_ns: False,
        access=ALL_ACCESS,
        state=BreakerState.CLOSED,
        remove_like=lambda pattern: StoreOutcome.OK,
    )
    monkeypatch.setattr(connector_module, "MooncakeStore", lambda config, clock, text, group: None)
    monkeypatch.setattr(connector_module, "GuardedStore", lambda mooncake, breaker, clock, half: store)
    monkeypatch.setattr(connector_module, "LookupThread", Lookups)
    monkeypatch.setattr(worker_module, "TransferThread", Thread)


class Rank:
    """One worker: its memory, its block tables, and the connector's worker half on top of them."""

    def __init__(self, number, model, num_blocks, cuts):
        self.half = WorkerHalf(ConnectorConfig(PoolConfig("nowhere:1")), None, None, number, model, cuts=cuts)
        self.number, self.groups = number, model.groups
        self.memory = [[GARBAGE] * max(spec.block_size for spec in self.groups) for _ in range(num_blocks)]
        self.tables, self.texts, self.drafts, self.weights = {}, {}, {}, 0

    def run(self, output):
        """The tokens that the step samples per request; [] for one whose prompt is not done."""
        for request_id in output.finished_req_ids:
            self.tables.pop(request_id, None)
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            # For the second model runner a request that was preempted is new, with what it has sampled.
            self._begin(new.req_id, new.block_ids, text_of(new.prefill_token_ids or new.prompt_token_ids))
            starts[new.req_id] = new.num_computed_tokens
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:  # what it sampled meanwhile may have been dropped
                self._begin(request_id, new_ids, text_of(cached.all_token_ids[request_id]))
            else:
                for table, ids in zip(self.tables[request_id], new_ids or (), strict=False):
                    table += ids
        drafts = output.scheduled_spec_decode_tokens
        scheduled = output.num_scheduled_tokens.items()
        return {name: self._compute(name, starts[name], count, len(drafts.get(name, ()))) for name, count in scheduled}

    def _begin(self, request_id, block_ids, text):
        self.tables[request_id] = [list(ids) for ids in block_ids]
        self.texts[request_id] = text
        self.drafts.pop(request_id, None)

    def _compute(self, request_id, start, count, num_drafts):
        text = self.texts[request_id]
        drafts = self.drafts.pop(request_id, "")[:num_drafts].ljust(num_drafts, "?")
        start = min(start, len(text) - 1)  # an overlapping step may have accepted less than was hoped for
        assert start + count - num_drafts <= len(text), "computes a token nobody knows"
        self._check_context(request_id, text, start)
        for position in range(start, start + count):
            self._write(request_id, position, (text + drafts)[: position + 1])
        if start + count - num_drafts < len(text):
            return []
        right = continuation(text, len(text) + num_drafts + 1)
        num_accepted = next((n for n in range(num_drafts) if drafts[n] != right[len(text) + n]), num_drafts)
        self.texts[request_id] = right[: len(text) + num_accepted + 1]
        return tokens_of(self.texts[request_id][len(text) :])

    def _check_context(self, request_id, text, start):
        for group, spec in enumerate(self.groups):
            for position in range(max(0, start + 1 - getattr(spec, "window", start + 1)), start):
                found = self._slots(request_id, group, position)[position % spec.block_size]
                assert found == (self.weights, text[: position + 1]), (
                    f"{request_id}: token {position} of group {group} is {found!r}"
                )

    def _write(self, request_id, position, tag):
        for group, spec in enumerate(self.groups):
            self._slots(request_id, group, position)[position % spec.block_size] = self.weights, tag

    def _slots(self, request_id, group, position):
        block_id = self.tables[request_id][group][position // self.groups[group].block_size]
        assert block_id, f"token {position} of group {group} is in the null block"
        return self.memory[block_id]

    def draft(self, request_id, num_tokens, rightly):
        """Guess the next tokens."""
        text = self.texts[request_id]
        guess = continuation(text, len(text) + num_tokens)[len(text) :]
        self.drafts[request_id] = guess if rightly else guess[:-1] + "?"
        return tokens_of(self.drafts[request_id])


class Engine:
    """`depth` steps may be under way: 1, or 2 as in asynchronous scheduling; each tries `num_drafts` tokens more.

    Ranks beyond `num_kv_heads` are replicas. `runner`: which of vLLM's two model runners the scheduler works for.
    """

    def __init__(
        self,
        specs,
        num_blocks,
        num_ranks=1,
        depth=1,
        num_drafts=0,
        budget=24,
        policy="fcfs",
        caching=True,
        num_kv_heads=64,
        runner=1,
    ):
        self.pool, self.depth, self.num_drafts, self.now_ns = {}, depth, num_drafts, 0
        config = make_config(specs[0].block_size, num_blocks, num_ranks, depth, budget, policy, caching, num_kv_heads)
        self.scheduler = make_scheduler(config, specs, num_blocks, num_drafts)
        self.scheduler.use_v2_model_runner = runner == 2
        self.connector = self.scheduler.connector
        self.half, self.lookups = self.connector._scheduler, self.connector._lookups
        self.half._clock = SimpleNamespace(now_ns=lambda: self.now_ns)
        self.decisions, self.outputs = [], {}
        self.half.on_closed = lambda request, machine: self.decisions.append(machine.decisions)
        self.model = self.half._planner.model
        self.cuts = shardings(config, self.scheduler.kv_cache_config)
        self.ranks = [Rank(number, self.model, num_blocks, self.cuts) for number in range(num_ranks)]
        self.aggregator = KVOutputAggregator(num_ranks)
        self.scheduled, self.executed = deque(), deque()
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        self.num_free_at_start = self.block_pool.get_num_free_blocks()

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request_id, text, num_output, resumable=False, priority=0, **options):
        self.outputs.setdefault(request_id, "")
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=tokens_of(text),
                sampling_params=SamplingParams(max_tokens=num_output, ignore_eos=True, **options),
                pooling_params=None,
                block_hasher=self._new_hashes,
                resumable=resumable,
                priority=priority,
            )
        )

    def _new_hashes(self, request):
        text, unit = text_of(request.all_token_ids), self.scheduler.hash_block_size
        return [text[: (index + 1) * unit].encode() for index in range(len(request.block_hashes), len(text) // unit)]

    def live(self):
        return [name for name, request in self.scheduler.requests.items() if not request.is_finished()]

    def abort(self, request_id):
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def update_weights(self):
        """As after training: what was computed before must never be read again. False when blocks are in use."""
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError as error:  # raised into the call of whoever wants it, not into the engine's loop
            assert "Failed to reset KV cache" in str(error)
            return False
        for rank in self.ranks:
            rank.weights += 1
        return True

    # -- steps -------------------------------------------------------------------------------------------------

    def step(self):
        self.schedule()
        self.execute()
        self.update()

    def schedule(self):
        if len(self.scheduled) + len(self.executed) < self.depth:
            self.scheduled.append(self.scheduler.schedule())

    def execute(self):
        """The oldest step that was scheduled: forward, then what its metadata asks of the connector."""
        if not self.scheduled:
            return
        output = self.scheduled.popleft()
        results = []
        for rank in self.ranks:
            sampled = rank.run(output)
            rank.half.start_load_kv(output.kv_connector_metadata)
            rank.half.wait_for_save(output.kv_connector_metadata)
            results.append(self._result(rank, sampled))
        self.executed.append((output, self.aggregator.aggregate(results)))

    def _result(self, rank, sampled):
        transfers = rank.half.get_transfer_results()
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(
                finished_recving=transfers.finished_recving or None,
                failed_recving=transfers.failed_recving,
                invalid_block_ids=rank.half.take_unloaded_block_ids(),
                kv_connector_worker_meta=rank.half.take_report(),
            ),
        )

    def update(self):
        if not self.executed:
            return
        output, result = self.executed.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                assert item.finish_reason is None or item.finish_reason.name != "ERROR", item
                self.outputs[item.request_id] += text_of(item.new_token_ids)
        self._draft([name for name in output.num_scheduled_tokens if name in self.scheduler.requests])

    def _draft(self, request_ids):
        for request in (self.scheduler.requests[name] for name in request_ids):
            if self.num_drafts and request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
                rightly = bool(len(request.all_token_ids) % 3)
                drafts = [rank.draft(request.request_id, self.num_drafts, rightly) for rank in self.ranks]
                if self.depth == 1:
                    request.spec_token_ids = drafts[0]

    # -- the pool ----------------------------------------------------------------------------------------------

    def move(self, kind, rank, fails=lambda index: False):
        """End the oldest "load" or "store" of a rank, if any; entries whose index `fails` are not moved."""
        rank = self.ranks[rank % len(self.ranks)]
        thread = rank.half._loads if kind == "load" else rank.half._stores
        if thread.waiting:
            job = thread.waiting.popleft()
            move = self._load if kind == "load" else self._store
            shards = [self.cuts[entry.group].shard_of(rank.number) for entry in job.entries]
            keys = [
                BlockKey(job.namespace, entry.group, shard, entry.block_hash)
                for shard, entry in zip(shards, job.entries, strict=True)
            ]
            moving = enumerate(zip(keys, job.entries, strict=True))
            thread.end(job, [index for index, (key, entry) in moving if fails(index) or not move(rank, key, entry)])

    def _load(self, rank, key, entry):
        size, value = self.model.groups[entry.group].block_size, self.pool.get(key)
        rank.memory[entry.block_id][:size] = value or [GARBAGE] * size
        return value is not None

    def _store(self, rank, key, entry):
        text, size = entry.block_hash.decode(), self.model.groups[entry.group].block_size
        value = rank.memory[entry.block_id][:size]
        weights = value[0][0]
        assert value == [(weights, text[:end]) for end in range(len(text) - size + 1, len(text) + 1)], (entry, value)
        self.pool.setdefault(key, value)
        return True

    # -- the end -----------------------------------------------------------------------------------------------

    def drain(self):
        """Until everything that is under way has ended, and all that is asked has been answered and moved."""
        for _ in range(ENDLESS):
            if not self.scheduler.has_requests():
                break
            self.lookups.answer(self.pool)
            for number in range(len(self.ranks)):
                self.move("load", number)
                self.move("store", number)
            self.step()
        else:
            raise AssertionError(f"requests never end: {self.live()}")
        while self.scheduled or self.executed:
            self.execute()
            self.update()

    def check_nothing_is_left(self):
        assert self.block_pool.get_num_free_blocks() == self.num_free_at_start
        half = self.half
        assert (half._tracked, half._jobs, half._starting_over, half._landing) == ({}, {}, set(), {})
        assert (half._loads, half._stores) == ([], [])


def make_scheduler(config, specs, num_blocks, num_drafts):
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    caches = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(caches, config)
    caches.hash_block_size, caches.cache_hit_alignment_tokens = hash_block_size, block_size
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(config, caches, StructuredOutputManager(config), block_size, hash_block_size)
    scheduler.num_spec_tokens = scheduler.num_lookahead_tokens = num_drafts
    scheduler._spec_token_placeholders = [-1] * num_drafts
    assert describe_model(config, caches) == scheduler.connector._scheduler._planner.model
    return scheduler


def make_config(block_size, num_blocks, num_ranks, depth, budget, policy, caching, num_kv_heads):
    """The bounds are set after construction: vLLM's own checks of them are about hardware that is not here."""
    config = copy(_base_config())
    for part in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
        setattr(config, part, copy(getattr(config, part)))
    config.model_config.max_model_len = MAX_LEN
    config.model_config.hf_text_config = {"num_key_value_heads": num_kv_heads}
    config.model_config.get_total_num_kv_heads = lambda: num_kv_heads
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = block_size, num_blocks
    config.cache_config.enable_prefix_caching = caching
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = 4, budget
    config.scheduler_config.async_scheduling, config.scheduler_config.policy = depth > 1, policy
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = num_ranks
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVTwinConnector",
        kv_connector_module_path="kvconnector.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"master_server_address": "nowhere:1", "max_storing_share": 1.0},
    )
    return config


@cache
def _base_config():
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        return VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32"),
            cache_config=CacheConfig(),
            scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False, async_scheduling=False),
            device_config=DeviceConfig("cpu"),
        )
