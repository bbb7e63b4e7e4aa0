"""Tiny models of the families, loaded once for all files of a process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.harness.models.adapter import Adapter
from tests.family_runs import Tiny, adapter_of, saved


@pytest.fixture(scope="session")
def load() -> Callable[..., Adapter]:
    return adapter_of


@pytest.fixture(scope="session")
def folder() -> Path:
    return saved("llava")


@pytest.fixture(scope="session")
def double() -> Adapter:
    return adapter_of("llava")


@pytest.fixture(scope="session")
def single() -> Adapter:
    return adapter_of("llava", "float32")


@pytest.fixture(scope="session")
def eager() -> Adapter:
    return adapter_of("llava", "float32", "eager")


@pytest.fixture
def tiny() -> Tiny:
    return Tiny("llava")
