"""The notebooks hold their outputs, name no machine, use names that exist, and run from any folder."""

from __future__ import annotations

import ast
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from espalier.harness.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

#: Beginnings of paths that only one machine has.
OF_A_MACHINE = re.compile(
    r"(?<![\w.:/])/(?:home|root|Users|tmp|work|mnt|data|var)/|[A-Z]:\\\\|\.cache/"
)


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in content(path)["cells"] if cell["cell_type"] == "code"]


def imports(path: Path) -> list[tuple[str, str]]:
    """Return the (module, name) pairs that a notebook imports of this package."""
    return [
        (node.module, alias.name)
        for cell in code_cells(path)
        for node in ast.walk(ast.parse("".join(cell["source"])))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("espalier")
        for alias in node.names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib.use("Agg")
    # The backend must be set first.
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    displayed = []
    try:
        with matplotlib.rc_context():
            for number, cell in enumerate(code_cells(path), 1):
                tree = ast.parse("".join(cell["source"]))
                place = f"{path.name}, code cell {number}"
                last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
                exec(compile(tree, place, "exec"), names)
                if isinstance(last, ast.Expr):
                    displayed.append(
                        eval(compile(ast.Expression(last.value), place, "eval"), names)
                    )
        assert plt.get_fignums() or any(hasattr(value, "_repr_png_") for value in displayed)
    finally:
        plt.close("all")


def test_there_are_eight_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 8
    assert all(path.stem[:2] == f"{number:02}" for number, path in enumerate(NOTEBOOKS, 1))
    assert "notebooks/" in readme


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_holds_the_outputs_of_one_run_from_the_top(path: Path) -> None:
    counts = [cell["execution_count"] for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds
    assert path.stat().st_size < 1_000_000
    metadata = content(path)["metadata"]
    assert metadata["kernelspec"] == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    assert metadata["language_info"]["name"] == "python"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_needs_only_the_installed_package(path: Path) -> None:
    first = "".join(content(path)["cells"][0]["source"])
    assert "pip install 'espalier-vlm[notebooks]'" in first
    pictures = re.sub(r'"image/png": "[^"]*"', "", path.read_text(encoding="utf-8"))
    assert not OF_A_MACHINE.findall(pictures)
    assert "sys.path" not in pictures
    assert "Warning" not in pictures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_uses_names_that_exist(path: Path) -> None:
    for module, name in imports(path):
        assert hasattr(import_module(module), name), f"{module}.{name}"
    internal: tuple[str, ...] = ("espalier.harness.store", "espalier.harness.reports")
    if path.stem == "06_your_method":
        internal = ("espalier.harness",)
    assert not [module for module, _ in imports(path) if module.startswith(internal)]
