"""What vLLM loads. It only forwards: to the scheduler half in the engine's scheduler, to the worker half in a worker.

The name is KVTwinConnector; without the plugin, kv_connector_module_path must be kvconnector.connector.
"""

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from kvconnector.announcement import announcement
from kvconnector.config import ConnectorConfig, KeyNames, LoadFailure, read_config
from kvconnector.control import ControlFile
from kvconnector.device_memory import DeviceMemory
from kvconnector.events import PoolEvents
from kvconnector.guard import GuardedStore
from kvconnector.keys import InTreeFormat, KeyFormat, KeySpace, OwnFormat, require_in_tree
from kvconnector.lookups import LookupThread
from kvconnector.metadata import StepMetadata, WorkerReport
from kvconnector.metrics import BREAKER, BREAKER_LEVEL, CONTROL_REFUSED, MAX_PINNED, SWITCHED_OFF, UNRECORDED, Numbers
from kvconnector.plugin import register
from kvconnector.pool_config import MemoryPool, PoolConfig
from kvconnector.pool_policy import make_planner, make_policy
from kvconnector.record import Origin, Recorder
from kvconnector.scheduler import SchedulerHalf
from kvconnector.seal import Seal, SealedStore, require_final_blocks, seal_of
from kvconnector.stats import PromMetrics, Stats
from kvconnector.store import MooncakeStore
from kvconnector.vllm_compat import (
    KVCacheEvent,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    block_bytes,
    describe_hashes,
    describe_model,
    get_ip,
    has_private_hashes,
    hash_block_size,
    in_tree_model_name,
    in_tree_places,
    namespace_fields,
    publishes_events,
    rank_of,
    require_memory_that_stays,
    require_one_allocator,
    shardings,
    untested_version,
    worker_name,
)
from kvconnector.worker import WorkerHalf
from kvcore.access import Access, Switch
from kvcore.breaker import Breaker, BreakerState
from kvcore.errors import InvalidArgument
from kvcore.keys import Namespace, namespace_digest
from kvcore.ports import StoreOutcome
from kvcore.spec import ModelSpec
from kvcore.units import NS_PER_S

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

JOIN_PATIENCE_NS = 2 * NS_PER_S
"""How long the engine's start waits for the pool; without it the engine starts, and joins when it can."""

LEAVE_PATIENCE_S = 1.0
"""How long its end waits for the removal of what nobody else can find."""

PRIVATE_HASHES = (
    "kvtwin: no other engine finds what this one stores, nor does it itself after a restart: set PYTHONHASHSEED to the "
    "same value in all of them"
)


register()  # MultiConnector looks up who made its numbers by name, also where we were loaded by our module's path


class MonotonicClock:
    """The process's clock."""

    def now_ns(self) -> int:
        """Nanoseconds of `time.monotonic_ns`."""
        return time.monotonic_ns()


