"""Runs as a command line composes them."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.config.build_spec import specs_of
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import Cell
from espalier.harness.specs.run_spec import RunSpec


def cells_of(*argv: str) -> Sequence[Cell]:
    """Return the cells of a command line."""
    return read_command(argv).cells


def spec_of(*argv: str) -> RunSpec:
    """Return the first run of a command line."""
    return specs_of(*argv)[0]
