"""A tiny checkpoint that the tests of a module share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llava(tmp_path_factory.mktemp("tiny") / "model")
