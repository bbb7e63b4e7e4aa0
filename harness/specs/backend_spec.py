"""Which program computes the answers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from espalier.harness.errors import UserError
from espalier.harness.settings import By, Count, OneOf

#: The harness's own engine, and programs that a plug-in of this package runs in.
TRANSFORMERS, VLLM = BACKENDS = ("transformers", "vllm")

#: Which code prunes in vLLM: that of methods/, or vLLM's own of the same name.
PRUNERS = ("espalier", "vllm")


def _read_url(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise UserError(
            f"{key}={value!r}; valid: the address of a server, as in http://localhost:8000"
        )
    return value.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class BackendSpec:
    """Which program computes the answers.

    Attributes:
        name: one of BACKENDS.
        python: interpreter of an environment with vLLM.
        url: address of a server of vLLM, in place of `python`.
        tensor_parallel: cards that each layer is divided over.
        pipeline_parallel: groups of cards that hold some layers each.
        pruning: one of PRUNERS.
        options: further arguments of `vllm.LLM`.
    """

    name: Annotated[str, OneOf(BACKENDS)] = TRANSFORMERS
    python: Path | None = None
    url: Annotated[str, By(_read_url)] | None = None
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    pruning: Annotated[str, OneOf(PRUNERS)] = PRUNERS[0]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        """Whether another program than the harness answers."""
        return self.name != TRANSFORMERS

    @property
    def built_in(self) -> bool:
        """Whether vLLM's own code prunes."""
        return self.served and self.pruning == VLLM
