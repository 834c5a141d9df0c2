"""Arguments and options that several commands take."""

from typing import get_args

import click

from kvsim.workload.names import FormatName, TimeUnit

FORMATS = get_args(FormatName)
TIME_UNITS = get_args(TimeUnit)

trace_argument = click.argument("trace", metavar="TRACE")
format_option = click.option(
    "--format", "trace_format", type=click.Choice(FORMATS), help="The trace's format, else told by its content."
)
time_unit_option = click.option(
    "--time-unit", type=click.Choice(TIME_UNITS), help="What the trace's times count, instead of its format's unit."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
no_cache_option = click.option("--no-cache", is_flag=True, help="Parse the trace anew.")
