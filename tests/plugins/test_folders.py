"""`--config-dir own` and `hydra.searchpath=[file://own]`: names of such a folder stand wherever those of conf/ do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import compose_section
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.runs.cluster import cluster_sweep
from espalier.harness.runs.cluster.job_file import JobFile, JobGroup
from espalier.harness.specs.run_spec import RunSpec
from tests import commands
from tests.cluster.test_sweep import Here
from tests.plugins.packages import config, method, write
from tests.runs.helpers import Bench, make_bench

DRAFT = f"""# A draft.
defaults: [seedling, _self_]
name: baby
path: {ROOT}/harness/seedling/weights/seedling_draft
facts:
  text: {{layers: 2, hidden: 192, intermediate: 384, heads: 6, kv_heads: 6, head_dim: 32}}
drafts: []
"""

BENCHMARK = """# Sums.
defaults: [/base/benchmark@_here_, _self_]
name: sums
title: Sums
task: sums
include_path: tasks
sources: [tasks/sums, tasks/sums.json]
metrics: [accuracy]
headline: accuracy
"""

PRESET = """# @package _global_
# Sums with first tokens.
defaults:
  - override /benchmark: sums
  - override /method: first
hydra:
  mode: MULTIRUN
  sweeper:
    params: {ratio: "0.5,0.9"}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "own/mine.py": method("First"),
        "own/method/first.yaml": config("first", "mine.py:First"),
        "own/benchmark/sums.yaml": BENCHMARK,
        "own/experiment/sums_first.yaml": PRESET,
        "own/model/baby.yaml": DRAFT,
    }
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    return tmp_path / "own"


@pytest.fixture
def bench(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    return make_bench(folder.parent / "store", capsys, monkeypatch)


@pytest.mark.parametrize(
    "flags", [("--config-dir", "own"), ("--config-dir=own",), ("hydra.searchpath=[file://own]",)]
)
def test_its_paths_start_at_the_folder(folder: Path, flags: tuple[str, ...]) -> None:
    command = read_command([*flags, "-m", "+experiment=sums_first", "limit=1"])
    specs = [build_spec(cell, folders=command.folders) for cell in command.cells]
    assert [spec.budget.ratio for spec in specs] == [0.5, 0.9]
    assert specs[0].method.code == f"{folder}/mine.py:First"
    assert specs[0].benchmark.include_path == folder / "tasks"
    assert specs[0].benchmark.sources == (folder / "tasks/sums", folder / "tasks/sums.json")
    # The line runs from any folder.
    assert f'hydra.searchpath=["file://{folder}"]' in command.argv
    assert all(f'hydra.searchpath=["file://{folder}"]' in line for line in command.lines)
    assert commands.spec_of(
        *flags, "benchmark=sums", "benchmark.include_path=/else"
    ).benchmark.include_path == Path("/else")


def test_a_run_takes_its_names_and_lines_list_them(bench: Bench) -> None:
    done = bench.success("--config-dir", "own", "method=first")
    assert (done.last["method"], done.last["extra"]["label"]) == ("first", "")
    line = bench.refusal("--config-dir", "own", "method=frist")
    assert "did you mean first?" in line
    assert " first," in line
    assert "method='first' is unknown" in bench.refusal("method=first")


def test_listings_have_them(bench: Bench, folder: Path) -> None:
    files = {
        "method/bad.yaml": config("bad", "none.py:A"),
        "method/none.yaml": config("none", "mine.py:First"),
        "benchmark/odd.yaml": "a: [\n",
        "benchmark/empty.yaml": "",
    }
    write(folder, files)
    listings = {
        ("method=?", "--config-dir", "own"): (
            "\nfirst ",
            "\nnone  ",
            f"\nof {folder}: first\n",
            f"passed over: {folder}/method/bad.yaml: method='{folder}/none.py:A'",
            f"passed over: {folder}/method/none.yaml: method='none' is a file of conf and {folder}",
        ),
        ("benchmark=?", "hydra.searchpath=[file://own]"): (
            "\nsums ",
            f"passed over: {folder}/benchmark/odd.yaml",
            f"passed over: {folder}/benchmark/empty.yaml",
        ),
        ("+experiment=?", "--config-dir=own"): ("\nsums_first ",),
        ("model=?", "--config-dir=own"): ("\nbaby ",),
    }
    for line, words in listings.items():
        page = bench(*line).out
        assert [word for word in words if word not in page] == []
    assert "sums" not in bench("benchmark=?").out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--config-dir", "nowhere"), "--config-dir: nowhere holds no configs"),
        (("--config-dir", "own/method"), "holds no configs; valid: a folder with method/"),
        (("hydra.searchpath=[pkg://no.such]",), "pkg://no.such holds no configs"),
        (("hydra.searchpath=[",), "is not an override"),
        (("--config-dir", "own", "method=none"), "method='none' is a file of conf and "),
        (("--config-dir", "own", "method=nocode"), "method.name='nocode' has no file in methods/"),
        (("--config-dir", "own", "method=taken"), "fastv is the name of method fastv"),
        (
            ("--config-dir", "own", "model=utf16"),
            "own/model/utf16.yaml cannot be read ('utf-8' codec",
        ),
    ],
)
def test_a_mistake_is_one_line(
    bench: Bench, folder: Path, line: tuple[str, ...], words: str
) -> None:
    files = {
        "method/none.yaml": config("none", "mine.py:First"),
        "method/nocode.yaml": config("nocode", None),
        "method/taken.yaml": config("fastv", "mine.py:First"),
    }
    write(folder, files)
    (folder / "model" / "utf16.yaml").write_text(DRAFT, encoding="utf-16")
    assert words in bench.refusal(*line)


