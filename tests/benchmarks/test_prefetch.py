"""Downloads from a small hub on loopback: what is fetched, where it goes, what is said when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.evaluation.hub_data import data_sets
from espalier.harness.paths import ROOT
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.hub_files import Wanted, settled
from espalier.harness.tools.benchmarks import hub_prefetch as module
from espalier.harness.tools.benchmarks.hub_prefetch import (
    archives,
    prefetch,
    unpack,
)
from tests import commands
from tests.benchmarks.fixtures.videos import clip, longvideobench, mlvu, mvbench, tarred, zipped
from tests.benchmarks.loopback import Hub, reached, serving
from tests.tiny import save_llava

MLVU = "sy1998/MLVU_dev"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    for write in (mlvu, longvideobench, mvbench):
        write(root)
    with serving(root) as hub:
        yield hub


@pytest.fixture
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub that this process may reach, and an empty cache."""
    served.requests.clear()
    served.gated.clear()
    served.revisions.clear()
    reached(served, tmp_path / "home", monkeypatch)
    return served


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leave out what needs a process, or the benchmark's whole data; note what would be verified."""
    names: list[str] = []
    monkeypatch.setattr(module, "_prepare", lambda spec: None)
    monkeypatch.setattr(module, "_verify", lambda name, overrides: names.append(name) or 0)
    return names


def benchmark(name: str) -> BenchmarkSpec:
    return commands.spec_of(f"benchmark={name}").benchmark


