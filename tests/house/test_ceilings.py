"""Ceilings only fall: a figure above its ceiling is refused in one line, a lower one becomes the ceiling."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from lab.house import ceilings, sizes


def test_figures_above_their_ceiling_fail_and_lower_ones_become_ceilings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--lower` keeps the ceilings of other figures, and never raises one."""
    parser = argparse.ArgumentParser()
    ceilings.add_options(parser)
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps({"files": 10, "frames": 20, "names": 3}), encoding="utf-8")
    options = parser.parse_args(["--check", "--lower"])
    assert ceilings.hold({"files": 11, "frames": 19}, options, path) == 1
    assert capsys.readouterr().err == (
        "error: files=11 is above its ceiling; valid: at most 10 (take as much away as is added, or raise the ceiling"
        " in a commit of its own that states why)\n"
    )
    assert json.loads(path.read_text()) == {"files": 10, "frames": 19, "names": 3}
    assert ceilings.hold({"files": 10}, options, path) == 0
    assert ceilings.hold({"files": 11}, parser.parse_args([]), path) == 0


def test_statements_are_counted_without_imports_and_docstrings() -> None:
    """A class of a docstring, and a function of one statement: three."""
    text = '"""Text."""\nimport os\n\nclass A:\n    """Doc."""\n\ndef f():\n    """Doc."""\n    return os\n'
    assert sizes.statements(text) == 3
