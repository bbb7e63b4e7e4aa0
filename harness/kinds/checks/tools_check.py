"""What a benchmark's scores take beside this machine's Python, checked before a model is loaded."""

from __future__ import annotations

import shutil

from espalier.harness.errors import UserError
from espalier.harness.specs.benchmark_spec import BenchmarkSpec


def check_needs(benchmark: BenchmarkSpec) -> None:
    """Raise UserError if something that `benchmark.needs` names is absent.

    What only a submission server scores has no number here, so it is refused in any case.
    """
    if "server" in benchmark.needs:
        raise UserError(
            f"benchmark={benchmark.name}: scored by a submission server alone (benchmark.needs=[server]);"
            " valid: a split whose answers are public"
        )
    if "java" in benchmark.needs and shutil.which("java") is None:
        raise UserError(
            f"benchmark={benchmark.name}: its scorer runs in Java (benchmark.needs=[java]), and there is no java"
            " on PATH; valid: with a Java runtime, for example OpenJDK 17"
        )
