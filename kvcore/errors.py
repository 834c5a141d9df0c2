"""What a caller can get wrong. A failure of the world is a value (an Enum outcome), never one of these."""

from reprlib import Repr

MAX_SHOWN_CHARACTERS = 120


class InvalidArgument(ValueError):
    """A value outside its bound. The message names the argument, the value, the bound and the fix."""

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{argument} = {shown(value)}: expected {expected}")
        self.argument = argument
        self.value = value
        self.expected = expected


def require(condition: object, argument: str, value: object, expected: str) -> None:
    """Raise InvalidArgument(argument, value, expected) unless `condition` holds."""
    if not condition:
        raise InvalidArgument(argument, value, expected)


def shown(value: object) -> str:
    """`value` as a message quotes it: of a long or deep one the beginning, and of a long string the end too."""
    return clipped(_SHORT.repr(value))


def clipped(text: str) -> str:
    """The text, or as much of its beginning as a message has room for."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_SHOWN_CHARACTERS
