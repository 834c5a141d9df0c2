"""Named roundings and unit constants. State is integer; nothing here returns a float."""

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def div_ceil(value: int, divisor: int) -> int:
    """Smallest integer >= value / divisor, for divisor > 0."""
    return -(-value // divisor)


def align_down(value: int, alignment: int) -> int:
    """Largest multiple of `alignment` (> 0) that is <= value."""
    return value - value % alignment


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` (> 0) that is >= value."""
    return value + -value % alignment