@pytest.mark.slow
def test_a_machine_without_network_has_all_it_needs(served: Hub, tmp_path: Path) -> None:
    """The commands as a user gives them: download, unpack, prepare; then a process that may not use the network."""
    served.requests.clear()
    bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    place = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "espalier", "benchmarks", "prefetch", "mlvu"]
    done = subprocess.run(
        line, cwd=ROOT, env=bare | place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"HF_HOME={tmp_path / 'home'} (as set)"
    assert lines[1].startswith(f"{MLVU}: 5 files to download, ")
    assert f"{MLVU}: media in {tmp_path / 'home/mlvu'}" in lines
    assert "mlvu: everything is here; checking it without the network" in lines
    checked = [line.split()[1:3] for line in lines if line.startswith("mlvu  ")]
    assert checked[:3] == [["data", "ok"], ["rows", "ok"], ["answers", "ok"]]
    assert len(served.downloads()) == len(set(served.downloads())) == 5
    assert sorted(path.name for path in (tmp_path / "home/mlvu").iterdir()) == [
        "needle_1.mp4",
        "plotQA_0.mp4",
        "plotQA_1.mp4",
    ]


def test_what_is_here_is_not_fetched_again(
    hub: Hub, fetched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prefetch("mlvu") == 0
    first = hub.downloads()
    capsys.readouterr()
    assert (prefetch("mlvu"), hub.downloads()) == (0, first)
    assert f"{MLVU}: 0 files to download, 0 bytes" in capsys.readouterr().out
    assert fetched == ["mlvu", "mlvu"]


@pytest.mark.slow
def test_a_download_that_broke_off_goes_on(hub: Hub, fetched: list[str], tmp_path: Path) -> None:
    hub.broken = 1
    assert (prefetch("mlvu"), hub.broken) == (0, 0)
    assert (tmp_path / "home/mlvu/plotQA_0.mp4").read_bytes() == clip(4)


def test_an_archive_in_pieces_is_put_together(hub: Hub, fetched: list[str], tmp_path: Path) -> None:
    assert prefetch("longvideobench") == 0
    home = tmp_path / "home/datasets/longvideobench"
    assert (home / "videos/v1.mp4").read_bytes() == clip(4)
    assert (home / "subtitles/v0_en.json").is_file()
    assert not home.with_name("longvideobench.partial").exists()


def test_folders_of_videos_are_linked(hub: Hub, fetched: list[str], tmp_path: Path) -> None:
    hub.revisions.add("video")
    assert prefetch("mvbench") == 0
    place = tmp_path / "home/mvbench_video"
    assert place.is_symlink()
    assert (place / "clevrer/video_validation/v0.mp4").read_bytes() == clip(4)


def test_a_checkpoint_comes_too(
    hub: Hub, fetched: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llava(hub.root / "llava-hf/llava-1.5-7b-hf")
    (hub.root / "llava-hf/llava-1.5-7b-hf/pytorch_model.bin").write_bytes(b"older weights")
    revision = commands.spec_of("model=llava15_7b").model.revision
    hub.revisions.add(revision)
    assert prefetch("seedling_vqa", ["model=llava15_7b"]) == 0
    home = tmp_path / "home/hub/models--llava-hf--llava-1.5-7b-hf/snapshots" / revision
    assert (home / "model.safetensors").is_file()
    assert not (home / "pytorch_model.bin").exists()
    assert "llava-hf/llava-1.5-7b-hf: " in capsys.readouterr().out


def test_only_the_files_of_the_configuration_are_fetched(hub: Hub) -> None:
    assert set(settled(Wanted("longvideobench/LongVideoBench")).patterns) == {
        "README.md",
        "test-00000-of-00001.parquet",
        "validation-00000-of-00001.parquet",
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("seedling_rec", ()),
        ("pope", (Wanted("lmms-lab-encoder/POPE"),)),
        ("mlvu_describe", (Wanted(MLVU, unpack="mlvu"),)),
        (
            "mvbench",
            (Wanted("OpenGVLab/MVBench", revision="video", unpack="mvbench_video", link=True),),
        ),
    ],
)
def test_task_files_say_what_is_read(name: str, wanted: tuple[Wanted, ...]) -> None:
    assert data_sets(benchmark(name)) == wanted


def full(*args: object, **more: object) -> None:
    raise OSError(28, "No space left on device")


#: What stops a download: a benchmark, what is done to the hub or the machine before, and the line.
STOPPED: tuple[tuple[str, Callable[[Hub, pytest.MonkeyPatch], None], str], ...] = (
    (
        "mlvu",
        lambda hub, patch: hub.gated.add(MLVU),
        rf"^dataset {MLVU} is gated: accept its terms at http",
    ),
    ("videomme", lambda hub, patch: None, r"^dataset lmms-eval/Video-MME is not on http"),
    (
        "mvbench",
        lambda hub, patch: None,
        r"^dataset OpenGVLab/MVBench has no revision 'video'",
    ),
    (
        "mlvu",
        lambda hub, patch: patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        r"cannot be reached.*HF_HUB_OFFLINE unset",
    ),
    (
        "mlvu",
        lambda hub, patch: patch.setattr(
            "huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"
        ),
        r"^dataset .* http://127\.0\.0\.1:9 cannot be reached",
    ),
    (
        "mlvu",
        lambda hub, patch: patch.setattr(module, "free", lambda folder: 1000),
        r"kB may be needed .*1 kB are free",
    ),
    (
        "mlvu",
        lambda hub, patch: patch.setattr(module, "unpack", full),
        r"the disk is full; what is downloaded stays",
    ),
)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "prepare", "line"), STOPPED)
def test_what_stops_a_download_is_one_line(
    hub: Hub,
    fetched: list[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    prepare: Callable[[Hub, pytest.MonkeyPatch], None],
    line: str,
) -> None:
    prepare(hub, monkeypatch)
    with pytest.raises(UserError, match=line):
        prefetch(name)
    assert bool(hub.downloads()) == ("what is downloaded" in line)


def test_unpacking_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "media"
    source.mkdir()
    zipped(source / "one.zip", {"a": b"first", "b": b"second"})
    partial = tmp_path / "media.partial"
    partial.mkdir()
    (partial / "b").write_bytes(b"sec")
    unpack(source, target, lambda line: None)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        "a": b"first",
        "b": b"second",
    }
    assert not partial.exists()


def test_nothing_stands_under_the_name_before_all_is_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "media"
    source.mkdir()
    zipped(source / "1.zip", {"a": b"first"})
    (source / "2.zip").write_bytes(b"no archive")
    with pytest.raises(zipfile.BadZipFile):
        unpack(source, target, lambda line: None)
    assert not target.exists()


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["b.zip", "a.zip"], [["a.zip"], ["b.zip"]]),
        (["v.tar.part.ab", "v.tar.part.aa"], [["v.tar.part.aa", "v.tar.part.ab"]]),
        (["v_1.tar", "v_2.tar"], [["v_1.tar", "v_2.tar"]]),
        (["a.tar", "b.tar.gz"], [["a.tar"], ["b.tar.gz"]]),
        (["notes.txt", "tarts.md"], []),
    ],
)
def test_pieces_of_an_archive_belong_together(
    tmp_path: Path, names: list[str], groups: list[list[str]]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert [[path.name for path in group] for group in archives(tmp_path)] == groups


def test_members_outside_the_folder_are_not_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "bad.tar").write_bytes(tarred({"../outside.txt": b"x"}))
    with pytest.raises(tarfile.TarError):
        unpack(source, tmp_path / "media", lambda line: None)
    assert not (tmp_path / "outside.txt").exists()
