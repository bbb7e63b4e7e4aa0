"""A model without weights: what its configuration would build, to be judged before anything loads."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from espalier.harness.errors import UserError, first_words
from espalier.harness.models.loader import MALFORMED

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


def build_skeleton(model_class: Any, config: Any, spec: ModelSpec) -> Any:
    """Return the model of a configuration with all tensors on the meta device.

    Cost: a quarter of a second for the largest, and no memory.

    Raises:
        UserError: the configuration describes no model of this class.
    """
    try:
        with torch.device("meta"):
            return model_class._from_config(
                deepcopy(config),
                dtype=getattr(torch, spec.dtype),
                attn_implementation=spec.attention,
            )
    except ImportError as error:
        raise UserError(
            f"model.attention={spec.attention!r} cannot run here ({first_words(error)}); valid: sdpa, eager"
        ) from error
    except MALFORMED as error:
        raise UserError(
            f"model={spec.name}: its configuration makes no {model_class.__name__} with "
            f"model.attention={spec.attention!r} ({first_words(error)})"
        ) from error


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, shared ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
