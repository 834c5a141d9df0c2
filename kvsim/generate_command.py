"""The command line's `kvsim trace generate WORKLOAD`: a generated workload as a file in kvtwin's own trace format.

Imports are inside the functions, as in `kvsim.cli`.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvsim.workload.trace import Trace

out_option = click.option(
    "--out", metavar="FILE", required=True, help="Where to write it; compressed when its name ends with .gz."
)
seed_option = click.option("--seed", type=click.IntRange(0), default=0, show_default=True)


@click.group()
def generate() -> None:
    """Write a generated workload into a file.

    The file is a trace for `kvsim run SCENARIO --trace FILE`, `hits` and `trace stats`.
    """


@generate.command()
@click.option("--sessions", type=int, default=610, show_default=True, help="The published table has 610.")
@click.option(
    "--shared-len", type=int, help="Tokens that all prompts share: 902 as replayed  [default: 11520, as served]"
)
@click.option("--missed-len", type=float, help="Tokens a call that the provider is to have missed  [default: 1791]")
@click.option("--answers", type=click.Choice(("recorded", "generated")), help="In the next prompt  [default: recorded]")
@click.option("--start-spread-s", type=float, help="Sessions start within this time  [default: all at once]")
@seed_option
@out_option
def codex(
    sessions: int,
    shared_len: int | None,
    missed_len: float | None,
    answers: str | None,
    start_spread_s: float | None,
    seed: int,
    out: str,
) -> None:
    """Codex on SWE-bench Pro: coding agents, from published percentiles (docs/WORKLOADS.md)."""
    from kvsim.workload.codex import Codex, generate

    options = {
        "sessions": sessions,
        "shared_len": shared_len,
        "missed_len": missed_len,
        "answers": answers,
        "start_spread_s": start_spread_s,
    }
    make(lambda: generate(Codex(**given(options)), seed), out)


@generate.command()
@click.option("--gpus", type=int, default=12, show_default=True, help="75 sessions on 12, a multiple of 4.")
@seed_option
@out_option
def scaling(gpus: int, seed: int, out: str) -> None:
    """The scaling run of vLLM's blog on Mooncake: 30 turns on a common prompt of 20,000 tokens."""
    from kvsim.workload.agentic import generate
    from kvsim.workload.agentic import scaling as shape_of

    make(lambda: generate(shape_of(gpus), seed), out)


@generate.command()
@click.option("--sessions", type=int, default=1_000, show_default=True)
@click.option("--system-len", type=int, help="First tokens of every prompt, the same for all  [default: 500]")
@click.option("--prompt-scale", type=float, help="Users write so many times as much  [default: 1]")
@click.option("--answer-scale", type=float, help="Answers are so many times as long  [default: 1]")
@click.option("--pause-scale", type=float, help="Users think so many times as long  [default: 1]")
@seed_option
@out_option
def chat(
    sessions: int,
    system_len: int | None,
    prompt_scale: float | None,
    answer_scale: float | None,
    pause_scale: float | None,
    seed: int,
    out: str,
) -> None:
    """Conversations with an assistant, from the statistics of WildChat."""
    from kvsim.workload.chat import Chat, generate

    options = {
        "sessions": sessions,
        "system_len": system_len,
        "prompt_scale": prompt_scale,
        "answer_scale": answer_scale,
        "pause_scale": pause_scale,
    }
    make(lambda: generate(Chat(**given(options)), seed), out)


@generate.command()
@click.option("--requests", type=int, default=1_000, show_default=True)
@click.option("--chunks", type=int, help="Of the whole corpus  [default: 10000]")
@click.option("--chunk-len", type=int, help="Tokens of a chunk  [default: 800]")
@click.option("--top-k", type=int, help="Chunks of a prompt  [default: 20]")
@click.option(
    "--order", type=click.Choice(("relevance", "popularity")), help="Of a prompt's chunks  [default: relevance]"
)
@click.option("--system-len", type=int, help="First tokens of every prompt, the same for all  [default: 500]")
@click.option("--question-len", type=int, help="Tokens of a question  [default: 100]")
@seed_option
@out_option
def rag(
    requests: int,
    chunks: int | None,
    chunk_len: int | None,
    top_k: int | None,
    order: str | None,
    system_len: int | None,
    question_len: int | None,
    seed: int,
    out: str,
) -> None:
    """Questions over retrieved chunks, of which a few are popular."""
    from kvsim.workload.rag import Rag, generate

    options = {
        "requests": requests,
        "chunks": chunks,
        "chunk_len": chunk_len,
        "top_k": top_k,
        "order": order,
        "system_len": system_len,
        "question_len": question_len,
    }
    make(lambda: generate(Rag(**given(options)), seed), out)


@generate.command("long-document")
@click.option("--documents", type=int, default=105, show_default=True)
@click.option("--document-len", type=int, help="Mean tokens of a document  [default: 21563]")
@click.option("--length-spread", type=float, help="Deviation of the logarithm of that; 0: all alike  [default: 0.5]")
@click.option("--questions", type=int, help="Of a reader  [default: 23]")
@click.option("--readers", type=int, help="Of each document  [default: 1]")
@click.option("--question-len", type=int, help="Tokens of a question  [default: 50]")
@click.option("--output-len", type=int, help="Tokens of an answer  [default: 16]")
@click.option("--keeps", type=click.Choice(("document", "conversation")), help="In prompts  [default: document]")
@click.option("--pause-s", type=float, help="Mean time to the next question  [default: 60]")
@click.option("--system-len", type=int, help="First tokens of every prompt, the same for all  [default: 0]")
@seed_option
@out_option
def long_document(
    documents: int,
    document_len: int | None,
    length_spread: float | None,
    questions: int | None,
    readers: int | None,
    question_len: int | None,
    output_len: int | None,
    keeps: str | None,
    pause_s: float | None,
    system_len: int | None,
    seed: int,
    out: str,
) -> None:
    """Readers who ask several questions about one long document."""
    from kvsim.workload.long_document import LongDocument, generate

    options = {
        "documents": documents,
        "document_len": document_len,
        "length_spread": length_spread,
        "questions": questions,
        "readers": readers,
        "question_len": question_len,
        "output_len": output_len,
        "keeps": keeps,
        "pause_s": pause_s,
        "system_len": system_len,
    }
    make(lambda: generate(LongDocument(**given(options)), seed), out)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller said; the rest has the generator's defaults."""
    return {name: value for name, value in options.items() if value is not None}


def make(generate: Callable[[], "Trace"], out: str) -> None:
    """Generate and write; a mistake in the parameters ends the command with one line."""
    from kvsim.cli import mistakes_in_one_line

    with mistakes_in_one_line():
        trace = generate()
    write_out(trace, out)


def write_out(trace: "Trace", out: str) -> None:
    """Write the file and say what is in it."""
    from kvsim.cli import failing_in_one_line
    from kvsim.trace_commands import write
    from kvsim.workload import native

    path = Path(os.path.expanduser(out))
    with failing_in_one_line(f"--out = {out!r}"):
        write(path, native.lines(trace))
    click.echo(f"{path}: {trace.num_requests:,} requests of {trace.num_sessions:,} sessions", err=True)
