"""Bad input: exit 2 and exactly one line that names the config key and what would be valid, before anything runs."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import espalier.harness.evaluation.evaluate
from espalier.harness.paths import ROOT
from espalier.harness.runs import admission
from espalier.harness.store.files.folder_checks import check_folder
from tests.arithmetic import sums, write_task
from tests.fuzz.files import WEIGHTS
from tests.runs.helpers import Bench


def copy_weights(folder: Path) -> Path:
    shutil.copytree(WEIGHTS, folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "checksum"])
def test_damaged_weight_file_is_found_before_loading(
    bench: Bench, tmp_path: Path, damage: str
) -> None:
    file = copy_weights(tmp_path / "model")
    content = file.read_bytes()
    if damage == "checksum":
        file.with_name(f"{file.name}.sha256").write_text(f"{'0' * 64}  {file.name}\n")
    else:
        broken = {"cut": content[:-1], "header": content[:8] + b"x" + content[9:], "empty": b""}
        file.write_bytes(broken[damage])
    line = bench.refusal("method=none", f"model.path={file.parent}")
    for word in ("model.path", "damaged", str(file.parent), repr(file.name)):
        assert word in line


def test_libraries_open_no_connection_by_themselves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(admission, "go_offline", lambda: calls.append(True))
    assert bench("method=none").code == 0
    assert calls


def test_whole_weight_file_passes_with_its_checksum(bench: Bench, tmp_path: Path) -> None:
    file = copy_weights(tmp_path / "model")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n")
    assert bench("method=none", f"model.path={file.parent}").code == 0


def test_unwritable_store_is_found_before_loading(bench: Bench) -> None:
    bench.store.write_text("a file, not a directory")
    assert f"store='{bench.store}' cannot be written" in bench.refusal("method=none")


def test_a_folder_in_the_place_of_a_figure_is_found_before_loading(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "figure.svg").mkdir()
    line = bench.refusal("method=none", f"curves={tmp_path / 'figure'}")
    assert "figure.svg' is not a file" in line


def test_checking_a_folder_makes_nothing(tmp_path: Path) -> None:
    check_folder("report", tmp_path / "not" / "yet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("f2", ("benchmark.metrics", "'f2'", "right")),
        ("right", ("'sums'", "cannot be loaded")),  # whose data are not there
    ],
)
def test_metrics_and_data_are_checked_before_the_model_loads(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    metric: str,
    words: tuple[str, ...],
) -> None:
    real = espalier.harness.evaluation.evaluate.open_benchmark
    bench = request.getfixturevalue("bench")
    monkeypatch.setattr(espalier.harness.evaluation.evaluate, "open_benchmark", real)
    folder = write_task(tmp_path / "t", sums(3))
    if metric == "right":
        (folder / "sums.jsonl").unlink()
    task = (f"benchmark.include_path={folder}", "benchmark.sources=[]", "benchmark.task=sums")
    done = bench(
        "method=none", *task, f"benchmark.metrics=[{metric}]", f"benchmark.headline={metric}"
    )
    line = done.err.splitlines()[-1]  # lmms-eval warns before
    assert (done.code, bench.fake.loads) == (2, 0), line
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("setting", ["include_path={}", "sources=[{}]"])
def test_names_that_no_file_can_have_are_refused(bench: Bench, setting: str) -> None:
    line = bench.refusal("method=none", "benchmark." + setting.format("x" * 300))
    assert line.startswith(f"error: benchmark.{setting.partition('=')[0]}")


def test_missing_calibration_prints_the_command(bench: Bench, tmp_path: Path) -> None:
    copy_weights(tmp_path / "model")
    line = bench.refusal("method=d2pruner", f"model.path={tmp_path / 'model'}", "model.name=fresh")
    assert "python -m espalier calibrate method=d2pruner model=fresh" in line


@pytest.mark.parametrize("line", ["method=fastw", "-m method=none ratio=0.5,2"])
def test_bad_input_from_the_shell(tmp_path: Path, line: str) -> None:
    command = [sys.executable, str(ROOT / "run.py"), f"store={tmp_path}", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
