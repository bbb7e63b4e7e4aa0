"""What a run fetches from a small hub on loopback, and the line that ends it where there is no hub."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from PIL import Image

import espalier
import run
from espalier.harness.config.checkpoint_names import model_choice
from espalier.harness.paths import ROOT
from espalier.harness.specs import hub_cache
from espalier.harness.specs.hub_files import PATIENCE, checkpoint_folder
from tests.benchmarks.fixtures.choices import pope
from tests.benchmarks.loopback import Hub, reached, serving
from tests.refused import refused
from tests.tiny import save_llava

#: Runs command lines in one process, and prints what each takes.
TIMED = """
import sys, time
import run
for line in {lines!r}:
    start = time.monotonic()
    print(run.main(line.split()), time.monotonic() - start < {most}, "torch" in sys.modules)
"""

#: Command lines, and the start of the line that ends them without a network.
AWAY = {
    "model=llava_ov_72b method=parallelvlm ratio=0.9 benchmark=seedling_vqa": "model.hub='llava-hf/",
    "model=me/tiny method=none": "model='me/tiny' is no hub id of conf/model; model.hub='me/tiny'",
    "method=vanilla_sd method.draft=me/tiny": "method.draft='me/tiny' is no hub id of conf/model; ",
    "method=vanilla_sd method.draft=llava15_7b": "method.draft_options.hub='llava-hf/llava-1.5-7b-hf'",
    "model=llava15_7b benchmark=pope method=none": "dataset lmms-lab-encoder/POPE",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    save_llava(root / "me/tiny")
    pope(root)
    with serving(root) as hub:
        yield hub


@pytest.fixture
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub that runs of this process may reach, and an empty cache."""
    served.requests.clear()
    reached(served, tmp_path / "home", monkeypatch)
    monkeypatch.setattr(hub_cache, "BY_ENVIRONMENT", False)
    hub_cache.downloads.set(True)
    return served


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.sampled
@pytest.mark.parametrize("answers", ["refuses", "is silent"])
def test_without_a_network_a_run_ends_in_one_line_within_seconds(
    answers: str, silent_hub: str, tmp_path: Path
) -> None:
    # Each silence takes seconds.
    lines = list(AWAY) if answers == "refuses" else [list(AWAY)[1]]
    endpoint = "http://127.0.0.1:9" if answers == "refuses" else silent_hub
    bare = {name: value for name, value in os.environ.items() if name not in hub_cache.OFFLINE}
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(lines=lines, most=PATIENCE + 3)],
        cwd=ROOT,
        env=bare | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["2 True False"] * len(lines)
    for line, error in zip(lines, done.stderr.splitlines(), strict=True):
        assert error.startswith(f"error: {AWAY[line]}")
        assert f"{endpoint} cannot be reached" in error
        assert "path=<" in error
        assert f"or its copy in {tmp_path / 'hub'} from another machine" in error


@pytest.mark.slow
def test_a_run_fetches_what_it_needs_once(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["model=me/tiny", "benchmark=pope", "method=none", "limit=2", f"store={tmp_path}"]
    line += ["engine.paired=0", "engine.warmup=0", "json=true"]
    assert run.main(line) == 0
    printed = capfd.readouterr()
    row = json.loads(printed.out.splitlines()[-1])
    assert row["settings"]["model"]["revision"] == f"me/tiny@{hub.commit('me/tiny')}"
    data = "lmms-lab-encoder/POPE"
    assert row["extra"]["environment"]["dataset"] == f"{data}@{hub.commit(data)}"
    said = [text for text in printed.err.splitlines() if text.startswith("downloading ")]
    assert [text.partition(" files")[0] for text in said] == [
        "downloading me/tiny: 5",
        "downloading me/tiny: 1",
        "downloading lmms-lab-encoder/POPE: 1",
    ]
    assert all(text.endswith(f", to {tmp_path / 'home/hub'}") for text in said)
    downloads = [path for path in hub.downloads() if path != "README.md"]
    assert len(downloads) == len(set(downloads)) == 7
    hub.requests.clear()
    # Not from the store: the model and the data are opened again.
    assert run.main([*line, "force=true", "seed=1"]) == 0
    assert hub.requests == []


def test_loading_from_python_fetches_unless_offline(hub: Hub) -> None:
    line = refused(espalier.load, "me/tiny", offline=True)
    assert "not in the local Hugging Face cache" in line
    assert hub.requests == []
    assert espalier.load("me/tiny", device="cpu").spec.hub == "me/tiny"
    assert "model.safetensors" in hub.downloads()
    assert hub_cache.may_download()
    assert "HF_HUB_OFFLINE" not in os.environ or os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_download_goes_on_with_what_is_missing(hub: Hub) -> None:
    folder = checkpoint_folder("me/tiny", "main")
    weights = folder / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    hub.requests.clear()
    assert checkpoint_folder("me/tiny", "main") == folder
    assert hub.downloads() == ["model.safetensors"]
    assert weights.is_file()


@pytest.mark.parametrize(
    "line",
    [
        "model=me/tiny offline=true",
        "model=me/tiny --dry",
        "model=llava15_7b model.dtype=bfloat16 offline=true",
        "model=llava15_7b model.dtype=bfloat16 cluster=joblib",
        "model=llava15_7b model.weights=random model.dtype=bfloat16 benchmark=pope offline=true",
    ],
)
def test_what_may_not_download_asks_nobody(
    hub: Hub, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["method=none", *line.split(), f"store={tmp_path}"]) == 2
    assert "not in the local Hugging Face cache" in capsys.readouterr().err
    assert hub.requests == []


def test_a_dry_run_names_what_a_run_would_download(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["model=llava15_7b", "model.dtype=bfloat16", "benchmark=pope", "method=none", "--dry"]
    assert run.main([*line, f"store={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "downloads of the runs: llava-hf/llava-1.5-7b-hf, lmms-lab-encoder/POPE\n" in printed
    assert "missing on this machine" not in printed
    assert hub.requests == []


def test_a_name_that_the_hub_lacks_is_one_line_with_the_nearest(hub: Hub) -> None:
    line = refused(model_choice, "llava-hf/llava-1.5-7b-hg")
    assert "did you mean llava-hf/llava-1.5-7b-hf?" in line
    assert "is not on http" in line


def no_network(*arguments: object, **options: object) -> NoReturn:
    raise AssertionError("a connection was tried")


@pytest.mark.slow
def test_embedded_models_and_own_data_try_no_connection(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, no_network)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, no_network)
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    (tmp_path / "own.csv").write_text("image,question,answer\nred.png,is there a star ?,no\n")
    own_data = f"benchmark=data benchmark.path={tmp_path / 'own.csv'}"
    for bench in ("benchmark=seedling_vqa", own_data):
        line = [*bench.split(), "method=random", "ratio=0.5", "limit=2", f"store={tmp_path}"]
        assert run.main([*line, "engine.paired=0", "engine.warmup=0"]) == 0
    assert espalier.load("seedling", device="cpu").name == "seedling"
    assert hub.requests == []


def test_prepared_tables_of_another_data_set_are_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that were prepared after a first look are seen."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    os.utime(tmp_path, (0, 0))
    names = ("lmms-lab/POPE", "lmms-lab/MMBench_EN", "lmms-lab/GQA", "lmms-lab-encoder/POPE")
    assert not any(map(hub_cache.data_set_cached, names))
    for name in ("lmms-lab___pope", "lmms-lab___mm_bench_en"):
        (tmp_path / name).mkdir()
    assert [hub_cache.data_set_cached(name) for name in names] == [True, True, False, False]
