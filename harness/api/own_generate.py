"""The model's own `generate`, which answers with the method inside its block."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from espalier.harness.api.argument_errors import user_errors
from espalier.harness.errors import UserError
from espalier.harness.kinds.kind import OpenMethod, prepared


@contextmanager
def pruned_generate(opened: OpenMethod, method: str) -> Iterator[None]:
    """Let `model.generate(**inputs, max_new_tokens=...)` answer with a method inside the block.

    The inputs are those of the model's processor, padded on the left, and the ids (B, L + T) that are returned begin
    with the whole prompt, as the library's do.

    Args:
        opened: the method, installed on the model.
        method: its name, for error lines.
    """
    adapter = opened.adapter
    model = adapter.model

    def generate(inputs: Tensor | None = None, **arguments: Any) -> Tensor:
        if inputs is not None:
            arguments["input_ids"] = inputs
        settings = {name: arguments.pop(name) for name in [*arguments] if name in setting_names()}
        with user_errors():
            if opened.prepare is not prepared or adapter.facts.denoises:
                raise UserError(
                    f"generate() under method={method!r}: answers of a draft or of denoising steps have no library's "
                    "loop; valid: ask(...)"
                )
            if settings.pop("return_dict_in_generate", False):
                raise UserError("return_dict_in_generate=True; valid: False, or ask(...)")
            ids: Tensor = arguments["input_ids"]
            # Random draws of a row follow from its prompt.
            names = [blake2b(row.cpu().numpy().tobytes()).hexdigest()[:12] for row in ids]
            answers = opened.generator.generate(adapter.to_device(arguments), names, **settings)
        return torch.cat([ids.to(answers.ids.device), answers.ids], dim=1)

    model.generate = generate
    try:
        yield
    finally:
        # Another block that closed first may have restored the model.
        vars(model).pop("generate", None)


@cache
def setting_names() -> frozenset[str]:
    """Return the arguments of the library's `generate` that are no inputs of a model."""
    parameters = inspect.signature(GenerationMixin.generate).parameters
    return frozenset(GenerationConfig().to_dict()) | frozenset(parameters)
