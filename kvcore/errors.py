"""What a caller can get wrong. A failure of the world is a value (an Enum outcome), never one of these."""


class InvalidArgument(ValueError):
    """A value outside its bound. The message names the argument, the value, the bound and the fix."""

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{argument} = {value!r}: expected {expected}")
        self.argument = argument
        self.value = value
        self.expected = expected


def require(condition: object, argument: str, value: object, expected: str) -> None:
    """Raise InvalidArgument(argument, value, expected) unless `condition` holds."""
    if not condition:
        raise InvalidArgument(argument, value, expected)
