"""How vLLM's coordinators see a model: groups of one spec as one, full attention first (vLLM 0.32)."""

from dataclasses import dataclass, field, replace
from enum import Enum

from kvcore.errors import require
from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, ModelSpec, Recurrent, SlidingWindow
from kvcore.units import div_ceil


class Side(Enum):
    """Whose answer: that of the engine's own prefix cache, or that of its connector to a pool."""

    GPU = "v1/core/kv_cache_coordinator.py"
    POOL = "distributed/kv_transfer/kv_connector/v1/mooncake/store/coordinator.py"


@dataclass(frozen=True, slots=True)
class EngineRules:
    """What differs between versions of the engine, by name."""

    pool_windows_cover_retained: bool = False
    """The pool looks up, loads and stores `extra_retained_tokens` like a longer window (new in vLLM 0.33)."""

    junctions_cover_peek: bool = False
    """A draft group also keeps what a hit one block below a junction needs (new in vLLM 0.33)."""


VLLM_0_32 = EngineRules()
VLLM_0_33 = EngineRules(pool_windows_cover_retained=True, junctions_cover_peek=True)


@dataclass(frozen=True, slots=True)
class MergedGroup:
    """Groups of one spec, looked up together: a block is there when all of them have it."""

    spec: GroupSpec
    groups: tuple[int, ...]
    drafts: bool
    """Whether one of them is marked as an EAGLE group, which marks them all."""

    @property
    def reads_all(self) -> bool:
        """Whether it is asked once and only trimmed afterwards."""
        return isinstance(self.spec, FullAttention)

    @property
    def peeks(self) -> bool:
        """Whether it matches a piece beyond a hit, and drops it."""
        return self.drafts and not isinstance(self.spec, Recurrent)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model on one side of the engine.

    Raises InvalidArgument where the engine would fail: chunked local attention with a draft head, or with blocks of
    several sizes; an attention type that it has no manager for.
    """

    model: ModelSpec
    side: Side = Side.GPU
    rules: EngineRules = VLLM_0_32
    specs: tuple[GroupSpec, ...] = field(init=False)
    """Per group, the spec that this side works with."""
    merged: tuple[MergedGroup, ...] = field(init=False)
    """The cacheable groups in the order of the engine's lookup."""
    eagle_groups: frozenset[int] = field(init=False)
    """The groups that are marked, by themselves or by another group of their spec."""

    def __post_init__(self) -> None:
        covers = self.side is Side.POOL and self.rules.pool_windows_cover_retained
        specs = tuple(_covering(spec) if covers else spec for spec in self.model.groups)
        merged = _merged(specs, self.model.eagle_groups)
        for group in merged:
            _require_supported(self.model, group)
        object.__setattr__(self, "specs", specs)
        object.__setattr__(self, "merged", merged)
        marked = frozenset(index for group in merged if group.drafts for index in group.groups)
        object.__setattr__(self, "eagle_groups", marked)

    @property
    def alone(self) -> bool:
        """Whether one lookup is the whole answer. The GPU counts groups, the connector counts specs."""
        return len(self.model.groups if self.side is Side.GPU else self.merged) == 1

    @property
    def one_pass(self) -> bool:
        """Whether the engine looks at each group once: full attention beside one other spec."""
        return len(self.merged) == 2 and self.merged[0].reads_all

    @property
    def has_drafts(self) -> bool:
        """Whether a prompt's replay boundaries are those of a draft head."""
        return bool(self.model.eagle_groups if self.side is Side.GPU else self.eagle_groups)


def flagged_or_all(flagged: frozenset[int], num_groups: int) -> frozenset[int]:
    """Groups of a model with a draft head that the engine treats as such: all of them when none is flagged."""
    return flagged or frozenset(range(num_groups))


def hits_end_inside_blocks(groups: tuple[GroupSpec, ...], hash_unit: int, num_context_ranks: int) -> bool:
    """Whether the engine's hits end on the hash unit (`ModelSpec.hit_unit`); `groups` as sharding leaves them.

    Some recurrent group's block must be longer than the unit, or as long with context parallelism, and every other
    group be able to split its blocks or have blocks of one unit.
    """
    states = [group.block_size for group in groups if isinstance(group, Recurrent)]
    long_enough = any(size > hash_unit or (size == hash_unit and num_context_ranks > 1) for size in states)
    return long_enough and all(
        group.splits_blocks or group.block_size == hash_unit for group in groups if group.cacheable
    )


def window_blocks(spec: SlidingWindow) -> int:
    """Blocks that a hit of the engine needs, 0 for a window of one token; extra retained tokens do not count."""
    return div_ceil(spec.window - 1, spec.block_size)


def _covering(spec: GroupSpec) -> GroupSpec:
    if not isinstance(spec, SlidingWindow) or not spec.extra_retained_tokens:
        return spec
    return replace(spec, window=spec.window + spec.extra_retained_tokens, extra_retained_tokens=0)


def _merged(specs: tuple[GroupSpec, ...], marked: frozenset[int]) -> tuple[MergedGroup, ...]:
    members: dict[GroupSpec, list[int]] = {}
    for group, spec in enumerate(specs):
        if spec.cacheable:
            members.setdefault(spec, []).append(group)
    merged = [MergedGroup(spec, tuple(groups), not marked.isdisjoint(groups)) for spec, groups in members.items()]
    return tuple(sorted(merged, key=lambda group: not group.reads_all))


def _require_supported(model: ModelSpec, group: MergedGroup) -> None:
    known = isinstance(group.spec, FullAttention | SlidingWindow | ChunkedLocal | Recurrent)
    require(known, "groups", group.spec, "full, window, chunked local or recurrent: vLLM has no manager for others")
    if isinstance(group.spec, ChunkedLocal):
        require(not group.drafts, "eagle_groups", group.groups, "no chunked local group: vLLM refuses them")
        fits = group.spec.block_size == model.hit_step
        require(fits, "groups", group.spec, f"blocks of {model.hit_step} tokens: vLLM refuses others in chunked groups")
