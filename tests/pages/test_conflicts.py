"""docs/conflicts.md lists what the table of conflicts refuses."""

from __future__ import annotations

from lab.pages.conflicts_page import PAGE, page


def test_the_page_is_that_of_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(), "python -m lab.pages.conflicts_page --write docs/conflicts.md"
    assert "{" not in text
