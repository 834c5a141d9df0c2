"""Random models and presence patterns, built twice: for kvcore and for the installed vLLM.

Nothing is imported from vLLM at the top, so that the tests can be collected everywhere.
"""

import functools
import math
import random
from dataclasses import dataclass, replace

from kvcore.engine.hit import Tails
from kvcore.engine.model import EngineModel, EngineRules, Side, flagged_or_all, hits_end_inside_blocks
from kvcore.runs import from_blocks
from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, ModelSpec, Recurrent, Scratch, SlidingWindow
from kvcore.types import Runs

SIZES = ((4,), (1, 2, 4), (2, 4, 8), (2, 3, 6), (3, 9), (4, 6), (16, 64), (16, 32, 64), (5, 10))
"""Block sizes that one model mixes."""


# -- groups that differ in more than kvcore's spec says: a `layout` keeps them apart as vLLM's specs are --------------


@dataclass(frozen=True, slots=True)
class LaidOutFull(FullAttention):
    layout: str = ""


@dataclass(frozen=True, slots=True)
class LaidOutWindow(SlidingWindow):
    layout: str = ""


@dataclass(frozen=True)
class VllmModel:
    """A model as kvcore sees it, and what vLLM needs to know besides."""

    model: ModelSpec
    unscaled: tuple[GroupSpec, ...]
    """The groups before context parallelism."""
    context_parallel_size: int
    flagged: frozenset[int]
    """Groups that vLLM is told hold draft layers."""
    use_eagle: bool
    uniform: frozenset[int]
    """Groups that are wrapped as several layers of one type."""


# -- random models ----------------------------------------------------------------------------------------------------


def random_model(rng, side):
    family = rng.choice(["mixed"] * 6 + ["single", "chunked", "partial", "partial", "sharded", "windows", "windows"])
    groups, cp = FAMILIES[family](rng, side)
    scaled = tuple(_scaled(group, cp) for group in groups)
    use_eagle = rng.random() < 0.5 or family == "windows"
    draftable = [index for index, group in enumerate(groups) if group.cacheable and not isinstance(group, ChunkedLocal)]
    flagged = frozenset(index for index in draftable if rng.random() < 0.4) if use_eagle else frozenset()
    if any(isinstance(group, ChunkedLocal) for group in groups):
        use_eagle = bool(flagged)  # vLLM fails when it flags them all
    marked = flagged_or_all(flagged, len(groups)) if use_eagle else frozenset()
    unit = _hash_unit(rng, scaled, family)
    inside = len(groups) > 1 and hits_end_inside_blocks(scaled, unit, cp)
    model = ModelSpec(scaled, marked, unit, unit if inside else None)
    uniform = frozenset(index for index in range(len(groups)) if side is Side.POOL and rng.random() < 0.2)
    return VllmModel(model, groups, cp, flagged, use_eagle, uniform)


def _mixed(rng, side):
    sizes = rng.choice(SIZES)
    kinds = ["full", "window", "window", "recurrent", "scratch"]
    return _groups(rng, side, kinds, sizes, rng.randint(1, 6)), 1


def _single(rng, side):
    group = _group(rng, side, rng.choice(["full", "window", "recurrent", "chunked"]), rng.choice((1, 2, 4, 16)))
    return (group,) * (1 if rng.random() < 0.6 else rng.randint(2, 3)), 1


def _windows(rng, side):
    """Several windows, mostly of draft layers: where proofs get out of date."""
    return _groups(rng, side, ["window", "window", "window", "full"], rng.choice(SIZES[:4]), rng.randint(2, 4)), 1


def _chunked(rng, side):
    size = rng.choice((2, 4, 16))
    groups = _groups(rng, side, ["full", "window", "chunked", "recurrent"], (size,), rng.randint(0, 4))
    return (*groups, _group(rng, side, "chunked", size)), 1


