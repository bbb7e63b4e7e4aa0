"""Prepared data sets and journals lie in the folder of each test; the embedded model is loaded once a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from tests import commands


@pytest.fixture(autouse=True)
def _data_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return load_adapter(commands.spec_of("model.device=cpu", "method=none").model)
