"""`kvsim models`: the catalogue, and how far the models of its hardware carry.

Imports are inside the function, as in `kvsim.cli`, which has what commands share.
"""

import click

from kvsim.options import json_option


@click.command()
@click.option("--tensor-parallel-size", type=click.IntRange(1, 1024), metavar="N", help="Ranks.  [default: 1]")
@click.option("--compare", is_flag=True, help="Step-time and link models beside published measurements instead.")
@json_option
def models(tensor_parallel_size: int | None, compare: bool, as_json: bool) -> None:
    """Language models and devices of the catalogue, with the bytes of their KV cache.

    Bytes of a token and of a sequence are those of the pool: of all ranks, replicas once.
    """
    from kvcore.errors import require
    from kvsim import cli

    if compare:
        with cli.mistakes_in_one_line():
            fix = "none with --compare: each point has its own"
            require(tensor_parallel_size is None, "--tensor-parallel-size", tensor_parallel_size, fix)
        from kvsim.cost.agreement import comparison

        cli.show(comparison(), "agreement", as_json)
        return
    from kvsim.llm.listing import listing

    cli.show(listing(tensor_parallel_size or 1), "models", as_json)
