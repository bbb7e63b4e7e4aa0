"""Check of the tools that a benchmark's scores need besides Python (`benchmark.needs`)."""

from __future__ import annotations

import shutil

from espalier.harness.errors import UserError
from espalier.harness.specs.benchmark_spec import BenchmarkSpec


def check_needs(benchmark: BenchmarkSpec) -> None:
    """Raise UserError if a tool of `benchmark.needs` is missing.

    A split that only a submission server scores cannot get a number here, so it is always refused.
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
