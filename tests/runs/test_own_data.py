"""Own data from the command line: twelve pictures and a table, as docs/own_data.md shows it."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import run
from espalier import results
from espalier.harness.errors import tell_once
from espalier.harness.runs.admission import admit
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.harness.store.files.digests import Digests
from tests import commands

#: The embedded model knows no words of an instruction.
BARE = "+benchmark.prompt.post_prompt=''"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV beside a folder of twelve scenes, whose place needs quotes."""
    folder = tmp_path_factory.mktemp("own") / "my data (v=2)"
    (folder / "pictures").mkdir(parents=True)
    with (folder / "scenes.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "question", "answer", "category"))
        for number, doc in enumerate(samples("seedling_vqa", "test", 0, 4_000_000, 12)):
            name = f"pictures/scene, {number}.png"
            sample_scene(doc).to_pil().save(folder / name)
            writer.writerow((name, doc["question"], doc["answer"], doc["family"]))
    return folder / "scenes.csv"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


spec_of = partial(commands.spec_of, "benchmark=data")


def key_of(*argv: str) -> str:
    return admit(spec_of(*argv), Digests(), places=False).key


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run.main(["engine.warmup=0", "engine.paired=0", "json=true", *argv]) == 0, (
        capsys.readouterr().err
    )
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.slow
def test_twelve_pictures_are_a_benchmark(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"benchmark.path={table}"
    argv = ("method=none", "benchmark=data", path, BARE, f"store={tmp_path / 'store'}")
    (row,) = rows(capsys, *argv)
    assert (row["benchmark"], row["n_samples"]) == ("data:scenes", 12)
    assert row["settings"]["benchmark"]["score"] == {"name": "exact"}
    assert row["metrics"]["accuracy"]["value"] == 1
    assert set(row["metrics"]) == {
        *("accuracy", "accuracy_attr", "accuracy_exist", "accuracy_count", "unparsed")
    }
    assert row["extra"]["unparsed"] == 0
    assert row["extra"]["prompt"]["rendered"].startswith("USER: <image> ")
    (cached,) = rows(capsys, "benchmark.score=exact", *argv)
    assert (cached["status"], cached["run_key"]) == ("cached", row["run_key"])


@pytest.mark.slow
def test_limits_and_sweeps_are_those_of_every_benchmark(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("benchmark=data", f"benchmark.path={table}", BARE)
    (limited,) = rows(capsys, "method=none", "limit=5", f"store={tmp_path / 'limited'}", *common)
    assert limited["n_samples"] == 5
    sweep = ("-m", "method=none,random", "ratio=0.9", f"store={tmp_path / 'store'}")
    full, pruned = rows(capsys, *sweep, *common)
    assert pruned["tokens"]["kept_final"] < full["tokens"]["kept_final"]
    assert pruned["metrics"]["accuracy"]["value"] < full["metrics"]["accuracy"]["value"]
    assert {*results.compare(tmp_path / "store")["benchmark"]} == {"data:scenes"}


def test_a_changed_picture_changes_the_key(table: Path) -> None:
    path = f"benchmark.path={table}"
    first = key_of("method=none", path, BARE)
    assert key_of("method=none", path, BARE) == first
    assert key_of("method=none", path) != first
    assert key_of("method=none", path, BARE, "benchmark.score=contains") != first
    picture = table.parent / "pictures" / "scene, 0.png"
    content = picture.read_bytes()
    Image.new("RGB", (96, 96), "white").save(picture)
    assert key_of("method=none", path, BARE) != first
    picture.write_bytes(content)
    assert key_of("method=none", path, BARE) == first


def test_settings_of_other_benchmarks_say_nothing_of_records() -> None:
    job = admit(commands.spec_of("method=none", "benchmark=seedling_vqa"), Digests(), places=False)
    assert not {"score", "data"} & set(job.parts["settings"]["benchmark"])


def test_what_the_config_leaves_open_follows_from_the_data(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_once.cache_clear()
    path = f"benchmark.path={table}"
    benchmark = spec_of(path).benchmark
    line = "12 records, benchmark.score=exact, because the records have answers and no choices"
    assert line in capsys.readouterr().err
    assert (benchmark.name, benchmark.task, benchmark.headline) == (
        *("data:scenes", "data_exact", "accuracy"),
    )
    assert benchmark.dataset.samples == 12
    benchmark = spec_of(path, "benchmark.score=anls", "benchmark.name=mine").benchmark
    assert (benchmark.name, benchmark.headline) == ("mine", "anls")
    pictures = f"benchmark.path={table.parent / 'pictures'}"
    benchmark = spec_of(pictures, "benchmark.question='what is there ?'").benchmark
    assert (benchmark.task, benchmark.metrics) == ("data_none", ("words",))


def test_a_closed_vocabulary_is_noted(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = f"benchmark.path={table.parent / 'pictures'}"
    admit(spec_of(pictures, "benchmark.question='is a cat there ?'"), Digests(), places=False)
    line = capsys.readouterr().err
    assert "those of data:pictures may be unknown to it (" in line
