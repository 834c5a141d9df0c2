"""The worker half: knows where blocks lie, starts jobs, and reports each that ended exactly once."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvconnector.config import ConnectorConfig, Integrity
from kvconnector.jobs import Ended, LoadJob, StoreJob
from kvconnector.keys import LayoutsOf
from kvconnector.layout import CacheView, GroupLayout, group_layouts
from kvconnector.metadata import StepMetadata, WorkerReport
from kvconnector.metrics import WAITING, Operation, Tally
from kvconnector.store import Pieces, PoolStore
from kvconnector.transfer import TransferThread
from kvconnector.vllm_compat import KVConnectorTransferResults
from kvcore.errors import InvalidArgument, require
from kvcore.keys import BlockKey, format_key
from kvcore.ports import Clock, StoreOutcome
from kvcore.ranks import Sharding
from kvcore.spec import ModelSpec

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it


class WorkerHalf:
    """One per worker of an engine that serves `model`; `layouts` says what a block's value is.

    `cuts` says per group which ranks hold which shard of its blocks, and take turns at storing it; every rank loads its
    own. Without, each `rank` has a shard of its own.

    In each step: `start_load_kv`, `wait_for_save`, then `get_transfer_results`, which takes the jobs that have ended,
    and after it what it could not say: `take_unloaded_block_ids` (`ModelSpec.loads_in_part`), and `take_report`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        store: PoolStore,
        clock: Clock,
        rank: int,
        model: ModelSpec,
        layouts: LayoutsOf = group_layouts,
        cuts: Sequence[Sharding] = (),
    ) -> None:
        self._store = store
        self._integrity = config.integrity
        self._layouts_of = layouts
        self._loads_in_part = model.loads_in_part
        self._rank = rank
        self._cuts = cuts
        self._shards = [cut.shard_of(rank) for cut in cuts] if cuts else [rank] * len(model.groups)
        self._shares = any(len(holders) > 1 for cut in cuts for holders in cut.holders)
        self._layouts: tuple[GroupLayout, ...] = ()
        self._device = torch.device("cpu")
        self._memory: list[tuple[int, int]] = []
        self._is_registered = False
        self._ended: list[Ended] = []
        self._unloaded_block_ids: set[int] = set()
        self._loads = TransferThread[LoadJob]("kvtwin-load", self._get, config.load_deadline_ms, clock)
        self._stores = TransferThread[StoreJob]("kvtwin-store", self._put, config.store_deadline_ms, clock)
        self.tally = Tally()
        """What this half counts; its owner may add gauges."""
        self.tally.watch(WAITING.of(Operation.LOAD.value), lambda: self._loads.num_waiting)
        self.tally.watch(WAITING.of(Operation.STORE.value), lambda: self._stores.num_waiting)
        self._loads.on_ended = partial(self._count, Operation.LOAD)
        self._stores.on_ended = partial(self._count, Operation.STORE)

    def register_kv_caches(self, kv_caches: Mapping[str, Any], kv_cache_config: Any) -> None:
        """Learn where the blocks of each group lie, and give their memory to the store."""
        groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        for layer in (layer for layers in groups for layer in layers if layer not in kv_caches):
            raise InvalidArgument("kv_caches", sorted(kv_caches), f"an entry for layer {layer}")
        fix = "layers of every KV cache group on every pipeline stage; set another pipeline_parallel_size"
        require(all(groups), "layers of the KV cache groups", groups, fix)
        views = {layer: [_view(layer, tensor) for tensor in _tensors(cache)] for layer, cache in kv_caches.items()}
        self._layouts = self._layouts_of(views, groups, kv_cache_config.num_blocks)
        tensors = [tensor for cache in kv_caches.values() for tensor in _tensors(cache)]
        self._device = tensors[0].device
        self._require_readable()
        self._memory, self._is_registered = sorted({_storage(tensor) for tensor in tensors}), False
        self.restore_kv_caches()

    def unregister_kv_caches(self) -> None:
        """The engine falls asleep, and its KV cache loses its memory: wait for what is under way, then let go of it."""
        self._loads.drain()
        self._stores.drain()
        if self._is_registered:
            for address, _ in self._memory:
                self._store.unregister(address)
        self._is_registered = False

    def restore_kv_caches(self) -> None:
        """It is awake again, with other memory at the same addresses."""
        if not self._is_registered:
            for address, size_bytes in self._memory:
                self._store.register(address, size_bytes)
        self._is_registered = True

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Start the step's loads; none is needed by the step itself."""
        for job in metadata.loads:
            self._loads.submit(job)

    def wait_for_save(self, metadata: StepMetadata) -> None:
        """Start the step's stores, each of which waits until the device has computed the step."""
        if metadata.stores:
            computed = _fence(self._device)
            for job in metadata.stores:
                self._stores.submit(self._own_part(job), computed)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """The requests whose load ended since the last call, and those that must start over because it failed."""
        loads, stores = self._loads.take_ended(), self._stores.take_ended()
        if not loads and not stores:
            return KVConnectorTransferResults()
        self._ended += [*(ended for _, ended in loads), *(job.whole(ended) for job, ended in stores)]
        failed = [(job, ended) for job, ended in loads if ended.failed or job.unwritten]
        for job, ended in failed:
            entries = job.entries
            self._unloaded_block_ids.update(job.unwritten, (entries[index].block_id for index in ended.failed))
        return KVConnectorTransferResults(
            finished_recving={job.request_id for job, _ in loads},
            failed_recving={job.request_id for job, _ in failed if not self._loads_in_part},
        )

    def take_unloaded_block_ids(self) -> set[int]:
        """The blocks of loads just ended that hold no data; empty where the whole request starts over."""
        unloaded, self._unloaded_block_ids = self._unloaded_block_ids, set()
        return unloaded if self._loads_in_part else set()

    def take_report(self) -> WorkerReport | None:
        """The jobs that `get_transfer_results` took, for the scheduler half; None when there are none."""
        ended, self._ended = self._ended, []
        return WorkerReport(tuple(ended)) if ended else None

    def close(self) -> bool:
        """Stop both threads, and say whether they have ended."""
        return all([self._loads.close(), self._stores.close()])

    def _get(self, job: LoadJob, deadline_ns: int) -> Sequence[StoreOutcome]:
        keys, buffers = self._addressed(job)
        outcomes = self._store.get(keys, buffers, deadline_ns)
        if self._integrity is not Integrity.NONE and _REFUSED & set(outcomes):
            self._give_up(
                [key for key, outcome in zip(keys, outcomes, strict=True) if outcome in _REFUSED], deadline_ns
            )
        return outcomes

    def _give_up(self, keys: Sequence[BlockKey], deadline_ns: int) -> None:
        """Refused objects are removed: as long as one is there, the block that is computed instead is not stored."""
        logger.warning(
            "%d objects are not what was stored under their keys, such as %s", len(keys), format_key(keys[0])
        )
        self._store.remove(keys, deadline_ns)

    def _put(self, job: StoreJob, deadline_ns: int) -> Sequence[StoreOutcome]:
        return self._store.put(*self._addressed(job), deadline_ns)

    def _own_part(self, job: StoreJob) -> StoreJob:
        """What it is this rank's turn to store; the other replicas store the rest."""
        if not self._shares:
            return job
        return job.only(lambda group, positions: self._cuts[group].turns(self._rank, group, positions))

    def _require_readable(self) -> None:
        where = f'"none" with a KV cache on {self._device.type}: content is verified in memory of the host alone'
        readable = self._integrity is Integrity.NONE or self._device.type == "cpu"
        require(readable, "integrity", self._integrity.value, where)

    def _count(
        self, operation: Operation, job: LoadJob | StoreJob, outcomes: Sequence[StoreOutcome], took_ns: int
    ) -> None:
        """Runs on the thread that ended the job."""
        self.tally.keys(operation, outcomes)
        size_bytes, first = 0, 0
        for stretch in job.stretches:
            end = first + len(stretch.positions)
            size_bytes += outcomes[first:end].count(StoreOutcome.OK) * self._layouts[stretch.group].block_bytes
            first = end
        self.tally.moved(operation, size_bytes, took_ns)

    def _addressed(self, job: LoadJob | StoreJob) -> tuple[list[BlockKey], list[Pieces]]:
        keys: list[BlockKey] = []
        buffers: list[Pieces] = []
        for group, _, hashes, block_ids in job.stretches:
            shard = self._shards[group]
            assert shard is not None, f"no layer of group {group} on rank {self._rank}"
            keys += [BlockKey(job.namespace, group, shard, block_hash) for block_hash in hashes]
            buffers += map(self._layouts[group].locate, block_ids)
        return keys, buffers


_REFUSED = {StoreOutcome.BAD_LENGTH, StoreOutcome.BAD_CONTENT}


def _tensors(cache: Any) -> Sequence[torch.Tensor]:
    """A recurrent layer has several states, all in the same blocks."""
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _view(layer: str, tensor: torch.Tensor) -> CacheView:
    item_bytes = tensor.element_size()
    strides_bytes = tuple(stride * item_bytes for stride in tensor.stride())
    return CacheView(layer, tensor.data_ptr(), tuple(tensor.shape), strides_bytes, item_bytes, _storage(tensor))


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _fence(device: torch.device) -> Callable[[], object]:
    """A call that returns once the device has done what is queued now; on the CPU that is always."""
    if device.type == "cpu":
        return lambda: None
    event = torch.Event(device)
    event.record()
    wait: Callable[[], object] = event.synchronize
    return wait
