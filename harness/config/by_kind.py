"""`${by_kind:2, {localization: 5}}`: a hyper-parameter whose value a paper lets depend on the kind of task.

What a user sets replaces the expression, so a value on the command line always counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.base import Container

from espalier.harness.errors import tell_once
from espalier.harness.settings import check_keys
from espalier.harness.specs.benchmark_spec import TASK_KINDS


def by_kind(otherwise: Any, values: Mapping[str, Any], *, _root_: Container) -> Any:
    """Return the value for the kind of the run's benchmark, and say so on stderr if it is not `otherwise`.

    Args:
        otherwise: for all kinds that `values` does not name, and where there is no benchmark.
        values: by `benchmark.kind`; a table instead of a value is one by `model.adapter`, others take `otherwise`.

    Raises:
        UserError: `values` names a kind that does not exist.
    """
    check_keys("method.params: by_kind", values, TASK_KINDS)
    kind = OmegaConf.select(_root_, "benchmark.kind")
    found = values.get(kind, otherwise)
    if isinstance(found, Mapping):
        found = found.get(OmegaConf.select(_root_, "model.adapter"), otherwise)
    if found != otherwise:
        method = OmegaConf.select(_root_, "method.name")
        benchmark = OmegaConf.select(_root_, "benchmark.name")
        tell_once(
            f"method={method}: {found} instead of {otherwise}, as its paper has it for {kind} "
            f"(benchmark={benchmark}); extra.params of the row says what ran, method.params.<key> sets it"
        )
    return found
