"""`make demo-connector`: a conversation alternates between two real engines, with a shared pool and without.

One Mooncake store, two engines on it and two that only have their own cache, all vLLM on CPU with a tiny model. Both
pairs hold the same conversation; the table says where the KV of each prompt came from and when its first token did.
Exit code: 0, 1 when an answer differs or the pool was of no use, 2 when this machine cannot run it.
"""

import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from connector.testbed.needs import missing
from connector.testbed.pool import Pool
from connector.testbed.processes import Engine
from connector.testbed.tiny_model import write_tiny_model

NAMES = ("A", "B")
NUM_TURNS = 8
FIRST_LEN, MESSAGE_LEN, ANSWER_LEN = 2_048, 256, 32
"""Tokens of the first prompt (instructions and a document), of each later message, and of each answer."""

WIDTH_OF_A_FILE = 100
"""Columns where output is no terminal."""

TITLE = """A conversation that alternates between two engines, with a shared pool and without.
Tokens of the prompt: in the engine's own cache (local), loaded from the pool, computed (new)."""

WIDER = {"hidden_size": 256, "intermediate_size": 1_024, "num_hidden_layers": 4}
"""Than the tests' model: so that computing a token costs something, as it does in earnest."""

OPTIONS = {"max_model_len": 4_096, "max_num_batched_tokens": 4_096}
CONNECTOR = {"name": "KVTwinConnector", "module": "kvconnector.connector", "extra": {"lookup_deadline_ms": 2_000}}


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: where its prompt's KV came from, in tokens, and when its first token did."""

    engine: str
    local_len: int
    pool_len: int
    computed_len: int
    ttft_s: float
    answer: list[int]

    @property
    def prompt_len(self):
        return self.local_len + self.pool_len + self.computed_len


def converse(engines, num_turns, seed):
    """The turns of a conversation that goes from engine to engine; the seed names what is said to them."""
    rng = random.Random(seed)
    said, turns = _words(rng, FIRST_LEN), []
    for number in range(num_turns):
        engine = number % len(engines)
        turns.append(_turn(NAMES[engine], engines[engine], said))
        said = said + turns[-1].answer + _words(rng, MESSAGE_LEN)
    return turns


def _words(rng, length):
    return [rng.randrange(3, 1_024) for _ in range(length)]


def _turn(name, engine, said):
    """When this returns, what the engine stores is in the pool: nobody writes a message faster."""
    answer = engine.generate([said], ANSWER_LEN)
    engine.call("settle")
    computed_len = answer["computed"] - (ANSWER_LEN - 1)
    pool_len = answer["granted"]
    return Turn(
        name, len(said) - computed_len - pool_len, pool_len, computed_len, answer["ttft_s"][0], answer["tokens"][0]
    )


def start(folder, say):
    """An `ExitStack` that ends everything, the engines with the pool, and those without."""
    ended = ExitStack()
    try:
        say("starting mooncake_master, and a process that lends it 256 MB")
        pool = Pool(folder)
        ended.callback(pool.kill)
        model = write_tiny_model("qwen3", folder / "model", changes=WIDER)

        def engine(name, connector):
            say(f"starting vLLM: engine {name}")
            config = {"model": model, "connector": connector, "options": OPTIONS}
            # What vLLM leaves in the folder for temporary files is gone with ours.
            started = Engine(config, folder / f"{name}.log", {**pool.environment(), "TMPDIR": str(folder)})
            ended.callback(started.kill)
            return started

        # The first one compiles for all; the others start together.
        without = [engine("A, without the pool", None).ready(), engine("B, without the pool", None)]
        shared = [engine(f"{name}, with the pool", CONNECTOR) for name in NAMES]
        for started in (*without, *shared):
            started.ready()
        say("all engines are up")
        return ended, shared, without
    except BaseException:
        ended.close()
        raise


COLUMNS = (
    ("", "turn", "engine", "prompt"),
    ("with:", "local", "pool", "new", "TTFT, ms"),
    ("without:", "local", "new", "TTFT, ms"),
    ("", "answers"),
)


def table(shared, without):
    """A row for each turn, and the sums with the median time: where the prompt came from with the pool, and without."""
    shown = Table(
        title=TITLE,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for over, first, *others in COLUMNS:
        for title in (f"{over}\n{first}", *(f"\n{other}" for other in others)):
            shown.add_column(title, justify="right", no_wrap=True)
    for number, (ours, control) in enumerate(zip(shared, without, strict=True), 1):
        same = "equal" if ours.answer == control.answer else "DIFFERENT"
        shown.add_row(str(number), ours.engine, *_cells(ours, control), same)
    shown.add_section()
    shown.add_row("2 on", "", *_cells(_summary(shared[1:]), _summary(without[1:])), "")
    return shown


def _cells(ours, control):
    lengths = (ours.prompt_len, ours.local_len, ours.pool_len, ours.computed_len)
    return (
        *map("{:,}".format, lengths),
        f"{ours.ttft_s * 1e3:.1f}",
        *map("{:,}".format, (control.local_len, control.computed_len)),
        f"{control.ttft_s * 1e3:.1f}",
    )


def _summary(turns):
    """Sums of tokens, and the median time."""
    lengths = [sum(getattr(turn, name) for turn in turns) for name in ("local_len", "pool_len", "computed_len")]
    return Turn("", *lengths, statistics.median(turn.ttft_s for turn in turns), [])


def verdict(shared, without):
    """What is wrong with this run, or None."""
    if [turn.answer for turn in shared] != [turn.answer for turn in without]:
        return "an answer differs from that of the engine without a pool"
    if any(turn.pool_len == 0 for turn in shared[1:]):
        return "a turn after the first found nothing in the pool"
    return None


def hold(folder, say):
    """(turns with the pool, turns without); no process is left when this returns."""
    ended, shared, without = start(folder, say)
    with ended:
        for engines in (shared, without):
            converse(engines, 3, "rehearsal")  # connections and caches of the process
        say(f"{NUM_TURNS} turns with the pool, and the same ones without")
        return [converse(engines, NUM_TURNS, "demo") for engines in (shared, without)]


def main():
    began_s, errors = time.monotonic(), Console(stderr=True, highlight=False, markup=False)
    if lacking := [reason for reason in map(missing, ("engine", "store")) if reason]:
        errors.print(f"This machine cannot run the connector's demo: {'; '.join(lacking)}.")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything is ended on the way out
    with tempfile.TemporaryDirectory() as folder:
        try:
            turns = hold(Path(folder), lambda what: errors.print(f"{time.monotonic() - began_s:5.1f} s  {what}"))
        except (RuntimeError, TimeoutError) as error:
            errors.print(f"A process failed: {error}")
            return 1
    output = Console(highlight=False)
    if not output.is_terminal:
        output.width = WIDTH_OF_A_FILE
    output.print(table(*turns))
    wrong = verdict(*turns)
    output.print(wrong or "All answers are equal.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
