"""What every `Router` must do: each rule is asserted of one router and any case."""

from dataclasses import FrozenInstanceError, dataclass, fields, replace

from hypothesis import strategies as st

from kvcore.routing.router import Arrival, Fact, InstanceId, Snapshot

PROMPT_LEN = 1_000
LENGTHS = st.sampled_from([0, 16, 32, 400])
# (waiting, running, queued tokens, prompt tokens). Few, so that instances often agree in some and differ in others.
LOADS = st.sampled_from(
    [(0, 0, 0, 0), (0, 1, 0, 400), (0, 3, 0, 432), (1, 0, 16, 16), (1, 0, 400, 400), (2, 1, 32, 432), (3, 3, 400, 832)]
)


@dataclass(frozen=True)
class Case:
    arrival: Arrival
    snapshots: tuple[Snapshot, ...]


@st.composite
def cases(draw, size):
    """Any arrival at `size` instances, with every fact there is."""
    first_name, taken_at_ns = draw(st.sampled_from([0, 7, 50])), draw(st.integers(0, 2))
    loads = draw(st.lists(LOADS, min_size=size, max_size=size))
    snapshots = [Snapshot(InstanceId(first_name + index), taken_at_ns, *load) for index, load in enumerate(loads)]
    cached_lens = tuple(draw(st.lists(LENGTHS, min_size=size, max_size=size)))
    session, pool_hit_len = draw(st.sampled_from([None, "a", "b"])), draw(st.none() | LENGTHS)
    return Case(Arrival(draw(st.integers(0, 9)), PROMPT_LEN, session, cached_lens, pool_hit_len), tuple(snapshots))


PAIRS = st.integers(1, 5).flatmap(lambda size: st.tuples(cases(size), cases(size)))
"""Two cases of as many instances."""


def with_facts_of(case, other, facts):
    """The case with those facts taken from the other one."""
    arrival, loads = case.arrival, other.snapshots if Fact.LOAD in facts else case.snapshots
    if Fact.SESSION in facts:
        arrival = replace(arrival, session=other.arrival.session)
    if Fact.PREFIX in facts:
        arrival = replace(arrival, cached_lens=other.arrival.cached_lens)
    if Fact.POOL in facts:
        arrival = replace(arrival, pool_hit_len=other.arrival.pool_hit_len)
    pairs = zip(loads, case.snapshots, strict=True)
    return Case(arrival, tuple(replace(load, instance=named.instance) for load, named in pairs))


def chooses_an_instance(router, case, _other):
    choice = router.choose(case.arrival, case.snapshots)
    assert type(choice) is int and 0 <= choice < len(case.snapshots)


def is_a_function_of_its_arguments(router, case, other):
    first = router.choose(case.arrival, case.snapshots)
    router.choose(other.arrival, other.snapshots)
    assert router.choose(case.arrival, case.snapshots) == first


def changes_nothing(router, case, _other):
    given_list = list(case.snapshots)
    router.choose(case.arrival, given_list)
    assert given_list == list(case.snapshots)
    for field in fields(router):
        try:
            setattr(router, field.name, 0)
        except FrozenInstanceError:
            continue
        raise AssertionError(f"{field.name} can be changed")


def reads_what_it_says(router, case, other):
    """Facts beyond `reads` change no choice."""
    altered = with_facts_of(case, other, set(Fact) - router.reads)
    assert router.choose(altered.arrival, altered.snapshots) == router.choose(case.arrival, case.snapshots)


def does_without_what_it_does_not_read(router, case, _other):
    arrival, reads = case.arrival, router.reads
    told = Arrival(
        arrival.number,
        arrival.prompt_len,
        arrival.session if Fact.SESSION in reads else None,
        arrival.cached_lens if Fact.PREFIX in reads else (),
        arrival.pool_hit_len if Fact.POOL in reads else None,
    )
    assert router.choose(told, case.snapshots) == router.choose(arrival, case.snapshots)


def ties_go_round(router, case, _other):
    """Instances that differ in nothing but their name take turns."""
    same_len = (case.arrival.cached_lens[0],) * len(case.snapshots)
    arrival = replace(case.arrival, session=None, cached_lens=same_len)
    snapshots = [replace(case.snapshots[0], instance=snapshot.instance) for snapshot in case.snapshots]
    assert router.choose(arrival, snapshots) == arrival.number % len(snapshots)


RULES = [
    chooses_an_instance,
    is_a_function_of_its_arguments,
    changes_nothing,
    reads_what_it_says,
    does_without_what_it_does_not_read,
    ties_go_round,
]
