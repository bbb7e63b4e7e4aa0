"""Bad input: exit 2 and exactly one line that names the config key and what would be valid, before anything runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import espalier.harness.evaluation.evaluate
from espalier.harness.paths import ROOT
from espalier.harness.store.files.folder_checks import check_folder
from tests.arithmetic import sums, write_task
from tests.runs.helpers import Bench, make_bench

WEIGHTS = ROOT / "harness/seedling/weights/seedling"


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    return make_bench(tmp_path / "store", capsys, monkeypatch)


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
    done = bench("method=none", f"model.path={file.parent}")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "model.path" in done.err
    assert "damaged" in done.err
    assert str(file.parent) in done.err
    assert repr(file.name) in done.err
    assert bench.fake.loads == 0


def test_whole_weight_file_passes_with_its_checksum(bench: Bench, tmp_path: Path) -> None:
    import hashlib

    file = copy_weights(tmp_path / "model")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n")
    assert bench("method=none", f"model.path={file.parent}").code == 0


def test_unwritable_store_is_found_before_loading(bench: Bench) -> None:
    bench.store.write_text("a file, not a directory")
    done = bench("method=none")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert f"store='{bench.store}' cannot be written" in done.err
    assert bench.fake.loads == 0


def test_a_folder_in_the_place_of_a_figure_is_found_before_loading(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "figure.svg").mkdir()
    done = bench("method=none", f"curves={tmp_path / 'figure'}")
    assert done.code == 2
    assert "figure.svg' is not a file" in done.err
    assert bench.fake.loads == 0


def test_checking_a_folder_makes_nothing(tmp_path: Path) -> None:
    check_folder("report", tmp_path / "not" / "yet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lacking", ["metric", "data"])
def test_metrics_and_data_are_checked_before_the_model_loads(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
) -> None:
    real = espalier.harness.evaluation.evaluate.open_benchmark
    bench = make_bench(tmp_path / "store", capsys, monkeypatch)
    monkeypatch.setattr(espalier.harness.evaluation.evaluate, "open_benchmark", real)
    folder = write_task(tmp_path / "t", sums(3))
    metric = {"metric": "f2", "data": "right"}[lacking]
    if lacking == "data":
        (folder / "sums.jsonl").unlink()
    task = (f"benchmark.include_path={folder}", "benchmark.sources=[]", "benchmark.task=sums")
    done = bench(
        "method=none", *task, f"benchmark.metrics=[{metric}]", f"benchmark.headline={metric}"
    )
    line = done.err.splitlines()[-1]  # lmms-eval warns before
    assert done.code == 2, line
    words = {
        "metric": ("benchmark.metrics", "'f2'", "right"),
        "data": ("'sums'", "cannot be loaded"),
    }
    for word in words[lacking]:
        assert word in line
    assert bench.fake.loads == 0


@pytest.mark.parametrize("setting", ["include_path={}", "sources=[{}]"])
def test_names_that_no_file_can_have_are_refused(bench: Bench, setting: str) -> None:
    done = bench("method=none", "benchmark." + setting.format("x" * 300))
    assert done.code == 2
    assert done.err.startswith(f"error: benchmark.{setting.partition('=')[0]}")
    assert len(done.err.splitlines()) == 1


def test_missing_calibration_prints_the_command(bench: Bench, tmp_path: Path) -> None:
    copy_weights(tmp_path / "model")
    done = bench("method=d2pruner", f"model.path={tmp_path / 'model'}", "model.name=fresh")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "python -m espalier calibrate method=d2pruner model=fresh" in done.err


@pytest.mark.parametrize("line", ["method=fastw", "-m method=none ratio=0.5,2"])
def test_bad_input_from_the_shell(tmp_path: Path, line: str) -> None:
    command = [sys.executable, str(ROOT / "run.py"), f"store={tmp_path}", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
