"""A table of numbers that says where they come from."""

import datetime
from typing import Annotated

from pydantic import Field

from kvsim.toml import Table


class Sourced(Table):
    """A section of numbers with their origin."""

    source: Annotated[str, Field(min_length=1)]
    date: datetime.date
