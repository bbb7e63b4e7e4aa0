"""The benchmarks that an embedded model runs in place of published ones (conf/stand_ins.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT

PATH = ROOT / "conf" / "stand_ins.yaml"


@dataclass(frozen=True)
class StandIns:
    """The content of the file.

    Attributes:
        models: names of the models that take stand-ins.
        keys: keys of grids that only published models have.
        benchmarks: the stand-in of each published benchmark, by its name.
    """

    models: tuple[str, ...]
    keys: tuple[str, ...]
    benchmarks: Mapping[str, str]

    def apply(self, cell: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Return a cell of a grid as it runs on `model`; published models take it as it is.

        Raises:
            UserError: nothing stands for its benchmark.
        """
        if model not in self.models:
            return {**cell, "model": model}
        benchmark = cell["benchmark"]
        if benchmark not in self.benchmarks:
            raise UserError(
                f"benchmark={benchmark!r}: nothing stands for it on model={model}; valid: a line in {PATH.name}"
            )
        entries = {key: value for key, value in cell.items() if key not in self.keys}
        return {**entries, "model": model, "benchmark": self.benchmarks[benchmark]}


@cache
def stand_ins() -> StandIns:
    """Return the content of the file."""
    content = read_yaml(PATH)
    return StandIns(tuple(content["models"]), tuple(content["keys"]), content["benchmarks"])
