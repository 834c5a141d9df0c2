"""Every invariant accepts a run as it was, and rejects it once it was tampered with."""

import re
from dataclasses import dataclass

import pytest

from kvcore.frontier import Frontier
from kvsim.events import EventLog, Kind
from kvsim.invariants import INVARIANTS, InvariantBroken, check
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.sequence import Status
from kvsim.workload.source import trace_of
from tests.support import PROJECT

SMALL = [
    "cluster.instances=2",
    "engine.num_gpu_blocks=80",
    "engine.max_num_batched_tokens=256",
    "workload.sessions=6",
    "workload.turns=4",
    "workload.common_len=128",
    "workload.first_len=150",
    "workload.turn_len=100",
    "workload.output_len=20",
]


def finished_run(*settings, name="pool-16"):
    scenario = load(name, [*SMALL, *settings])
    done = simulation(scenario, trace_of(scenario))
    done.run()
    return done


def rows(log):
    flat = log.rows.tolist()
    return [flat[at : at + EventLog.WIDTH] for at in range(0, len(flat), EventLog.WIDTH)]


def rewrite(log, changed):
    """Replace the log's rows."""
    del log.rows[:]
    for time_ps, kind, request, a, b in changed:
        log.add(time_ps, Kind(kind), request, a, b)


def first(log, kind):
    return next(index for index, row in enumerate(rows(log)) if row[1] == kind)


def change(log, kind, **cells):
    """Change cells of the first event of a kind."""
    names = ["time_ps", "kind", "request", "a", "b"]
    changed = rows(log)
    for name, value in cells.items():
        changed[first(log, kind)][names.index(name)] = value
    rewrite(log, changed)


def machine(done, having=lambda decisions: any(decisions.loaded)):
    return next(sequence.kv for sequence in done.cluster.sequences if having(sequence.kv.decisions))


# --- one way to break each, and some more -----------------------------------------------------------------------------


def arrives_twice(done):
    rewrite(done.log, [rows(done.log)[0], *rows(done.log)])


def never_ends(done):
    at = first(done.log, Kind.FINISHED)
    rewrite(done.log, rows(done.log)[:at] + rows(done.log)[at + 1 :])


def ends_twice(done):
    last = rows(done.log)[-1]
    finished = rows(done.log)[first(done.log, Kind.FINISHED)]
    rewrite(done.log, [*rows(done.log), [last[0], *finished[1:]]])


def never_admitted(done):
    at = first(done.log, Kind.ADMITTED)
    rewrite(done.log, rows(done.log)[:at] + rows(done.log)[at + 1 :])


def ends_early(done):
    change(done.log, Kind.FINISHED, a=19)


def keeps_a_block(done):
    blocks = done.instances[1].scheduler.blocks
    holding = blocks.hold(blocks.match(done.cluster.sequences[0].segments, 0))
    blocks.allocate(holding, 1)


def is_left_in_the_queue(done):
    done.instances[0].scheduler.add(done.cluster.sequences[0])


def is_left_running(done):
    done.cluster.sequences[3].status = Status.RUNNING


def transfer_does_not_end(done):
    done.pool.paths[0].get_link.transfer(10**12, lambda: None)
    done.clock._env.run(until=done.clock.now_ps + 10**9)


def bytes_vanish(done):
    link = done.pool.paths[0].put_link
    link.moved_bytes -= done.scenario.block_bytes[0]


def bytes_are_got_for_nothing(done):
    done.pool.store.counters.got -= 1


def time_runs_backwards(done):
    change(done.log, Kind.FIRST_TOKEN, time_ps=0)


def finishes_before_its_first_token(done):
    changed = rows(done.log)
    token = first(done.log, Kind.FIRST_TOKEN)
    request = changed[token][2]
    done_at = next(at for at, row in enumerate(changed) if row[1] == Kind.FINISHED and row[2] == request)
    changed[token][1:], changed[done_at][1:] = changed[done_at][1:], changed[token][1:]
    rewrite(done.log, changed)


def finds_unasked(done):
    machine(done).decisions.looked_up = ((),)


def loads_unproven(done):
    machine(done).decisions.found = ((),)


def loads_more_than_there_was(done):
    done.pool.store.counters.got = 1


def loads_what_nobody_stored(done):
    for sequence in done.cluster.sequences:
        sequence.kv.decisions.stored = ((),)


def loads_before_any_put(done):
    done.pool.store.counters.put = 0


def a_store_is_never_reported(done):
    kv = machine(done)
    kv._stores[99] = ((),)


def a_rejected_block_is_kept_quiet(done):
    done.pool.store.counters.rejected += 1


def a_report_is_lost(done):
    kept = [row for row in rows(done.log) if row[1] != Kind.STORED]
    rewrite(done.log, kept)


def hit_is_not_aligned(done):
    change(done.log, Kind.ADMITTED, a=7)


def whole_prompt_hits(done):
    admitted = rows(done.log)[first(done.log, Kind.ADMITTED)]
    change(done.log, Kind.ADMITTED, a=160 - admitted[4])
    rewrite(done.log, [[*row[:3], 160, row[4]] if row[1] == Kind.ARRIVED else row for row in rows(done.log)])


