"""The notebooks run from the top to the bottom and read results by their one way in."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from lab.pages.run_notebooks import cells, execute

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    execute(path, tmp_path)
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_tidy(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in content["cells"])
    imported = {
        f"{node.module}.{name.name}"
        for source in cells(path)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    internal = ("espalier.harness.store", "espalier.harness.reports.curves")
    if path.stem == "06_your_method":
        internal = ("espalier.harness",)
    assert not {name for name in imported if name.startswith(internal)}


def test_an_error_names_its_cell_and_what_is_no_notebook_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]}))
    with pytest.raises(ZeroDivisionError) as caught:
        execute(path)
    assert "broken.ipynb, code cell 1" in str(caught.traceback[-1])
    path.write_text("no")
    with pytest.raises(UserError, match="is no notebook"):
        execute(path)
