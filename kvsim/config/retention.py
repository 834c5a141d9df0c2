"""How a scenario says which lengths a writer keeps resumable: numbers of tokens; "all" where TOML has no null."""

from kvcore.masks import Retention
from kvsim import toml


def retention(value: object) -> Retention:
    """One interval, or one for each group."""
    return tuple(map(interval, value)) if isinstance(value, list | tuple) else interval(value)


def interval(value: object) -> int | None:
    """None ("all": every length), 0 or a number of tokens."""
    if value is None or value == "all":
        return None
    value = toml.whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError('"all", 0 or a number of tokens, or a list with one of these for each group')
    return value
