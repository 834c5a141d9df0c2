"""vLLM's scheduler and its requests, made by hand: no model, no tokens, no tokenizer."""

import json
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvsim.reference.vllm_specs import vllm_spec
from kvsim.run import limits
from kvsim.scenario import Scenario
from kvsim.sequence import Sequence

# Nothing of it matters: the KV cache groups are given by hand, and vLLM reads no weights here.
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 2**40,
}
TOKEN = 0
"""Every token of every request; what a block holds is told by its hash alone."""


def make_scheduler(scenario: Scenario) -> Any:
    """The synchronous `Scheduler` with the scenario's bounds and the groups of its model."""
    config = _config(scenario)
    groups = [KVCacheGroupSpec([str(index)], vllm_spec(group)) for index, group in enumerate(scenario.kv_model.groups)]
    kv_cache_config = KVCacheConfig(
        num_blocks=scenario.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=limits(scenario).retention,
    )
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    kv_cache_config.hash_block_size = hash_block_size
    kv_cache_config.cache_hit_alignment_tokens = block_size
    return Scheduler(config, kv_cache_config, StructuredOutputManager(config), block_size, hash_block_size)


def make_request(sequence: Sequence, block_size: int, arrival_s: float) -> Any:
    """A request of as many tokens, whose blocks' hashes are the names that the sequence's segments give them."""
    return Request(
        request_id=request_id(sequence),
        prompt_token_ids=[TOKEN] * sequence.input_len,
        sampling_params=SamplingParams(max_tokens=sequence.max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival_s,
        block_hasher=_block_hasher(sequence, block_size),
    )


def request_id(sequence: Sequence) -> str:
    """What vLLM calls it."""
    return str(sequence.index)


def model_runner_output(is_sampled: dict[str, bool]) -> Any:
    """What a model would return for a step of these requests: a token for those that are sampled."""
    request_ids = list(is_sampled)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[TOKEN] if sampled else [] for sampled in is_sampled.values()],
    )


def _block_hasher(sequence: Sequence, block_size: int) -> Callable[[Any], list[bytes]]:
    """Hashes of the full blocks that a request has no hash of yet.

    A (stream, block index) is unique to the content up to and including that block, as a chained hash is. Segments may
    end before the last full block: the one token of a prefill-only request is not in them.
    """
    hashes = [b"%d:%d" % (stream, block) for stream, start, end in sequence.segments for block in range(start, end)]

    def new_hashes(request: Any) -> list[bytes]:
        return hashes[len(request.block_hashes) : request.num_tokens // block_size]

    return new_hashes


def _config(scenario: Scenario) -> Any:
    """The bounds are set after construction: vLLM's own checks of them are about hardware that is not here."""
    config = copy(_base_config())
    engine = scenario.engine
    config.model_config = copy(config.model_config)
    config.model_config.max_model_len = limits(scenario).capacity_tokens
    config.cache_config = copy(config.cache_config)
    config.cache_config.block_size = max(group.block_size for group in scenario.kv_model.groups)
    config.cache_config.num_gpu_blocks = scenario.num_gpu_blocks
    config.cache_config.enable_prefix_caching = True
    config.cache_config.mamba_cache_mode = "align"
    config.scheduler_config = copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = engine.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = engine.max_num_batched_tokens
    config.scheduler_config.watermark = engine.watermark
    config.scheduler_config.async_scheduling = False
    return config


@cache
def _base_config() -> Any:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        return VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, enforce_eager=True),
            cache_config=CacheConfig(),
            scheduler_config=SchedulerConfig(max_model_len=8192, is_encoder_decoder=False, async_scheduling=False),
            device_config=DeviceConfig("cpu"),
        )
