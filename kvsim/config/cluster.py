"""The instances of a scenario: the tables `[model]`, `[device]`, `[cluster]`, `[routing]` and `[engine]`."""

from typing import Annotated

from pydantic import Field, PlainValidator

from kvsim import catalog, toml
from kvsim.config.retention import interval
from kvsim.llm.dtypes import KVCacheChoice
from kvsim.toml import Count, PositiveCount, PositiveRatio, Ratio, Table


class ModelChoice(Table):
    """A model of the catalogue."""

    name: Annotated[str, toml.one_of(catalog.llm_models())]


class DeviceChoice(Table):
    """A device of the catalogue."""

    name: Annotated[str, toml.one_of(catalog.devices())]


ROUTINGS = ("round_robin", "least_loaded", "session_affinity", "prefix_aware", "pool_aware")
"""Routing policies by name; see docs/POLICIES.md."""


class ClusterConfig(Table):
    """Identical instances behind one router."""

    instances: Annotated[PositiveCount, Field(le=65_536)]
    routing: Annotated[str, toml.one_of(ROUTINGS)] = "round_robin"


class RoutingConfig(Table):
    """Parameters of the routing policies, under their sources' names; each policy reads its own."""

    snapshot_interval_ms: Count = 50
    """How old loads and cached prefixes may be: llm-d's `--refresh-metrics-interval` (50 ms); vLLM's data-parallel
    coordinator reports every 100 ms."""
    overlap_score_credit: Ratio = 1.0
    """prefix_aware, Dynamo's `--router-kv-overlap-score-credit`: how much of a cached token counts as computed."""
    prefill_load_scale: Annotated[float, Field(ge=0)] = 1.0
    """prefix_aware, Dynamo's `--router-prefill-load-scale`: a token to compute against one to decode over."""
    prefill_ns_per_token: Count | None = None
    """pool_aware: time to compute a token; by default that of a full step of the scenario's model on its device."""
    transfer_ns_per_token: Count | None = None
    """pool_aware: time to fetch a token; by default that of the scenario's link, alone on it."""


ROOFLINE, TABLE, AICONFIGURATOR = "roofline", "table:", "aiconfigurator"
"""What says how long a step takes; after TABLE comes the name of one."""
STEP_TIMES = (ROOFLINE, AICONFIGURATOR, *(TABLE + table for table in catalog.step_tables()))


class EngineConfig(Table):
    """One engine; names and defaults of vLLM's EngineArgs where it has them."""

    tensor_parallel_size: PositiveCount = 1
    data_parallel_size: PositiveCount = 1
    """Ranks that share the work of a step; the instance is one engine to the scheduler, with the memory of them all."""
    enable_expert_parallel: bool = False
    """Experts lie on all tensor x data parallel GPUs, each whole; otherwise each is cut over them."""
    step_time: Annotated[str, toml.one_of(STEP_TIMES)] = ROOFLINE
    """What says how long a step takes: `roofline`, `table:NAME` or `aiconfigurator`; see docs/STEP_TIMES.md."""
    block_size: PositiveCount = 16
    """Tokens in a block, at least: some models' kernels need larger ones, and a recurrent state fits into a block."""
    kv_cache_dtype: KVCacheChoice = "auto"
    """How K, V and latents are kept; `auto`: as the model's file says."""
    max_num_seqs: PositiveCount = 1024
    max_num_batched_tokens: PositiveCount = 8192
    gpu_memory_utilization: PositiveRatio = 0.9
    reserved_bytes: Count = 3_274_912_563
    """GPU memory that is neither weights nor KV: activation peak 1.26 GiB + non-torch 1.79 GiB, as vLLM's profiling run
    printed for an 8B Llama on one H100 (github.com/vllm-project/vllm/pull/10511, 2024-12-14)."""
    num_gpu_blocks: Annotated[PositiveCount, Field(ge=2)] | None = None
    """Overrides the number derived from memory. One of them holds nothing, vLLM's null block."""
    watermark: Ratio = 0.0
    """Share of the blocks kept free when a waiting request is admitted; vLLM's KVCacheManager(watermark=0.0)."""

    prefix_cache_retention_interval: Annotated[int | None, PlainValidator(interval)] = 0
    """Tokens between the lengths at which groups with windows or recurrent states stay resumable in the GPU prefix
    cache; 0: where a prompt can be sent again and where prefixes part, "all": every one."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one instance."""
        return self.tensor_parallel_size * self.data_parallel_size
