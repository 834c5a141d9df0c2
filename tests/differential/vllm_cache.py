"""vLLM's own KVCacheManager over its own BlockPool, driven step by step, and what its pool then holds."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

from kvcore.spec import Recurrent
from tests.differential.vllm_models import vllm, vllm_groups

GROUP_ID_BYTES = 4


@dataclass(frozen=True)
class Prompt:
    """A sequence's content: `stream` names it up to `shared_len` as `parent`, then as itself."""

    stream: int
    num_tokens: int
    parent: int | None = None
    shared_len: int = 0

    def stream_at(self, unit_end):
        return self.stream if self.parent is None or unit_end > self.shared_len else self.parent


class VllmCache:
    """One manager for many sequences; the pool never evicts."""

    def __init__(self, subject, writer, num_blocks):
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.subject, self.writer, self.unit = subject, writer, subject.model.hashed_step
        config = vllm().interface.KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[self._group(group) for group in vllm_groups(subject, scaled=False)],
            prefix_cache_retention_interval=writer.retention,
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=1_000_000,
            scheduler_block_size=subject.model.alignment,
            hash_block_size=self.unit,
            use_eagle=subject.use_eagle,
            num_prefill_lookahead=writer.num_reprefilled + 1 if writer.num_reprefilled else 0,
            dcp_world_size=subject.context_parallel_size,
            enable_mamba_shared_prefix_checkpoint=writer.stops_at_junctions,
        )
        self.pool = self.manager.block_pool

    def _group(self, group):
        """The group with the states for drafts and the prefill checkpoints that the writer has."""
        writer, spec = self.writer, group.kv_cache_spec
        if isinstance(spec, vllm().interface.MambaSpec):
            spec = replace(
                spec,
                num_speculative_blocks=writer.num_draft_states,
                num_prefill_checkpoint_blocks=int(writer.checkpoint_step is not None),
                prefill_checkpoint_alignment=writer.checkpoint_step,
            )
        return replace(group, kv_cache_spec=spec)

    def request(self, prompt, request_id):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        def hashes(request):
            units = range(len(request.block_hashes), request.num_tokens // self.unit)
            return [b"%d:%d" % (prompt.stream_at((unit + 1) * self.unit), unit) for unit in units]

        tokens = list(range(prompt.num_tokens))
        return Request(request_id, tokens, SamplingParams(max_tokens=1_000), None, block_hasher=hashes)

    def find(self, request):
        """(hit blocks, hit length, junction) of vLLM's own lookup; the request keeps the junction."""
        blocks, hit_len, junction = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        return blocks, hit_len, junction or None

    def compute(self, request, step, num_lookahead=0, hit=None, loaded_len=0):
        """Allocate for the step and let vLLM enter what it fills. `hit`: (blocks, length), at a first step."""
        self.manager.new_step_starts()
        blocks, hit_len = hit or (None, 0)
        request.append_output_token_ids([0] * (step.num_tokens - request.num_tokens))
        request.num_computed_tokens = step.start - hit_len - loaded_len
        request.num_in_flight_tokens = step.num_in_flight
        allocated = self.manager.allocate_slots(
            request,
            step.end - step.start,
            num_new_computed_tokens=hit_len,
            new_computed_blocks=blocks,
            num_lookahead_tokens=num_lookahead,
            num_external_computed_tokens=loaded_len,
        )
        assert allocated is not None, "the pool is too small for the test"
        request.num_computed_tokens = step.end
        _, copied = self.manager.take_kv_cache_block_copies()
        self.pool.free_blocks(copied)
        self.manager.take_boundary_state_offloads()

    def free(self, request):
        self.manager.free(request)
        request.num_computed_tokens = 0

    def reset(self):
        assert self.manager.reset_prefix_cache(), "a block is still in use"

    def entries(self):
        """(group, stream, unit) of every entry of the pool's map."""
        found = set()
        for key in self.pool.cached_block_hash_to_block._cache:
            stream, unit = map(int, key[:-GROUP_ID_BYTES].split(b":"))
            found.add((int.from_bytes(key[-GROUP_ID_BYTES:], "big"), stream, unit))
        return found


def chunk_end(cache, request, start, num_new, max_tokens):
    """Where vLLM's scheduler ends a chunk of a model with recurrent groups."""
    from vllm.v1.core.sched.scheduler import Scheduler

    model, writer, manager = cache.subject.model, cache.writer, cache.manager
    sizes = [spec.block_size for spec in cache.subject.unscaled if isinstance(spec, Recurrent)]
    partial = model.hashed_step < max(sizes) and getattr(manager.coordinator, "enable_partial_hash_hits", False)
    scheduler = SimpleNamespace(
        block_size=max(sizes),
        cache_config=SimpleNamespace(block_size=max(sizes)),
        hash_block_size=model.hashed_step,
        num_hash_lookahead_tokens=0,
        mamba_partial_cache_hit=partial,
        use_eagle_block_drop=cache.subject.use_eagle,
        mamba_has_prefill_checkpoint_blocks=writer.checkpoint_step is not None,
        mamba_prefill_checkpoint_alignment=writer.checkpoint_step,
        max_num_scheduled_tokens=max_tokens,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        mamba_shared_prefix_checkpoint=partial and manager.mamba_shared_prefix_checkpoint,
    )
    return start + Scheduler._mamba_block_aligned_split(
        scheduler, request, num_new, start - request.num_computed_tokens
    )
