"""A command line whose model and evaluation are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.helpers import Bench, make_bench


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    return make_bench(tmp_path / "store", capsys, monkeypatch)
