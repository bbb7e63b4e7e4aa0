"""Runs as a command line composes them."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.config.build_spec import specs_of
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import Cell
from espalier.harness.paths import CONF
from espalier.harness.specs.run_spec import RunSpec

#: The names of conf/model.
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def cells_of(*argv: str) -> Sequence[Cell]:
    """Return the cells of a command line."""
    return read_command(argv).cells


def spec_of(*argv: str) -> RunSpec:
    """Return the first run of a command line."""
    return specs_of(*argv)[0]


def caption_spec(*argv: str) -> RunSpec:
    """Return the first run of a command line, of captions by the embedded model."""
    return spec_of("model=seedling", "benchmark=seedling_caption", *argv)
