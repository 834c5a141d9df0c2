"""Jobs in stretches: block by block they are what they say, and a rank's part is told of as of the whole."""

from hypothesis import given
from hypothesis import strategies as st
from kvconnector.jobs import Ended, Entry, StoreJob, Stretch

from kvcore.ranks import RankLayout, Sharding


@st.composite
def stretches(draw):
    made = []
    for group, start, length in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 9)))):
        positions = range(start, start + length)
        hashes = [b"%d %d" % (group, position) for position in positions]
        made.append(Stretch(group, positions, hashes, [100 * group + position for position in positions]))
    return tuple(made)


def by_hand(made):
    return [
        Entry(group, position, b"%d %d" % (group, position), 100 * group + position)
        for group, positions, _, _ in made
        for position in positions
    ]


@given(stretches())
def test_a_job_is_its_blocks_in_order(made):
    job = StoreJob(1, "a", "namespace", made)
    assert job.entries == by_hand(made)
    assert job.num_entries == len(job.entries)


@given(stretches(), st.sampled_from([1, 2, 4]), st.sets(st.integers(0, 200)))
def test_each_rank_has_its_turns_and_tells_of_them_as_of_the_whole(made, num_ranks, unlucky):
    """Ranks that hold the same bytes: each block is one rank's to store, and its failure is known by its number."""
    whole, cut = StoreJob(1, "a", "namespace", made), Sharding(RankLayout(tp=num_ranks), num_kv_heads=1)
    stored, failed = [], []
    for rank in range(num_ranks):
        part = whole.only(lambda group, positions, rank=rank: cut.turns(rank, group, positions))
        assert all(cut.owner(0, entry.group, entry.position) == rank for entry in part.entries)
        lost = tuple(index for index, entry in enumerate(part.entries) if entry.block_id in unlucky)
        stored += part.entries
        told = part.whole(Ended(1, 1, lost, lost))
        assert told.gone == told.failed
        failed += told.failed
    assert sorted(stored) == sorted(whole.entries)
    assert sorted(failed) == [index for index, entry in enumerate(whole.entries) if entry.block_id in unlucky]