def test_tasks_of_lmms_eval_stay_benchmarks() -> None:
    command = read_command(["hydra.searchpath=[lmms-eval://tasks]", "benchmark=task:mmstar"])
    assert command.folders == ()
    assert compose_section("benchmark", "task:mmstar")["name"] == "task:mmstar"


def test_looking_shows_the_same_config(bench: Bench, folder: Path) -> None:
    done = bench.success(
        "--config-dir", "own", "benchmark=sums", "--cfg", "job", "--package", "benchmark"
    )
    assert f"include_path: {folder}/tasks\n" in done.out


@pytest.mark.slow
def test_a_sweep_composes_sections_once(folder: Path) -> None:
    line = ["-m", "method=none,fastv,first", "ratio=0.1,0.5,0.9", "benchmark=sums"]
    assert list(commands.cells_of("--config-dir", "own", *line)) == [
        commands.cells_of("--config-dir", "own", f"method={name}", f"ratio={ratio}", line[-1])[0]
        for name in ("none", "fastv", "first")
        for ratio in (0.1, 0.5, 0.9)
    ]


def test_a_job_finds_a_draft_of_the_folder(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's name is read again in the job, which may start in another folder."""
    specs: list[RunSpec] = []

    class Elsewhere(Here):
        def start(self, packs: Sequence[JobGroup[Any]], files: Sequence[JobFile]) -> None:
            self.names.append("job-0")
            monkeypatch.chdir("/")
            specs.extend(
                build_spec(entry.config, folders=tuple(map(Path, entry.conf)))
                for entry in files[0].entries()
            )
            files[0].end(0)

    monkeypatch.setattr(cluster_sweep, "LocalWorkers", Elsewhere)
    line = ("method=pearl", "method.draft=baby", "cluster=joblib", "cluster.poll=0.01")
    assert bench("--config-dir", "own", *line).code == 1  # no row was made
    (spec,) = specs
    assert spec.method.draft.name == "baby"
    assert "method.draft='baby' is unknown" in bench(*line).err


def test_job_files_of_before_are_read(tmp_path: Path) -> None:
    entry = {"key": "k", "row": "r", "before": None, "config": {}}
    (tmp_path / "job.json").write_text(json.dumps([entry]))
    assert JobFile(tmp_path / "job.json").entries()[0].conf == ()


def test_a_file_that_two_folders_have_is_of_neither(folder: Path) -> None:
    write(folder.parent, {"second/method/first.yaml": config("first", "mine.py:First")})
    places = "hydra.searchpath=[file://own,file://second]"
    with pytest.raises(UserError, match=r"method='first' is a file of .*own and .*second"):
        read_command([places, "method=first"])
