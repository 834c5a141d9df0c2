"""`kvsim models`: the catalogue.

Imports are inside the function, as in `kvsim.cli`, which has what commands share.
"""

import click

from kvsim.options import json_option


@click.command()
@click.option(
    "--tensor-parallel-size", default=1, show_default=True, type=click.IntRange(1, 1024), metavar="N", help="Ranks."
)
@json_option
def models(tensor_parallel_size: int, as_json: bool) -> None:
    """Language models and devices of the catalogue, with the bytes of their KV cache.

    Bytes of a token and of a sequence are those of the pool: of all ranks, replicas once.
    """
    from kvsim import cli
    from kvsim.llm.listing import listing

    cli.show(listing(tensor_parallel_size), "models", as_json)
