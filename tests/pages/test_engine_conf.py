"""conf/engine/default.yaml documents every setting of EngineSpec, and docs/conflicts.md lists all conflicts."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from espalier.harness.paths import CONF
from espalier.harness.settings import setting_hints
from espalier.harness.specs.run_spec import EngineSpec
from lab.pages import conflicts_page
from lab.pages.engine_conf import config, documented

FILE = CONF / "engine" / "default.yaml"


@dataclass(frozen=True)
class Documented:
    """A section.

    Attributes:
        name: what it is called; other: of
            two lines
        number: of: something
    """

    name: str = "a"
    number: int = 3


def test_the_file_is_what_the_declarations_say() -> None:
    assert FILE.read_text() == config(), "make docs"


def test_every_setting_is_there_with_its_default_and_its_meaning() -> None:
    assert EngineSpec(**yaml.safe_load(FILE.read_text())) == EngineSpec()
    assert list(documented(EngineSpec)) == list(setting_hints(EngineSpec))


def test_meanings_are_read_from_the_docstring() -> None:
    meanings = {"name": "what it is called; other: of two lines", "number": "of: something"}
    assert documented(Documented) == meanings


def test_the_page_of_conflicts_is_that_of_the_table() -> None:
    text = conflicts_page.PAGE.read_text(encoding="utf-8")
    assert text == conflicts_page.page(), (
        "python -m lab.pages.conflicts_page --write docs/conflicts.md"
    )
    assert "{" not in text
