"""Loading a checkpoint and refusing one that does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.config.spec import ModelSpec


def load_checked(spec: ModelSpec, model_class: Any, processor_class: Any) -> tuple[Any, Any]:
    """Return (model, processor) of a run, on its device.

    Raises:
        UserError: the checkpoint cannot be found or read, or its tensors do not match the architecture.
    """
    source = str(spec.path or spec.hub)
    revision = {} if spec.path else {"revision": spec.revision}
    try:
        model, report = model_class.from_pretrained(
            source,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attention,
            output_loading_info=True,
            **revision,
        )
        processor = processor_class.from_pretrained(source, **revision)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model={spec.name}: no checkpoint at {source!r} ({reason}); "
            "give a local directory with model.path=<dir>"
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report[kind]))
        if names:
            raise UserError(
                f"model={spec.name}: checkpoint {source!r} has {len(names)} {kind.replace('_', ' ')}, "
                f"the first is {names[0]}"
            )
    return model.to(spec.device), processor
