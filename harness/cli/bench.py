"""`espalier bench serve ...`: time a method in the engine that serves it."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.specs.commands import dispatch

#: Module of each benchmark.
BENCHES = {"serve": "espalier.harness.tools.serving.serve_bench"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; exit code 2 and one line if its name is unknown."""
    usage = (
        f"usage: espalier bench {' | '.join(BENCHES)} ...\n\n"
        "example:\n  espalier bench serve backend.python=/envs/vllm/bin/python method=divprune ratio=0.75"
    )
    return dispatch("benchmark", BENCHES, usage, argv)
