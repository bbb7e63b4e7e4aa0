"""A finished run is found by its cell alone, and only while nothing has changed that its row depends on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import run
from espalier.harness.config.compose import read_command
from espalier.harness.runs import stored_cells
from espalier.harness.runs.stored_cells import StoredCell

LINE = "method=fastv ratio=0.5 limit=2 engine.paired=0 model.device=cpu json=true"

#: Command lines of cells that depend on more than the package and a checkpoint, or print more than a row.
DEPENDENT = (
    "method=vanilla_sd",
    "+method.code=mine.package:Mine",
    "+compressor.code=mine.package:Mine compressor=h2o",
    "model.path=/models/mine",
    "model.weights=random",
    "model.adapter=mine.package:Mine",
    "benchmark.path=/data",
    "benchmark.include_path=/tasks",
    "benchmark.needs=[judge]",
    "backend=vllm",
    "engine.paired=4",
    "log=wandb",
    "curves=out/a",
    "report=out",
    "force=true",
    "cluster=joblib",
    "-m ratio=0.5,0.9",
)


def cell_of(line: str) -> StoredCell | None:
    return StoredCell.of(read_command(line.split()))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the result of LINE."""
    place = tmp_path_factory.mktemp("store")
    assert run.main([*LINE.split(), f"store={place}"]) == 0
    return place


@pytest.fixture
def cell(store: Path) -> StoredCell:
    return cell_of(f"{LINE} store={store}")


@pytest.mark.slow
def test_the_same_cell_has_the_row_of_the_store(store: Path, cell: StoredCell) -> None:
    (path,) = store.glob("runs/*/row.json")
    assert cell.row() == json.loads(path.read_text()) | {"status": "cached"}


def test_another_cell_has_no_row_before_it_is_run(store: Path) -> None:
    other = cell_of(f"{LINE} store={store} method.params.K=3")
    assert other.row() is None


def touch_calibration(store: Path, package: Path) -> None:
    (store / "calibration").mkdir()
    (store / "calibration" / "seedling_prior.safetensors").touch()


def edit_code(store: Path, package: Path) -> None:
    (package / "methods" / "fastv.py").write_text("K = 3\n")


def edit_row(store: Path, package: Path) -> None:
    (path,) = store.glob("runs/*/row.json")
    path.write_text(f"{path.read_text()}\n")


def remove_run(store: Path, package: Path) -> None:
    (path,) = store.glob("runs/*/row.json")
    path.unlink()


def damage_note(store: Path, package: Path) -> None:
    (path,) = store.glob("cells/*.json")
    path.write_text('{"key": 3')


@pytest.mark.parametrize(
    "change", [touch_calibration, edit_code, edit_row, remove_run, damage_note]
)
def test_a_cell_is_not_found_after_a_change(
    change: Callable[[Path, Path], None],
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, own_store = tmp_path / "package", tmp_path / "store"
    (package / "methods").mkdir(parents=True)
    (package / "methods" / "fastv.py").write_text("K = 2\n")
    monkeypatch.setattr(stored_cells, "ROOT", package)
    (path,) = store.glob("runs/*/row.json")
    row_file = own_store / path.relative_to(store)
    row_file.parent.mkdir(parents=True)
    row_file.write_bytes(path.read_bytes())
    line = f"{LINE} store={own_store}"
    before = cell_of(line)
    before.remember(json.loads(path.read_text()))
    assert before.row() is not None
    change(own_store, package)
    after = cell_of(line)
    assert after.row() is None


@pytest.mark.parametrize("line", DEPENDENT)
def test_cells_that_depend_on_more_are_left_to_their_run_keys(line: str) -> None:
    assert cell_of(f"method=fastv {line}" if "method=" not in line else line) is None
