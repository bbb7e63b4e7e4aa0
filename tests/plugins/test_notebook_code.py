"""The code of a class that no module holds: the cells that it needs, the values that it reads, the files of modules."""

from __future__ import annotations

import linecache
from typing import Any

import pytest

from espalier.harness.specs.plugins.code_reference import own_code
from espalier.methods.fastv import FastV

CELLS = {
    "values": "POWER, NAMES = 2.0, {'a', 'b', 'c'}\nUNUSED = tokens = object()",
    "helper": """
from functools import wraps

def squared(function):
    @wraps(function)
    def inner(*arguments):
        return function(*arguments) ** POWER
    return inner

@squared
def length(tokens, scale=1.0):
    return tokens.norm(dim=-1) * scale
""",
    "base": """
from espalier.methods.base import Site, TokenReducer

class Base(TokenReducer):
    def sites(self, depth):
        return (Site("prefix"),)
""",
    "class": """
from dataclasses import dataclass

import torch
from espalier.methods.select.topk import top

@dataclass(frozen=True)
class Mine(Base):
    scale: float = 1.0

    @torch.no_grad()
    def plan(self, view, keep):
        # the longest
        return top(torch.stack([length(row, self.scale) for row in view.tokens if row in NAMES]), keep)
""",
    "other": "def unused():\n    return 1",
}


def code(**changes: tuple[str, str]) -> tuple[list[str], set[str]]:
    """Return the code of the class after changes of cells, as a notebook runs them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell, text in CELLS.items():
        before, after = changes.get(cell, ("", ""))
        assert before in text
        text = text.replace(before, after)
        place = f"<cell {cell}>"
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
        exec(compile(text, place, "exec", dont_inherit=True), names)
    texts, modules = own_code([names["Mine"]])
    return texts, set(modules)


@pytest.mark.parametrize(
    ("cell", "before", "after"),
    [
        ("values", "2.0", "3.0"),
        ("values", "'b'", "'d'"),
        ("helper", " * scale", " / scale"),
        ("helper", "** POWER", "** 1"),
        ("base", '"prefix"', '"layer", 2'),
        ("class", "scale: float = 1.0", "scale: float = 2.0"),
        ("class", "# the longest", "# another comment"),
    ],
)
def test_the_cells_and_values_that_it_needs_count(cell: str, before: str, after: str) -> None:
    assert code(**{cell: (before, after)}) != code()


@pytest.mark.parametrize(
    ("cell", "before", "after"),
    [("other", "1", "2"), ("values", "UNUSED = tokens", "tokens"), ("values", "a", "a")],
)
def test_other_cells_do_not_count(cell: str, before: str, after: str) -> None:
    assert code(**{cell: (before, after)}) == code()


def test_modules_that_it_uses_count_by_their_files() -> None:
    assert {"espalier.methods.reducers", "espalier.methods.select.topk", "torch"} <= code()[1]
    assert own_code([FastV])[1].keys() == {"espalier.methods.fastv"}


def method_with(value: Any) -> type:
    class Local(FastV):
        def fractions(self, share: float, n_sites: int) -> Any:
            return value

    return Local


def test_captured_values_count() -> None:
    assert own_code([method_with(1)]) != own_code([method_with(2)])
    assert own_code([method_with([1, (2,)])]) == own_code([method_with([1, (2,)])])


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (method_with(object()), "value has no source"),
        (type("Bare", (FastV,), {"__module__": "notebook"}), "Bare has no source"),
    ],
)
def test_what_has_no_source_is_never_the_same_and_a_line_reports_it(
    part: type, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own_code([part]) != own_code([part])
    assert (
        f"{line} and is no plain data: runs of this method are not served"
        in capsys.readouterr().err
    )