def _partial(rng, side):
    """Full and recurrent groups, and whatever has blocks of one hash unit."""
    unit, cp = rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
    sizes = tuple(unit * factor for factor in rng.choice(((1, 2), (2, 4), (1, 2, 4), (3, 6), (2,), (1,))))
    groups = _groups(rng, side, ["full", "full", "recurrent"], sizes, rng.randint(1, 4))
    groups += (_group(rng, side, "recurrent", rng.choice(sizes)),)
    if rng.random() < 0.3:
        groups += (_replicated(_group(rng, side, "window", unit)),)
    if rng.random() < 0.2:
        groups += (_group(rng, side, "scratch", unit),)
    return groups, cp


def _sharded(rng, side):
    """Decode context parallelism: full attention sharded, recurrent groups and drafts not."""
    sizes = rng.choice(SIZES)
    groups = _groups(rng, side, ["full", "full", "recurrent"], sizes, rng.randint(1, 4))
    if rng.random() < 0.5:
        groups += (_replicated(_group(rng, side, "window", rng.choice(sizes))),)
    if rng.random() < 0.3:
        groups += (_replicated(_group(rng, side, "full", rng.choice(sizes))),)
    return groups, rng.choice((2, 2, 3))


FAMILIES = {
    "mixed": _mixed,
    "single": _single,
    "windows": _windows,
    "chunked": _chunked,
    "partial": _partial,
    "sharded": _sharded,
}


def _groups(rng, side, kinds, sizes, count):
    groups = [_group(rng, side, rng.choice(kinds), rng.choice(sizes)) for _ in range(count)]
    if not any(group.cacheable for group in groups):
        groups.append(_group(rng, side, "full", rng.choice(sizes)))
    if len(groups) > 1 and rng.random() < 0.3:
        groups[-1] = rng.choice([group for group in groups if group.cacheable])
    return tuple(groups)


def _group(rng, side, kind, size):
    layout = rng.choice(["", "", "wide", "latent"])
    match kind:
        case "full":
            return LaidOutFull(size, layout if side is Side.GPU or rng.random() < 0.8 else "sink")
        case "window":
            window = rng.choice(
                [1, 2, 2, rng.randint(2, 4 * size), rng.randint(2, 4 * size), rng.randint(2, 12 * size)]
            )
            return LaidOutWindow(size, window, rng.choice((0,) * 7 + (1, 2, size)), layout)
        case "recurrent":
            return Recurrent(size)
        case "chunked":
            return ChunkedLocal(size, rng.choice([size * rng.randint(1, 5), rng.randint(1, 5 * size)]))
    return Scratch(size)


def _replicated(group):
    return replace(group, layout=f"{group.layout} replicated")


def _scaled(group, cp):
    return replace(group, block_size=group.block_size * cp) if _is_sharded(group) else group


def _is_sharded(group):
    return isinstance(group, FullAttention) and not layout_of(group).endswith("replicated")


def layout_of(group):
    return getattr(group, "layout", "")


def _hash_unit(rng, groups, family):
    """Mostly the greatest common divisor; vLLM's single group hashes its own block, which the connector need not."""
    sizes = [group.block_size for group in groups if group.cacheable]
    unit = math.gcd(*sizes)
    if len(groups) == 1 or rng.random() < 0.7:
        return unit
    return rng.choice([divisor for divisor in range(1, unit + 1) if unit % divisor == 0])


def as_told(model):
    """A model whose draft groups vLLM is told of one by one."""
    drafts = model.eagle_groups
    return VllmModel(model, model.groups, 1, drafts, bool(drafts), frozenset())


# -- random presence --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Presence:
    """What the groups of a model have of a sequence of `num_tokens`: keys by hash unit, and the same in kvcore's form.

    Unit u is the key of the tokens [0, (u + 1) * unit).
    """

    num_tokens: int
    units: tuple[frozenset[int], ...]
    blocks: tuple[Runs, ...]
    tails: tuple[Tails, ...]


def random_presence(rng, model):
    """Mostly what some writer left: all of it, or what a few boundaries need, less a few keys."""
    num_tokens = rng.randint(0, rng.choice((3, 6, 12)) * model.alignment + 3)
    shared = rng.choice(["all", "all", "boundaries", "boundaries", "prefix", "holes", "any"])
    lengths = _boundaries(rng, model, num_tokens)
    units = [_units(rng, model, group, num_tokens, shared, lengths) for group in range(len(model.groups))]
    return presence_of(model, num_tokens, units)


