"""Rows mirrored in Weights & Biases: trouble there costs a line and a bounded time, never a row."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.running import wandb_log
from harness.store import Store
from tests.running.helpers import Bench, make_bench

wandb = pytest.importorskip("wandb")


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb" / name.lower()))
    return make_bench(tmp_path / "store", capsys, monkeypatch)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_wandb_run_is_written_offline_after_the_row(bench: Bench) -> None:
    done = bench("method=fastv", "log=wandb")
    assert done.code == 0, done.err
    assert Store(bench.store).run(done.last["run_key"]).row() is not None
    assert list(bench.store.glob("wandb/offline-run-*/*.wandb"))
    # Where rows are mirrored does not change them: the same key is found with another log.
    assert bench("method=fastv", "log=none").last["status"] == "cached"


@pytest.mark.parametrize(
    ("option", "words"),
    [("projekt=x", "did you mean project?"), ("dir=/tmp", "log.options='dir'")],
)
def test_an_option_that_wandb_lacks_or_that_is_ours_is_refused_before_the_run(
    bench: Bench, option: str, words: str
) -> None:
    done = bench("method=none", "log=wandb", f"+log.options.{option}")
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert words in line
    assert bench.fake.specs == []


def test_trouble_with_wandb_is_a_line_and_the_sweep_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**options: Any) -> None:
        raise wandb.errors.CommError("no such entity\nand more of it")

    monkeypatch.setattr(wandb, "init", fail)
    monkeypatch.setattr(wandb_log, "check", lambda options: None)
    done = bench("-m", "method=none,fastv", "ratio=0.5", "log=wandb")
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if line.startswith("log=wandb")]
    assert len(lines) == 2
    assert all("CommError: no such entity; its row is in the store" in line for line in lines)
    assert len(Store(bench.store).rows()) == 2


def test_a_key_without_a_server_that_answers_means_offline_within_seconds(
    silent_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    monkeypatch.setattr(wandb_log, "ANSWER", 0.2)
    started = time.perf_counter()
    assert [wandb_log.mode() for _ in range(3)] == ["offline"] * 3
    assert time.perf_counter() - started < 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{silent_server} does not answer" in line
    monkeypatch.delenv("WANDB_API_KEY")
    assert wandb_log.mode() == "offline"
    assert capsys.readouterr().err == ""
