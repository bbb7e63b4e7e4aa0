"""The tiny model that denoises, saved and loaded once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.harness.models.adapter import Adapter
from tests.diffusion import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def adapter(folder: Path) -> Adapter:
    return models.load(folder)
