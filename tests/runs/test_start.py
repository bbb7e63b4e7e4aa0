"""What a command imports before it prints: the count of modules stands for its start, equal on every machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Command -> most modules that it imports, Python's own among them.
MOST = {
    "--help": 160,
    "method=nosuch": 440,
    "method=none ratio=0 limit=2": 515,
}
#: Packages that take 0.2 seconds and more, and that none of them needs.
HEAVY = {"numpy", "pandas", "torch", "transformers"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has the last command's row."""
    folder = tmp_path_factory.mktemp("store")
    imports_of("method=none ratio=0 limit=2", folder)
    return folder


#: A sweep that runs nothing, over a model without a checkpoint here and a method that reads the tower.
DRY = "-m --dry model=qwen2_5_vl_7b method=none,visionzip ratio=0.5,0.9 benchmark=gqa,mme"


def imports_of(line: str, store: Path) -> set[str]:
    place = [] if line == "--help" else [f"store={store}"]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "run.py", *line.split(), *place],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    lines = result.stderr.splitlines()
    return {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}


@pytest.mark.parametrize(("line", "most"), MOST.items(), ids=["help", "typo", "stored row"])
def test_the_start_imports_little(store: Path, line: str, most: int) -> None:
    modules = imports_of(line, store)
    assert len(modules) <= most
    assert not HEAVY & modules
    assert ("hydra" in modules) == (line != "--help")


@pytest.mark.slow
@pytest.mark.slow
def test_a_dry_run_imports_no_model_family(tmp_path: Path) -> None:
    modules = imports_of(DRY, tmp_path)
    assert "torch" in modules
    assert not {"transformers", "pandas", "espalier.harness.models.adapter"} & modules
    assert "transformers" in imports_of(f"{DRY} model.processor.max_pixels=200704", tmp_path)
