"""`${by_benchmark:{gqa: 16, llava_bench: 64}}`: a setting that a paper states for each of its benchmarks.

What a user sets replaces the expression, so a value on the command line always counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.base import Container

from espalier.harness.errors import UserError


def by_benchmark(values: Mapping[str, Any], *, _root_: Container) -> Any:
    """Return the value for the run's benchmark.

    Raises:
        UserError: `values` has none for it.
    """
    name = OmegaConf.select(_root_, "benchmark.name")
    if name not in values:
        raise UserError(
            f"benchmark={name!r} is none of those for which this preset knows how answers are made; valid: "
            f"{', '.join(values)}, or the setting itself on the command line"
        )
    return values[name]