def presence_of(model, num_tokens, units):
    unit = model.hashed_step
    blocks = [
        from_blocks((u + 1) * unit // spec.block_size - 1 for u in keys if (u + 1) * unit % spec.block_size == 0)
        for spec, keys in zip(model.groups, units, strict=True)
    ]
    tails = [
        tuple((u + 1) * unit for u in sorted(keys) if (u + 1) * unit % spec.block_size)
        for spec, keys in zip(model.groups, units, strict=True)
    ]
    return Presence(num_tokens, tuple(map(frozenset, units)), tuple(blocks), tuple(tails))


def _units(rng, model, group, num_tokens, shared, lengths):
    unit, size = model.hashed_step, model.groups[group].block_size
    count = num_tokens // unit
    kind = shared
    if shared == "any" or rng.random() < 0.1:
        kind = rng.choice(["all", "prefix", "tail", "boundaries", "holes", "few", "none"])
    if not model.groups[group].cacheable or kind == "none":
        return set()
    ends = {u for u in range(count) if (u + 1) * unit % size == 0}
    everything = ends | {u for u in range(count) if model.splits_blocks and rng.random() < 0.3}
    cut = rng.randint(0, count)
    present = {
        "all": lambda: everything,
        "prefix": lambda: {u for u in everything if u < cut},
        "tail": lambda: {u for u in everything if u >= cut},
        "boundaries": lambda: _at_boundaries(rng, model, group, lengths) & set(range(count)),
        "holes": lambda: {u for u in everything if rng.random() < 0.8},
        "few": lambda: {u for u in everything if rng.random() < 0.3},
    }[kind]()
    lost = rng.choice((0, 0, 0, 0, 1, 3))
    return present - {rng.randrange(max(1, count)) for _ in range(lost)}


def _boundaries(rng, model, num_tokens):
    highest = num_tokens // model.hit_step
    return [rng.randint(0, highest) * model.hit_step for _ in range(rng.randint(1, 3))]


def _at_boundaries(rng, model, group, lengths):
    """The units of what a writer keeps for hits at these lengths, now and then without the piece that proves one."""
    unit, size = model.hashed_step, model.groups[group].block_size
    present = set()
    for length in lengths:
        proven = rng.random() < 0.7
        first, last = model.proof_blocks(group, length) if proven else model.groups[group].needed_blocks(length)
        present |= {(block + 1) * size // unit - 1 for block in range(first, last)}
        end = length + (model.margins[group] if proven else 0)
        if end % size:
            present.add(end // unit - 1)
    return present


# -- the same for vLLM ------------------------------------------------------------------------------------------------


@functools.cache
def vllm():
    """vLLM's modules under the names that are used here, its specs registered."""
    import types

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import coordinator as store
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core import kv_cache_coordinator as coordinator
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry._ensure_registered()
    return types.SimpleNamespace(
        torch=torch, store=store, interface=interface, coordinator=coordinator, utils=utils, managers=managers
    )


def installed_rules():
    """The rules of the installed vLLM, recognised by what it can do."""
    return EngineRules(
        pool_windows_cover_retained=hasattr(vllm().store, "_coverage_spec"),
        junctions_cover_peek=hasattr(vllm().utils, "trim_null_head"),
    )


def engine_of(subject, side):
    return EngineModel(subject.model, side, installed_rules())


@functools.cache
def vllm_spec(group):
    interface, torch = vllm().interface, vllm().torch
    common = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 2 if layout_of(group).startswith("wide") else 1,
        "dtype": torch.float16,
        "dcp_sharded": _is_sharded(group),
    }
    match group:
        case LaidOutFull(layout="sink"):
            return interface.SinkFullAttentionSpec(**common, sink_len=group.block_size)
        case LaidOutFull(layout="latent" | "latent replicated"):
            return interface.MLAAttentionSpec(**common)
        case FullAttention():
            return interface.FullAttentionSpec(**common)
        case SlidingWindow():
            latent = layout_of(group).startswith("latent")
            cls = interface.SlidingWindowMLASpec if latent else interface.SlidingWindowSpec
            return cls(**common, sliding_window=group.window, extra_retained_tokens=group.extra_retained_tokens)
        case ChunkedLocal():
            return interface.ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.chunk)
        case Recurrent():
            return interface.MambaSpec(
                block_size=group.block_size, shapes=((1,),), dtypes=(torch.float16,), mamba_cache_mode="align"
            )
        case Scratch():
            return interface.CircularBufferSpec(**common)
    raise AssertionError(group)


def vllm_groups(subject, scaled):
    """vLLM's group specs, with the block sizes that context parallelism leaves or those before it."""
    interface, utils = vllm().interface, vllm().utils
    groups = []
    for index, group in enumerate(subject.unscaled):
        spec = vllm_spec(group)
        if index in subject.uniform:
            layers = {f"{index}.{layer}": spec for layer in range(2)}
            spec = interface.UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=layers)
        if scaled:
            spec = utils.resolve_dcp_kv_cache_spec(spec, subject.context_parallel_size)
        groups.append(interface.KVCacheGroupSpec([str(index)], spec, is_eagle_group=index in subject.flagged))
    return groups


