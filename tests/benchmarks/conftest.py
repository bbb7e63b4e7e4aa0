"""What tests of benchmarks share: a folder of all repositories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

os.environ["HF_DATASETS_OFFLINE"] = "1"

from espalier.harness.evaluation.lmms_tasks import scoring
from tests.benchmarks.fixtures import FIXTURES
from tests.benchmarks.runs import Scored, opened


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a benchmark's data set, once, and returns the folder of all repositories."""
    place = tmp_path_factory.mktemp("repositories")
    written = {}

    def write(name: str) -> Path:
        writer = FIXTURES[name]
        if writer not in written:
            written[writer] = place / name
            writer(place / name)
        return written[writer]

    return write


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare data sets in one folder of the session's own."""
    place = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("HF_HOME", str(place))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "datasets"))


@pytest.fixture
def scored(repositories: Callable[[str], Path]) -> Iterator[Callable[[str], Scored]]:
    """Return a function that opens a benchmark on its fixture, and prepares its tasks to score answers."""
    with ExitStack() as stack:

        def prepared(name: str) -> Scored:
            benchmark = opened(name, repositories(name))
            stack.enter_context(scoring(benchmark.loaded))
            return benchmark

        yield prepared
