"""A plan's blocks in the engine's block table: block by block, against the definition."""

from hypothesis import given
from hypothesis import strategies as st
from kvconnector.block_table import NULL_BLOCK_ID, located

from kvcore.runs import from_blocks
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow

MODEL = ModelSpec((FullAttention(32), SlidingWindow(16, 64), Recurrent(32)), hash_unit=16, hit_unit=16)
SIZES = (32, 16, 32)
BLOCKS = st.frozensets(st.integers(0, 20)).map(from_blocks)


def hash_of(index, position):
    return b"%d %d" % (index, position)


def hashes_of(index, run):
    return [hash_of(index, position) for position in range(*run)]


def by_definition(blocks, table, states):
    """(group, position, hash, block id) of what the engine has, and (index, position) of what it has not."""
    held, missing = [], []
    for index, runs in enumerate(blocks):
        group, num_tokens = MODEL.kinds[index]
        for position in (position for run in runs for position in range(*run)):
            block = ((position + 1) * num_tokens - 1) // SIZES[group]
            block_id = table[group][block] if block < len(table[group]) else NULL_BLOCK_ID
            block_id = states.get(group, block_id)
            if block_id == NULL_BLOCK_ID:
                missing.append((index, position))
            else:
                held.append((group, position, hash_of(index, position), block_id))
    return held, missing


@given(
    st.tuples(*[BLOCKS] * len(MODEL.kinds)),
    st.tuples(*[st.lists(st.sampled_from([NULL_BLOCK_ID, 5, 6, 7]), max_size=15)] * 3),
    st.dictionaries(st.just(2), st.integers(8, 9)),
)
def test_every_block_is_where_the_table_has_it(blocks, table, states):
    """States and tails included: a tail lies in a block that others begin in."""
    stretches, places, missing = located(MODEL, blocks, hashes_of, table, states)
    held, lacking = by_definition(blocks, table, states)
    assert [entry for stretch in stretches for entry in stretch.entries()] == held
    assert [(index, position) for index, positions in missing for position in positions] == lacking
    assert [(stretch.group, stretch.positions) for stretch in stretches] == [
        (MODEL.kinds[index].group, positions) for index, positions in places
    ]


def test_what_the_engine_holds_in_one_piece_is_one_stretch():
    table = (list(range(1, 9)), [3, 0, 0, 4, 5], [])
    stretches, places, missing = located(MODEL, (((0, 8),), ((0, 5),), (), ()), hashes_of, table, {})
    assert [len(stretch.positions) for stretch in stretches] == [8, 1, 2]
    assert (places, missing) == ([(0, range(8)), (1, range(1)), (1, range(3, 5))], [(1, range(1, 3))])
