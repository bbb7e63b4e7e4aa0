"""Several processes and one store of verdicts: none is asked for twice, and all take the same ones."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from espalier.harness.evaluation.judging.judge import collect_verdicts
from espalier.harness.paths import ROOT
from espalier.harness.specs.judge_spec import JudgeSpec
from tests.benchmarks.judge_server import JudgeServer
from tests.judging.asking import questions


def begin(server: JudgeServer, store: Path, count: int) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.judging.asking",
        server.base_url,
        str(store),
        str(count),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def verdicts(process: subprocess.Popen[str]) -> dict[str, str]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(out)


@pytest.fixture
def fickle() -> JudgeServer:
    """A judge that never says the same twice."""
    numbers = itertools.count()
    return JudgeServer(judge=lambda messages: str(next(numbers)))


@pytest.mark.slow
def test_a_second_process_asks_nothing(fickle: JudgeServer, tmp_path: Path) -> None:
    with fickle as server:
        results = collect_verdicts(JudgeSpec(server.base_url, "referee"), tmp_path, questions(10))
        assert len(server.requests) == 10
        answers = verdicts(begin(server, tmp_path, 10))
        assert answers == {str(number): text for (_, number), text in results.verdicts.items()}
        assert len(server.requests) == 10


@pytest.mark.slow
def test_two_at_once_take_the_same_verdicts(fickle: JudgeServer, tmp_path: Path) -> None:
    with fickle as server:
        server.delay = 0.01
        first, second = map(verdicts, [begin(server, tmp_path, 30) for _ in range(2)])
        assert (first, len(first)) == (second, 30)
        assert len(list(tmp_path.glob("judge/*/*.json"))) == 30
        # Nothing half written stays behind.
        assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".json", ""}


@pytest.mark.slow
def test_a_killed_process_has_kept_what_it_was_told(fickle: JudgeServer, tmp_path: Path) -> None:
    with fickle as server:
        server.delay = 0.1
        process = begin(server, tmp_path, 30)
        end = time.monotonic() + 300
        while len(server.requests) < 7:
            assert time.monotonic() < end
            time.sleep(0.01)
        process.kill()
        process.communicate()
        kept = len(list(tmp_path.glob("judge/*/*.json")))
        assert 0 < kept < 30
        requests, server.delay = len(server.requests), 0.0
        assert len(verdicts(begin(server, tmp_path, 30))) == 30
        assert len(server.requests) == requests + 30 - kept
        # Only what was under way when it died is asked again: two at once.
        assert requests - kept <= 2