class KVTwinConnector(KVConnectorBase_V1, SupportsHMA):
    """KV cache of many engines in one Mooncake pool. A pool that fails costs time, never a wrong token."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._recorder: Recorder | None = None
        self._control: ControlFile | None = None
        self._device_memory: DeviceMemory | None = None
        self._own_namespace: Namespace | None = None
        transfer = vllm_config.kv_transfer_config
        config = read_config(transfer.kv_connector_extra_config, transfer.kv_role)
        _set_load_failure_policy(transfer, config.on_load_failure)
        clock = MonotonicClock()
        pool = _joining(config.pool)
        require_memory_that_stays(vllm_config)
        model = describe_model(vllm_config, kv_cache_config)
        require_final_blocks(config.integrity, model)
        seal = seal_of(config)
        cuts = shardings(vllm_config, kv_cache_config)
        names = _key_format(config, seal, model, vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            store = MooncakeStore(pool.lookup_only(), clock, text=names.text, group=names.group)
            self._store = GuardedStore(store, Breaker(config.breaker), clock, role.name.lower())
            self._lookups = LookupThread(self._store, clock)
            unit = hash_block_size(vllm_config, kv_cache_config)
            keys = KeySpace(names.namespace, unit, cuts[0].layout.num_ranks, cuts)
            logger.info(announcement(config, keys, model, describe_hashes(vllm_config)))
            if warning := untested_version():
                logger.warning("%s", warning)
            if has_private_hashes(vllm_config):
                logger.warning(PRIVATE_HASHES)
            planner = make_planner(config, model)
            policy = make_policy(config, planner, kv_cache_config.num_blocks, block_bytes(kv_cache_config))
            self._scheduler = SchedulerHalf(planner, policy, keys, self._lookups, clock)
            self._scheduler.access = self._access
            if publishes_events(vllm_config):
                self._scheduler.events = PoolEvents(model, unit, kv_cache_config)
            self._stop, self._tally = self._lookups.close, self._scheduler.tally
            self._tally.add(MAX_PINNED.of(), policy.max_storing_blocks or 0)
            if config.control_file:
                self._heed(ControlFile(config.control_file))
            if config.record:
                origin = Origin(model, keys.namespace, unit, keys.num_ranks)
                self._recorder = Recorder(config.record, origin, clock, config.record_key)
                self._recorder.on_dropped = partial(self._tally.add, UNRECORDED.of(), 1)
                self._scheduler.record = self._recorder.record
        else:
            if pool.memory_pool is not MemoryPool.NONE:
                require_one_allocator(vllm_config)
                self._device_memory = DeviceMemory(pool.memory_pool)
            pool = pool.of_worker(worker_name(vllm_config))
            store = MooncakeStore(pool, clock, text=names.text, group=names.group)
            self._store = GuardedStore(store, Breaker(config.breaker), clock, role.name.lower())
            memory = self._store if seal is None else SealedStore(self._store, seal)
            self._worker = WorkerHalf(config, memory, clock, rank_of(vllm_config), model, names.layouts, cuts)
            self._stop, self._tally = self._worker.close, self._worker.tally
        self._tally.watch(BREAKER.of(role.name.lower()), self._breaker_level)
        self._store.join(clock.now_ns() + JOIN_PATIENCE_NS)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a store that is dropped is a miss later."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Yes; vLLM 0.33 asks."""
        return True

    # -- scheduler ---------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See `SchedulerHalf.bind_gpu_block_pool`."""
        self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerHalf.get_num_new_matched_tokens`."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerHalf.update_state_after_alloc`."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See `SchedulerHalf.build_connector_meta`."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerHalf.update_connector_output`."""
        report = connector_output.kv_connector_worker_meta
        self._scheduler.update_connector_output(report if isinstance(report, WorkerReport) else None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerHalf.request_finished`."""
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerHalf.request_finished`."""
        return self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """See `SchedulerHalf.has_pending_push_work`."""
        return self._scheduler.has_pending_push_work()

    def take_events(self) -> Sequence[KVCacheEvent]:
        """See `PoolEvents.take`; nothing unless the engine publishes events."""
        events = self._scheduler.events
        return () if events is None else events.take()

    def reset_cache(self) -> bool:
        """Nothing that was stored before is loaded any more. True; what other engines share stays theirs.

        What was stored since another reset is nobody else's: it is removed, in the background.
        """
        namespace = namespace_digest({"before": self._scheduler.namespace, "reset": uuid.uuid4().hex})
        self._scheduler.move_to(namespace)
        if self._recorder is not None:
            self._recorder.moved(namespace)
        logger.warning("kvtwin: the cache was reset: keys are in namespace %s, which no other engine shares", namespace)
        self._remove_own()
        self._own_namespace = namespace
        return True

    def _remove_own(self) -> threading.Thread:
        """Begin to remove what is in the namespace that a reset made.

        Never by force: what was asked for just now may be on its way into a block. That, and what is stored later,
        ages out of the pool.
        """
        remover = threading.Thread(target=self._remove_all_of, args=(self._own_namespace,), daemon=True)
        remover.start()
        return remover

    def _remove_all_of(self, namespace: Namespace | None) -> None:
        """What is left costs room until it ages out, and nothing else: the log says so, no metric does."""
        if namespace is not None and (outcome := self._store.remove_like(f"^{namespace}[-@]")) is not StoreOutcome.OK:
            logger.warning("kvtwin: namespace %s was not emptied, its objects age out: %s", namespace, outcome.value)

    # -- worker ------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        """In which the engine allocates the KV cache; None for its own."""
        return None if self._device_memory is None else self._device_memory.context()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See `WorkerHalf.register_kv_caches`."""
        self._worker.register_kv_caches(kv_caches, self._kv_cache_config)

    def unregister_kv_caches(self) -> None:
        """See `WorkerHalf.unregister_kv_caches`; vLLM calls it from 0.33 on."""
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """See `WorkerHalf.restore_kv_caches`."""
        self._worker.restore_kv_caches()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `WorkerHalf.start_load_kv`; which arguments come with it depends on vLLM's version."""
        self._worker.start_load_kv(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no load is needed by the step that starts it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        """See `WorkerHalf.wait_for_save`."""
        self._worker.wait_for_save(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(None, requests whose load ended)."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerHalf.get_transfer_results`."""
        return self._worker.get_transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerHalf.take_unloaded_block_ids`."""
        return self._worker.take_unloaded_block_ids()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """See `WorkerHalf.take_report`."""
        return self._worker.take_report()

    # -- both --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        """What this half counted since the last step; None when that is nothing."""
        numbers = self._tally.take()
        return Stats(numbers) if numbers else None

    @classmethod
    def build_kv_connector_stats(cls, data: Numbers | None = None) -> Stats:
        """The numbers that came from the engine, or none."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """See `PromMetrics`; made where the API server is."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop this half's threads, and leave the pool unless one of them is in a call that does not end."""
        if self._recorder is not None:
            self._recorder.close()
        if self._control is not None:
            self._control.close()
        if not self._stop():
            return
        remover = self._remove_own()
        remover.join(LEAVE_PATIENCE_S)
        if not remover.is_alive():
            self._store.close()

    def _access(self) -> Access:
        """What is not switched off, of a pool that answers."""
        access = self._store.access
        return access if self._control is None else access.within(self._control.access)

    def _heed(self, control: ControlFile) -> None:
        self._control = control
        self._tally.watch(SWITCHED_OFF.of("reads"), lambda: int(control.access.reads is Switch.OFF))
        self._tally.watch(SWITCHED_OFF.of("writes"), lambda: int(control.access.writes is Switch.OFF))
        self._tally.watch(CONTROL_REFUSED.of(), lambda: int(control.refused))

    def _breaker_level(self) -> int:
        state = self._store.state
        return 0 if state is BreakerState.CLOSED else BREAKER_LEVEL[state]

    def _metadata(self) -> StepMetadata:
        metadata: KVConnectorMetadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), metadata
        return metadata


def _set_load_failure_policy(transfer: Any, wanted: LoadFailure) -> None:
    """The engine reads its setting after it has built its connector; its default ends a request whose load fails."""
    set_by_user = transfer.kv_load_failure_policy == LoadFailure.RECOMPUTE.value
    if set_by_user and wanted is LoadFailure.FAIL:
        expected = '"recompute", as kv_load_failure_policy says, or neither of the two settings'
        raise InvalidArgument("on_load_failure", wanted.value, expected)
    transfer.kv_load_failure_policy = wanted.value


def _key_format(
    config: ConnectorConfig, seal: Seal | None, model: ModelSpec, vllm_config: Any, kv_cache_config: Any
) -> KeyFormat:
    if config.key_format is KeyNames.VLLM:
        require_in_tree(model)
        places = in_tree_places(vllm_config, kv_cache_config)
        names = InTreeFormat(Namespace(config.cache_prefix), in_tree_model_name(vllm_config), places)
        logger.debug("kvtwin: keys are those of MooncakeStoreConnector, %s", names)
        return names
    fields = namespace_fields(vllm_config, kv_cache_config)
    if config.model_id:
        fields |= {"model": config.model_id, "revision": None}
    if seal is not None:
        fields["integrity"] = seal.identity
    fields["user"] = [[name, value] for name, value in sorted(config.namespace.items())]
    namespace = namespace_digest(fields)
    logger.debug("kvtwin: namespace %s is made of %s", namespace, fields)
    return OwnFormat(namespace)


def _joining(pool: PoolConfig) -> PoolConfig:
    return pool if pool.local_hostname else dataclasses.replace(pool, local_hostname=get_ip())
