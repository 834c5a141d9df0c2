"""docs/MODELS.md says what is in models/."""

from tests.house.models_document import DOCUMENT, with_tables


def test_the_tables_are_those_of_the_catalogue():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python -m tests.house.models_document"


def test_a_stale_number_is_noticed():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "131,072" in text
    stale = text.replace("131,072", "131,073", 1)
    assert with_tables(stale) != stale