def gpu_coordinator(subject, retention=None):
    """vLLM's coordinator of its own prefix cache."""
    config = vllm().interface.KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[],
        kv_cache_groups=vllm_groups(subject, scaled=False),
        prefix_cache_retention_interval=retention,
    )
    return vllm().coordinator.get_kv_cache_coordinator(
        config,
        max_model_len=1_000_000,
        max_in_flight_tokens=1_000_000,
        use_eagle=subject.use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=subject.context_parallel_size,
        pcp_world_size=1,
        scheduler_block_size=subject.model.alignment,
        hash_block_size=subject.model.hashed_step,
    )


def cacheable(subject):
    """The groups that vLLM's connector is given."""
    return [index for index, group in enumerate(subject.model.groups) if group.cacheable]


def pool_coordinator(subject, retention=None):
    """The in-tree Mooncake connector's coordinator."""
    groups = vllm_groups(subject, scaled=True)
    return vllm().store.MooncakeStoreCoordinator(
        [groups[index] for index in cacheable(subject)],
        scheduler_block_size=subject.model.alignment,
        hash_block_size=subject.model.hashed_step,
        use_eagle=subject.use_eagle,
        retention_interval=retention,
        enable_partial_hash_hits=subject.model.splits_blocks,
    )


class FakePool:
    """As much of vLLM's BlockPool as a lookup reads: presence by group and unit."""

    def __init__(self, model, presence):
        self.hash_block_size = model.hashed_step
        self.null_block = object()
        self.units = presence.units

    def get_cached_block(self, block_hash, group_ids):
        unit = int(block_hash)
        return [object()] * len(group_ids) if all(unit in self.units[group] for group in group_ids) else None


def block_hashes(model, num_tokens):
    """One per hash unit; each is its own index."""
    return [b"%d" % unit for unit in range(num_tokens // model.hashed_step)]


def gpu_hit_len(coordinator, model, presence, limit):
    """What the GPU's coordinator finds when its pool has exactly `presence`."""
    pool = FakePool(model, presence)
    coordinator.block_pool = pool
    for manager in coordinator.single_type_managers:
        manager.block_pool = pool
    _, hit_len, _ = coordinator.find_longest_cache_hit(block_hashes(model, presence.num_tokens), limit)
    return hit_len


def pool_hit_len(coordinator, subject, presence, limit):
    """What the connector's coordinator finds when the store has exactly `presence`."""
    index_of = {group: index for index, group in enumerate(cacheable(subject))}
    keys = {(index_of[group], b"%d" % unit) for group in index_of for unit in presence.units[group]}
    pool = vllm().store.ExternalCachedBlockPool(subject.model.hashed_step, keys)
    _, hit_len = coordinator.find_longest_cache_hit(block_hashes(subject.model, presence.num_tokens), limit, pool)
    return hit_len


def subjects(side, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng, random_model(rng, side)
