"""Config files of tests."""

import shutil
from pathlib import Path

import pytest

from espalier.harness.config import catalogue
from espalier.harness.paths import CONF


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that tests may add to."""
    folder = tmp_path / "conf"
    shutil.copytree(CONF, folder)
    monkeypatch.setattr(catalogue, "CONF", folder)
    return folder
