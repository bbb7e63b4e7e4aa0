"""The package of docs/recipes/plugin: installed by pip, and run as its README does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.paths import ROOT

EXAMPLE = ROOT / "docs" / "recipes" / "plugin"
#: A decoder whose class a draft in another process has to find.
DECODER = """
from dataclasses import dataclass

from espalier.methods.pearl import PEARL


@dataclass(frozen=True)
class OwnDecoder(PEARL):
    gamma: int = 3
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, place / "source")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    target = ("--disable-pip-version-check", "--target", str(place / "site"))
    command = [sys.executable, "-m", "pip", "install", *options, *target, str(place / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place / "site"


def run_py(site: Path, folder: Path, *line: str) -> list[dict[str, Any]]:
    """Run a command line in a folder, and return its rows."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), f"store={folder / 'store'}", "json=true", *line],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]


@pytest.mark.slow
def test_its_files_are_installed(site: Path) -> None:
    files = {path.relative_to(EXAMPLE) for path in (EXAMPLE / "espalier_example").rglob("*.*")}
    installed = {path.relative_to(site) for path in (site / "espalier_example").rglob("*.*")}
    assert {path for path in files if "__pycache__" not in path.parts} <= installed


@pytest.mark.slow
def test_it_runs_by_its_name_and_by_its_place(site: Path, tmp_path: Path) -> None:
    (row,) = run_py(site, tmp_path, "method=token_norm", "ratio=0.9", "limit=4")
    assert (row["method"], row["tokens"]["kept_final"]) == ("token_norm", 14)
    assert row["extra"]["plugins"][0]["name"] == "espalier-example 0.1.0"
    shutil.copy(EXAMPLE / "espalier_example" / "token_norm.py", tmp_path)
    (by_place,) = run_py(site, tmp_path, "method=token_norm.py:TokenNorm", "ratio=0.9", "limit=4")
    assert by_place["extra"]["plugins"][0]["name"] == str(tmp_path / "token_norm.py")
    assert by_place["metrics"] == row["metrics"]


@pytest.mark.exhaustive
def test_its_preset_and_benchmark_run_as_jobs(site: Path, tmp_path: Path) -> None:
    line = ("+experiment=token_norm_stars", "limit=4", "engine.paired=0")
    jobs = ("cluster=joblib", "cluster.cells_per_job=2", "cluster.poll=0.1")
    rows = run_py(site, tmp_path, "-m", *line, *jobs)
    assert [row["method"] for row in rows] == ["none", "random", "token_norm"]
    assert {row["benchmark"] for row in rows} == {"stars"}
    assert all(row["extra"]["plugins"][0]["name"] == "espalier-example 0.1.0" for row in rows)
    assert rows[0]["metrics"]["accuracy"]["value"] == 1


@pytest.mark.slow
def test_its_own_tests_pass(site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")],
        cwd=site,
        env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
def test_a_draft_in_another_process_finds_the_class(site: Path, tmp_path: Path) -> None:
    (tmp_path / "decoder.py").write_text(DECODER)
    line = ("method=decoder.py:OwnDecoder", "limit=1", "engine.transport=processes")
    (row,) = run_py(site, tmp_path, *line, "engine.compare=false", "engine.paired=0")
    assert (row["method"], row["extra"]["params"]) == ("OwnDecoder", {"gamma": 3})