def loads_fail_for_ever(done):
    loaded = rows(done.log)[first(done.log, Kind.LOADED)]
    rewrite(done.log, [*rows(done.log), *[[rows(done.log)[-1][0], *loaded[1:4], 1]] * 3])


def an_object_is_lost(done):
    done.pool.store.num_objects -= 1


def pool_overflows(done):
    done.pool.store._watermark_bytes = 0


def log_has_another_hit(done):
    change(done.log, Kind.ADMITTED, a=16)


def log_hides_a_late_miss(done):
    machine(done).decisions.late_misses = 1


def a_round_is_not_told(done):
    done.instances[1].client.num_asked -= 1


def the_pool_finds_more_than_it_says(done):
    done.pool.store.counters.found += 1


BROKEN = [
    (1, arrives_twice), (1, never_ends), (1, ends_twice), (1, never_admitted), (1, ends_early),
    (2, keeps_a_block), (2, is_left_in_the_queue), (2, is_left_running),
    (4, transfer_does_not_end), (4, bytes_vanish), (4, bytes_are_got_for_nothing),
    (5, time_runs_backwards), (5, finishes_before_its_first_token),
    (7, finds_unasked), (7, loads_unproven), (7, loads_more_than_there_was),
    (8, loads_what_nobody_stored), (8, loads_before_any_put),
    (9, a_store_is_never_reported),
    (10, a_rejected_block_is_kept_quiet), (10, a_report_is_lost),
    (11, hit_is_not_aligned), (11, whole_prompt_hits),
    (14, loads_fail_for_ever),
    (19, an_object_is_lost), (19, pool_overflows),
    (20, log_has_another_hit), (20, log_hides_a_late_miss),
    (21, a_round_is_not_told), (21, the_pool_finds_more_than_it_says),
]  # fmt: skip


@pytest.mark.parametrize(("number", "tamper"), BROKEN, ids=[f"{number}-{tamper.__name__}" for number, tamper in BROKEN])
def test_a_tampered_run_is_rejected(number, tamper, monkeypatch):
    done = finished_run()
    tamper(done)
    only = {number: INVARIANTS[number]}
    monkeypatch.setattr("kvsim.invariants.INVARIANTS", only)
    with pytest.raises(InvariantBroken, match=rf"^invariant {number}: ") as broken:
        check(done)
    assert broken.value.number == number
    assert isinstance(broken.value, AssertionError)


def test_each_invariant_has_a_way_to_break_it():
    assert {number for number, _ in BROKEN} == set(INVARIANTS)


def test_a_dialogue_that_repeats_itself_is_noticed(monkeypatch):
    def prefix_from_the_start(frontier, length):
        frontier._asked_blocks = [0]
        return prefix(frontier, length)

    prefix = Frontier._prefix
    many_blocks = ["engine.block_size=1", "engine.num_gpu_blocks=1500"]
    assert check(finished_run(*many_blocks)) == "ok"
    monkeypatch.setattr(Frontier, "_prefix", prefix_from_the_start)
    with pytest.raises(InvariantBroken, match=r"^invariant 21: "):
        check(finished_run(*many_blocks))


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("engine.num_gpu_blocks=50",),
        ("engine.num_gpu_blocks=50", "engine.max_num_batched_tokens=32"),
        ("pool.segment_bytes_per_instance=40e6",),
        ("pool.segment_bytes_per_instance=40e6", "pool.lease_ttl_ms=0"),
        ("pool.lookup_deadline_ms=1", "pool.lookup_rtt_us=2000"),
        ("link.bandwidth_bytes_per_s=1e6",),
        ("cluster.instances=5", "workload.sessions=30"),
    ],
    ids=" ".join,
)
def test_runs_under_pressure_keep_them(settings):
    assert check(finished_run(*settings)) == "ok"


def test_a_run_without_pool_and_one_with_rejections_keep_them():
    assert check(finished_run(name="nopool-16")) == "ok"
    done = finished_run("engine.num_gpu_blocks=25", name="nopool-16")
    kinds = [row[1] for row in rows(done.log)]
    assert Kind.REJECTED in kinds and Kind.FINISHED in kinds
    assert check(done) == "ok"


def test_the_document_and_the_code_have_the_same_numbers():
    text = (PROJECT / "docs" / "INVARIANTS.md").read_text(encoding="utf-8")
    table = [Row.of(line) for line in text.splitlines() if re.match(r"\| \d+ ", line)]
    assert [row.number for row in table] == list(range(1, len(table) + 1))
    checked = {row.number: row.function for row in table if row.is_run}
    assert checked == {number: invariant.__name__ for number, invariant in INVARIANTS.items()}


@dataclass(frozen=True)
class Row:
    """A line of the document's table."""

    number: int
    is_run: bool
    function: str

    @classmethod
    def of(cls, line):
        _, number, statement, functions, *_ = (cell.strip() for cell in line.split("|"))
        return cls(int(number), "(*run*)" in statement, re.match(r"`?([\w.]*)", functions)[1])
