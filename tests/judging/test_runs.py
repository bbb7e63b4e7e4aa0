"""Judged benchmarks through run.py: refused without a judge, answers first, nothing lost with the judge, and no key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import run
from espalier.harness.engine.session import Session
from espalier.harness.paths import ROOT
from espalier.harness.store import Store
from tests.benchmarks.fixtures.judged import ABILITIES, llava_bench
from tests.benchmarks.judge_server import Answer, JudgeServer, Messages, error

KEY = "sk-a-key-that-nobody-may-see"
ANSWERS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    llava_bench(root)
    return root


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[JudgeServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache/datasets"))
    with JudgeServer(key=KEY) as judge:
        yield judge


Command = Callable[..., tuple[int, list[dict[str, Any]], str]]


def arguments(data: Path, store: Path, server: JudgeServer, *more: str) -> list[str]:
    return [
        *("benchmark=llava_bench", f"benchmark.path={data}", f"store={store}", "method=random"),
        *("engine.batch_size=2", "engine.warmup=0", "engine.paired=0", "model.device=cpu"),
        *("+benchmark.generation.max_new_tokens=4", "json=true", "model.closed_vocabulary=false"),
        *server.argv,
        *more,
    ]


@pytest.fixture
def command(
    data: Path, tmp_path: Path, server: JudgeServer, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Run a command line; whatever it leaves or says, the key is not in it."""

    def call(*more: str) -> tuple[int, list[dict[str, Any]], str]:
        code = run.main(arguments(data, tmp_path / "store", server, *more))
        out, err = capfd.readouterr()
        assert KEY not in out + err
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
        return code, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err

    return call


@pytest.mark.slow
def test_a_row_says_who_judged_and_how(command: Command, server: JudgeServer) -> None:
    code, (row,), _ = command()
    assert (code, row["n_samples"]) == (0, ANSWERS)
    # What the embedded model says is wrong: 2 points of 8.
    assert row["metrics"]["all"]["value"] == 25
    judge = row["extra"]["judge"]
    assert len(judge.pop("prompt_hash")) == 16
    assert judge == {
        "model": "referee",
        "served": ["referee-2026-01-01"],
        "prompt": "espalier-v1",
        "verdicts": ANSWERS,
        "cached_share": 0.0,
        "failed_requests": 0,
        "unjudged": 0,
    }
    settings = row["settings"]["judge"]
    assert settings == {
        "model": "referee",
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 1024,
        "options": {},
        "prompt": None,
    }
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "A blue wall.\nA yellow square on it." in server.requests[0]["messages"][-1]["content"]
    # The same answers under another key of the run are judged already.
    code, (again,), _ = command("force=true")
    assert (code, len(server.requests)) == (0, ANSWERS)
    assert again["extra"]["judge"]["cached_share"] == 1
    assert again["metrics"] == row["metrics"]


@pytest.mark.slow
def test_a_lost_judge_costs_no_answer(
    command: Command, server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.next(Answer(), *[error(500, "no more memory")] * 9)
    code, rows, err = command("judge.retries=0", "judge.concurrency=1")
    assert (code, rows) == (1, [])
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert "HTTP 500: no more memory; 3 of 4 answers are not judged" in line
    assert "the same command goes on from them" in line
    assert Store(tmp_path / "store").rows() == []
    # Answers are there: the model has nothing to say any more, and one verdict stands.
    monkeypatch.setattr(Session, "generate", lambda *_, **__: pytest.fail("answered again"))
    server._coming.clear()
    requests = len(server.requests)
    code, (row,), _ = command()
    assert code == 0
    assert (row["status"], row["extra"]["resumed_samples"]) == ("resumed", ANSWERS)
    assert (row["extra"]["judge"]["cached_share"], len(server.requests)) == (0.25, requests + 3)


@pytest.mark.slow
def test_a_sample_without_verdict_fails_the_run_or_is_left_out_as_allowed(
    command: Command, server: JudgeServer
) -> None:
    def judge(messages: Messages) -> str:
        return "splendid" if "Which colour" in messages[-1]["content"] else "8 4"

    server.judge = judge
    code, rows, err = command("judge.retries=1")
    assert (code, rows) == (1, [])
    assert "1 of 4 samples failed: llava_bench/1: Unjudged: no score in 2 answers" in err
    code, (row,), _ = command("judge.retries=1", "engine.max_errors=1")
    assert code == 0
    # Neither a zero nor a guess: three samples count.
    assert (row["n_samples"], row["metrics"]["all"]["value"]) == (3, 50)
    assert (len(row["extra"]["failures"]), row["extra"]["judge"]["unjudged"]) == (1, 1)
    # Asked again by the second command, and by that one alone.
    assert len(server.requests) == 5 + 2


def test_a_wrong_key_is_told_in_one_line(
    command: Command, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "key", "another")
    code, _, err = command()
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert "HTTP 401: Incorrect API key provided: ***; the key is read from the variable " in line


@pytest.mark.slow
def test_words_of_the_users_own_make_another_run(
    command: Command, server: JudgeServer, tmp_path: Path
) -> None:
    file = tmp_path / "strict.yaml"
    file.write_text("user: 'Rate {reference} and {answer} of {question}, as {\"score\": 4}.'\n")
    server.judge = lambda messages: "10, 5"
    _, (plain,), _ = command()
    code, (row,), _ = command(f"judge.prompt={file}")
    assert (code, server.requests[-1]["messages"][0]["role"]) == (0, "user")
    assert '{"score": 4}' in server.requests[-1]["messages"][0]["content"]
    assert row["run_key"] != plain["run_key"]
    judges = [block["extra"]["judge"] for block in (plain, row)]
    assert [block["prompt"] for block in judges] == ["espalier-v1", "strict"]
    assert judges[0]["prompt_hash"] != judges[1]["prompt_hash"]
    assert row["settings"]["judge"]["prompt"] == judges[1]["prompt_hash"]


@pytest.mark.exhaustive
def test_a_terminated_run_goes_on_with_what_it_has(
    command: Command, server: JudgeServer, data: Path, tmp_path: Path
) -> None:
    server.next(Answer(delay=0.5), Answer(delay=600))
    argv = arguments(data, tmp_path / "store", server, "judge.concurrency=1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    end = time.monotonic() + 300
    while len(server.requests) < 2:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    # It does not wait for the judge, which answers in ten minutes.
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert err.splitlines()[-1].startswith("error: terminated; finished samples are kept")
    assert KEY not in err
    kept, requests, server.delay = len([*(tmp_path / "store/judge").glob("*/*.json")]), 2, 0.0
    assert kept >= 1
    code, (row,), _ = command()
    assert (code, row["status"]) == (0, "resumed")
    assert row["extra"]["resumed_samples"] == ANSWERS
    assert len(server.requests) == requests + ANSWERS - kept


def test_the_fixtures_ask_about_every_group() -> None:
    from espalier.tasks.judged.utils import ABILITIES as GROUPS

    covered = {ability for several in ABILITIES for ability in several}
    assert all(covered.intersection(abilities) for abilities in GROUPS.values())
