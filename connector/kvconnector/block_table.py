"""Where the engine has the blocks of a plan: positions of a sequence become stretches of its block table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from kvconnector.jobs import Stretch
from kvcore.group_runs import GroupRuns
from kvcore.keys import BlockHash
from kvcore.spec import ModelSpec
from kvcore.types import GroupId, Run

NULL_BLOCK_ID = 0
"""The engine's placeholder in a block table, for a block it does not hold (any more)."""

Place: TypeAlias = tuple[int, range]
"""(index in `GroupRuns`, positions)."""


class Located(NamedTuple):
    """What to move, the place of each stretch of it, and the places for which the engine has no block."""

    stretches: tuple[Stretch, ...]
    places: list[Place]
    missing: list[Place]


def located(
    model: ModelSpec,
    blocks: GroupRuns,
    hashes_of: Callable[[int, Run], Sequence[BlockHash]],
    table: Sequence[Sequence[int]],
    states: Mapping[int, int],
) -> Located:
    """The blocks with their hashes and, by group, block ids of the table.

    `states`: block of the state, by group; it is not in the table, or not where it belongs.
    """
    stretches: list[Stretch] = []
    places: list[Place] = []
    missing: list[Place] = []
    for index, runs in enumerate(blocks):
        group, num_tokens = model.kinds[index]
        for run in runs:
            if group in states:
                block_ids = [states[group]] * (run[1] - run[0])
            else:
                block_ids = _block_ids(table[group], run, num_tokens, model.groups[group].block_size)
            hashes = hashes_of(index, run)
            for positions, is_held in _parts(run, block_ids):
                if is_held:
                    part = slice(positions.start - run[0], positions.stop - run[0])
                    stretches.append(Stretch(GroupId(group), positions, hashes[part], block_ids[part]))
                (places if is_held else missing).append((index, positions))
    return Located(tuple(stretches), places, missing)


def _block_ids(table: Sequence[int], run: Run, num_tokens: int, block_size: int) -> list[int]:
    """Of what lies `num_tokens` apart, which may be inside the engine's blocks; null beyond its table."""
    if num_tokens == block_size:
        block_ids = list(table[run[0] : run[1]])
    else:
        around = (((position + 1) * num_tokens - 1) // block_size for position in range(*run))
        block_ids = [table[block] for block in around if block < len(table)]
    return block_ids + [NULL_BLOCK_ID] * (run[1] - run[0] - len(block_ids))


def _parts(run: Run, block_ids: Sequence[int]) -> Iterator[tuple[range, bool]]:
    """The run in parts, and of each whether the engine has its blocks."""
    if NULL_BLOCK_ID not in block_ids:  # nearly always
        yield range(*run), True
        return
    start = run[0]
    for is_held, part in groupby(block_ids, lambda block_id: block_id != NULL_BLOCK_ID):
        end = start + len(list(part))
        yield range(start, end), is_held
        start = end
