"""What the progress bar shows is what the log says, however often it looks; looking changes nothing."""

import io

from rich.console import Console

from kvsim.clock import PS_PER_S
from kvsim.events import EventLog, Kind
from kvsim.metrics import measure
from kvsim.progress import HitsSoFar, RunProgress
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.source import trace_of

SMALL = ["cluster.instances=2", "workload.sessions=5", "workload.turns=3"]


def small_run():
    scenario = load("pool-16", SMALL)
    return simulation(scenario, trace_of(scenario))


def test_the_rate_grows_with_the_log():
    log = EventLog()
    hits = HitsSoFar(log)
    assert hits.rate() == "-"
    log.add(0, Kind.ARRIVED, 0, 100, 5)
    log.add(0, Kind.ARRIVED, 1, 300, 5)
    assert hits.rate() == "-"
    log.add(1, Kind.ADMITTED, 0, 32, 16)
    assert hits.rate() == hits.rate() == "48.0%"
    log.add(2, Kind.ADMITTED, 1, 0, 32)
    assert hits.rate() == "20.0%"


def test_at_the_end_it_is_the_metric():
    done = small_run()
    done.run()
    assert HitsSoFar(done.log).rate() == f"{measure(done.log, 1).hit_rate:.1%}"


def test_a_line_fits_a_narrow_terminal():
    running = small_run()
    running.cluster.sequences = [None] * 12_031
    running.clock.at(3_551 * PS_PER_S, lambda: None)
    running.clock.run()
    shown = io.StringIO()
    with RunProgress(running, Console(file=shown, force_terminal=True, width=80, color_system=None)) as progress:
        progress.refresh()
    assert "requests at 3,551 s, hit rate -, left --:--" in shown.getvalue(), "time left, before anything is done"
    assert "…" not in shown.getvalue()


def test_looking_changes_nothing():
    alone, watched = small_run(), small_run()
    alone.run()
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=160, color_system=None)
    with RunProgress(watched, console) as progress:
        progress.refresh()
        watched.run()
        progress.refresh()
    assert watched.log.digest() == alone.log.digest()
    assert "0/15" in shown.getvalue() and "15/15" in shown.getvalue()
