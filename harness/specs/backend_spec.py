"""Which program computes the answers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from espalier.harness.settings import Count, OneOf

#: The harness's own engine, and programs that a plug-in of this package runs in.
TRANSFORMERS, VLLM = BACKENDS = ("transformers", "vllm")


@dataclass(frozen=True)
class BackendSpec:
    """Which program computes the answers.

    Attributes:
        name: one of BACKENDS.
        python: interpreter of an environment with vLLM.
        tensor_parallel: cards that each layer is divided over.
        pipeline_parallel: groups of cards that hold some layers each.
        options: further arguments of `vllm.LLM`.
    """

    name: Annotated[str, OneOf(BACKENDS)] = TRANSFORMERS
    python: Path | None = None
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        """Whether another program than the harness answers."""
        return self.name != TRANSFORMERS
