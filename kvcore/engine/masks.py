"""Which blocks vLLM asks for, loads and keeps (the connector's masks, and `reachable_block_mask` of every manager).

None means every block, as in the engine; a list can be all True too, where the engine does not notice.
"""

from collections.abc import Iterable

from kvcore.engine.model import EngineModel, Side, window_blocks
from kvcore.errors import require
from kvcore.masks import Mask, block_range, spelled_out
from kvcore.runs import intersect, normalize
from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, Recurrent, SlidingWindow
from kvcore.types import Run, Runs
from kvcore.units import align_down, div_ceil


def load_mask(engine: EngineModel, hit_len: int) -> tuple[list[bool], ...]:
    """Per group, whether block i of a hit is loaded; nothing for groups that are not cached."""
    require(hit_len % engine.model.hit_step == 0, "hit_len", hit_len, f"a multiple of {engine.model.hit_step}")
    ends = (div_ceil(hit_len, spec.block_size) if spec.cacheable else 0 for spec in engine.specs)
    starts = (_first_loaded(spec, hit_len) for spec in engine.specs)
    return tuple(
        [False] * min(start, end) + [True] * (end - min(start, end)) for start, end in zip(starts, ends, strict=True)
    )


def lookup_mask(engine: EngineModel, aligned_len: int) -> tuple[Mask, ...]:
    """Per group, whether block i in [0, aligned_len // block_size) is asked for; as if no writer were sparse."""
    asked = lookup_runs(engine, aligned_len)
    ends = (aligned_len // spec.block_size for spec in engine.specs)
    return tuple(_mask(runs, (0, end)) for runs, end in zip(asked, ends, strict=True))


def lookup_runs(engine: EngineModel, aligned_len: int) -> tuple[Runs | None, ...]:
    """Per group, the blocks of the first `aligned_len` tokens that are asked for; None: all of them."""
    ends = (aligned_len // spec.block_size for spec in engine.specs)
    return tuple(reachable_runs(engine, group, (0, end), None, ()) for group, end in enumerate(ends))


def store_mask(
    engine: EngineModel,
    aligned_len: int,
    start_len: int = 0,
    retention: int | None = None,
    num_prompt_tokens: int | None = None,
) -> tuple[Mask, ...]:
    """Per group, whether the i-th block from `start_len` up to `aligned_len` is kept; as `store_runs`."""
    blocks = tuple(block_range(spec, start_len, aligned_len) for spec in engine.specs)
    kept = store_runs(engine, blocks, retention, num_prompt_tokens)
    return tuple(_mask(runs, run) for runs, run in zip(kept, blocks, strict=True))


def store_runs(
    engine: EngineModel,
    blocks: tuple[Run, ...],
    retention: int | None = None,
    num_prompt_tokens: int | None = None,
    junction: int | None = None,
) -> tuple[Runs | None, ...]:
    """Per group, what is kept of the range `blocks[group]`; None: all of it.

    `retention`: None, 0 or a multiple of the alignment, in tokens. `num_prompt_tokens` None: no replay boundary is
    known. `junction`: a length at which another request left this one's prefix (the GPU's cache knows some).
    """
    require_retention(engine, retention)
    return tuple(
        _kept(engine, group, run, retention, kept_boundaries(engine, group, num_prompt_tokens, junction))
        for group, run in enumerate(blocks)
    )


def require_retention(engine: EngineModel, retention: int | None) -> None:
    """Raise InvalidArgument unless it is None, 0 or a multiple of the alignment."""
    step = engine.model.alignment
    require(not retention or (retention > 0 and retention % step == 0), "retention", retention, f"a multiple of {step}")


def cached_len(engine: EngineModel, group: int, num_computed_tokens: int, num_reprefilled: int = 0) -> int:
    """Tokens of a running request whose blocks the group may enter into the GPU's prefix cache.

    One group enters them at once. Several wait for a whole alignment unit, and a draft group for its next block too.
    `num_reprefilled`: the last tokens that a draft head of several modules computes again. Beside other groups only
    draft groups wait for them.
    """
    step, settled_len = engine.model.hit_step, max(0, num_computed_tokens - num_reprefilled)
    if len(engine.model.groups) == 1:
        return settled_len
    aligned = num_computed_tokens if engine.model.splits_blocks else align_down(num_computed_tokens, step)
    if not aligned or group not in engine.eagle_groups:
        return aligned
    if engine.model.splits_blocks:
        return settled_len
    return min(settled_len, align_down(settled_len, step) + engine.specs[group].block_size)


def _first_loaded(spec: GroupSpec, hit_len: int) -> int:
    match spec:
        case SlidingWindow():
            return max(0, hit_len // spec.block_size - max(1, window_blocks(spec)))
        case ChunkedLocal():
            return align_down(hit_len, spec.chunk) // spec.block_size
        case Recurrent():
            return max(0, div_ceil(hit_len, spec.block_size) - 1)
    return 0


def _kept(engine: EngineModel, group: int, run: Run, retention: int | None, boundaries: tuple[int, ...]) -> Runs | None:
    """The connector never stores a recurrent state by its position."""
    if engine.side is Side.POOL and isinstance(engine.specs[group], Recurrent):
        return ()
    return reachable_runs(engine, group, run, retention, boundaries)


def reachable_runs(
    engine: EngineModel, group: int, run: Run, retention: int | None, boundaries: tuple[int, ...]
) -> Runs | None:
    """The part of `run` that a hit can need, at the `boundaries` too; None: the engine keeps all of it."""
    spec = engine.specs[group]
    step = engine.model.alignment if engine.side is Side.POOL else engine.model.hit_step
    if not spec.cacheable:
        return ()
    if isinstance(spec, FullAttention | ChunkedLocal) or (isinstance(spec, Recurrent) and retention is None):
        return None
    shift = int(group in engine.eagle_groups and not isinstance(spec, Recurrent))
    needed = shift + (window_blocks(spec) if isinstance(spec, SlidingWindow) else 1)
    segment = (step if retention is None else retention) // spec.block_size
    if segment and (needed >= segment if isinstance(spec, SlidingWindow) else segment <= 1):
        return None
    ends = list(_segment_ends(run, segment, needed, shift))
    if retention is not None:
        ends += (align_down(boundary, step) // spec.block_size + shift for boundary in boundaries)
    return intersect(normalize((max(0, end - needed), end) for end in ends), normalize((run,)))


def _segment_ends(run: Run, segment: int, needed: int, shift: int) -> Iterable[int]:
    """Where the kept tails of the segments that reach into `run` end."""
    if not segment:
        return ()
    start, end = run
    first = align_down(max(0, start - shift), segment) + segment + shift
    return range(first, end + needed, segment)


def kept_boundaries(
    engine: EngineModel, group: int, num_prompt_tokens: int | None, junction: int | None
) -> tuple[int, ...]:
    """Lengths whose blocks the group keeps under any retention; see `store_runs`."""
    replay = () if num_prompt_tokens is None else _replay_boundaries(engine, num_prompt_tokens)
    return (*replay, *_junctions(engine, group, junction))


def _replay_boundaries(engine: EngineModel, num_prompt_tokens: int) -> tuple[int, ...]:
    if not engine.has_drafts:
        return (num_prompt_tokens - 1,)
    step = engine.model.alignment
    lengths = (align_down(num_prompt_tokens - 1, step), align_down(num_prompt_tokens, step))
    return tuple(max(0, length - step) for length in lengths)


def _junctions(engine: EngineModel, group: int, junction: int | None) -> tuple[int, ...]:
    if junction is None:
        return ()
    covers_peek = engine.rules.junctions_cover_peek and group in engine.eagle_groups
    return (junction, junction - engine.specs[group].block_size) if covers_peek else (junction,)


def _mask(runs: Runs | None, run: Run) -> Mask:
    return None if runs is None else spelled_out(runs, run)
