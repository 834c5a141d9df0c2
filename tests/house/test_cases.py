"""docs/CASES.md names every case once, and each test file that it names is there and says which case it holds."""

import re
from pathlib import Path

PROJECT = Path(__file__).parent.parent.parent
ROW = re.compile(r"^\| (S\d\d) \|(.*)\|$", re.MULTILINE)
FILE = re.compile(r"\b(?:[a-z]+/)+test_\w+\.py\b")


def rows(text):
    """(case, test files named for it) of each row of the table."""
    return [(case, FILE.findall(rest)) for case, rest in ROW.findall(text)]


def complaints(text, read):
    """What is wrong with the table; `read(file)` is the text of a test file, or None where there is none."""
    found = rows(text)
    numbers = [case for case, _ in found]
    wrong = [] if numbers == [f"S{number:02}" for number in range(1, 28)] else [f"the cases are {numbers}"]
    for case, files in found:
        for file in files:
            held = read(file)
            if held is None:
                wrong.append(f"{case}: there is no {file}")
            elif not re.search(rf"\b{case}\b", held):
                wrong.append(f"{case}: {file} does not name it")
    return wrong


def read_test(file):
    path = PROJECT / "tests" / file
    return path.read_text() if path.exists() else None


def test_every_case_has_a_row_and_every_file_in_it_holds_the_case():
    assert complaints((PROJECT / "docs" / "CASES.md").read_text(), read_test) == []


def test_a_table_with_a_hole_a_lost_file_and_a_file_of_another_case_is_rejected():
    table = "".join(f"| S{number:02} | x | a/test_one.py |\n" for number in range(1, 28) if number != 9)
    table = table.replace("| S02 | x | a/test_one.py |", "| S02 | x | a/test_two.py |")
    held = " ".join(f"S{number:02}" for number in range(1, 28) if number != 5)
    wrong = complaints(table, {"a/test_one.py": held}.get)
    assert len(wrong) == 3
    assert wrong[0].startswith("the cases are")
    assert wrong[1:] == ["S02: there is no a/test_two.py", "S05: a/test_one.py does not name it"]
