"""What a message quotes is short, whatever the value."""

import pytest

from kvcore.errors import MAX_SHOWN_CHARACTERS, InvalidArgument, clipped, require, shown


@pytest.mark.parametrize("value", [3, -0.5, True, None, "a b", "[red]\n", [1, 2], {"a": 1}, "x" * 100])
def test_a_short_value_is_shown_as_it_is(value):
    assert shown(value) == repr(value)
    assert clipped("x" * MAX_SHOWN_CHARACTERS) == "x" * MAX_SHOWN_CHARACTERS


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 10**4000, deep(10**5), [["x" * 99] * 99] * 99, {i: [i] * 99 for i in range(99)}, b"x" * 999]
)
def test_a_long_or_deep_value_is_shortened(value):
    assert len(shown(value)) <= MAX_SHOWN_CHARACTERS
    with pytest.raises(InvalidArgument, match=r"^value = .*\.\.\..*: expected less$") as caught:
        require(False, "value", value, "less")
    assert caught.value.value is value


def test_of_a_long_string_the_end_is_shown_too():
    assert shown("/" + "a" * 500 + "/trace.jsonl").endswith("/trace.jsonl'")
