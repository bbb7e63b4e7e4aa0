"""Settings of made-up rows, as run.py writes them, for tests of what reads a store."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

USUAL: dict[str, Any] = {
    "model": {"dtype": "float32", "template": None, "generation": {}, "revision": "abc"},
    "method": {"params": {}},
    "draft": None,
    "benchmark": {"limit": None, "generation": {}},
    "engine": {
        "backend": "drop",
        "batch_size": 8,
        "positions": "original",
        "warmup": 1,
        "rescore": False,
        "transport": None,
        "compare": None,
    },
    "artifacts": [],
}


def settings(**changes: object) -> dict[str, Any]:
    """Return the usual settings with some changed: `engine_positions="renumbered"` by block and name."""
    blocks = deepcopy(USUAL)
    for key, value in changes.items():
        block, _, name = key.partition("_")
        if name:
            blocks[block] = {**(blocks[block] or {}), name: value}
        else:
            blocks[block] = value
    return blocks
