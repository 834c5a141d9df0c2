"""Hits that end inside a block: where the hash unit is finer than the block, and the engine can split it.

For such a model (`ModelSpec.splits_blocks`) a length counts in hash units. A group's objects in the pool are then
(B = units in a block, u = a unit of the sequence):

    full attention   blocks     block i holds units [i * B, (i + 1) * B)
                     tails      tail u holds units [u // B * B, u]: a block that was full up to there
    recurrent        states     state u is the one after unit u

Whatever has runs of each group has them here in that order: blocks and states at the group's index, then, behind the
groups, the tails of those that have some. The decisions are those of `ModelSpec.in_units`.
"""

from collections.abc import Sequence

from kvcore.runs import normalize, union
from kvcore.spec import ModelSpec
from kvcore.types import Run, Runs
from kvcore.units import div_ceil


def cover(model: ModelSpec, objects: Sequence[Runs]) -> tuple[Runs, ...]:
    """Per group, the units that the objects hold."""
    if not model.tail_groups:
        return tuple(objects)
    covered = [_scaled(runs, units_of(model, group)) for group, runs in enumerate(objects[: len(model.groups)])]
    for group, tails in zip(model.tail_groups, objects[len(model.groups) :], strict=True):
        size = units_of(model, group)
        held = ((unit // size * size, unit + 1) for start, end in tails for unit in range(start, end))
        covered[group] = union(covered[group], normalize(held))
    return tuple(covered)


def units_of(model: ModelSpec, group: int) -> int:
    """Units in one of the group's objects at its index: of a block; a state counts one."""
    return model.groups[group].block_size // model.hit_step if group in model.tail_groups else 1


def objects_for(model: ModelSpec, units: Sequence[Runs], present: Sequence[Runs]) -> tuple[Runs, ...]:
    """The objects to fetch for the units: whole blocks, and for a last piece its block or a tail, as is `present`."""
    if not model.tail_groups:
        return tuple(units)
    objects: list[Runs] = list(units)
    tails: list[Runs] = []
    for group, held in zip(model.tail_groups, present[len(model.groups) :], strict=True):
        blocks, tail = _blocks_and_tail(units[group], units_of(model, group), present[group], held)
        objects[group] = blocks
        tails.append(tail)
    return (*objects, *tails)


def _blocks_and_tail(units: Runs, num_units: int, blocks: Runs, tails: Runs) -> tuple[Runs, Runs]:
    """Blocks have `num_units` each. The units of a prefix-closed group are one run [start, end)."""
    if not units:
        return (), ()
    ((start, end),) = units
    first, last = start // num_units, end // num_units
    if end % num_units == 0 or any(a <= last < b for a, b in blocks):
        return normalize(((first, div_ceil(end, num_units)),)), ()
    reaching = (max(a, end - 1) for a, b in tails if b >= end)
    unit = min((unit for unit in reaching if unit < (last + 1) * num_units), default=end - 1)
    return normalize(((first, last),)), ((unit, unit + 1),)


def _scaled(runs: Runs, num_units: int) -> Runs:
    return tuple((start * num_units, end * num_units) for start, end in runs) if num_units > 1 else runs


def tail_units(model: ModelSpec, group: int, covered_len: int, proof_len: int) -> Run:
    """Tails that reach beyond `covered_len` in the block that begins or goes on there, up to `proof_len`; in tokens."""
    size = units_of(model, group)
    first = covered_len // model.hit_step
    block_end = (covered_len // model.groups[group].block_size + 1) * size
    return (first, min(block_end - 1, proof_len // model.hit_step))
