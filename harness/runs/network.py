"""The network setting of Hugging Face libraries, restored for the caller of a function."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from espalier.harness.specs.hub_cache import OFFLINE

#: Where they keep downloaded data.
READ = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
)

_TRUE = ("1", "ON", "YES", "TRUE")


def go_offline() -> None:
    """Let the libraries use no network, those that are imported and those that will be."""
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    _set(dict.fromkeys(READ, True))


@contextmanager
def restored_network() -> Iterator[None]:
    """Undo `go_offline` at the end of the block, also in libraries that were imported inside it."""
    values = {name: os.environ.get(name) for name in OFFLINE}
    by_environment = any((value or "").upper() in _TRUE for value in values.values())
    before = {
        (module, name): getattr(sys.modules[module], name)
        if module in sys.modules
        else by_environment
        for module, name in READ
    }
    try:
        yield
    finally:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _set(before)


def _set(values: dict[tuple[str, str], bool]) -> None:
    for (module, name), value in values.items():
        if module in sys.modules:
            setattr(sys.modules[module], name, value)
