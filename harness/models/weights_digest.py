"""A digest of a model in memory: its configuration, its processor and all of its tensors.

It stands for the revision of a checkpoint in the run key, so a change of any weight gives a new key.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from inspect import getmodule
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.harness.errors import UserError
from espalier.harness.store.files.digests import Digests, digest

#: Packages of the hooks that are part of the libraries' own computation.
LIBRARIES = ("transformers.", "accelerate.")


def weights_digest(model: Any, processor: Any) -> str:
    """Return 16 hex digits for a model and its processor.

    Cost: one pass over the weights, about 1 s for 1 GB.

    Raises:
        UserError: tensors are offloaded, or hooks of the caller change what the model computes.
    """
    tensors = [
        [name, str(tensor.dtype), list(tensor.shape), _content(name, tensor)]
        for name, tensor in model.state_dict(keep_vars=True).items()
    ]
    _refuse_hooks(model)
    end_tokens = model.generation_config.to_dict()
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return digest([name, _saved(model.config), end_tokens, _saved(processor), tensors])[:16]


def _content(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor.

    Raises:
        UserError: the tensor has no data in memory.
    """
    if tensor.is_meta:
        raise UserError(
            f"hf_model: {name} is offloaded, so its weights cannot be told apart from others in the run key; valid: "
            "espalier.load(<folder of the checkpoint>), or a model that lies in memory"
        )
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(values.numpy().data).hexdigest()


def _saved(part: Any) -> str:
    """Return a digest of the files that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        tokenizer = Path(folder, "tokenizer.json")
        if tokenizer.is_file():
            # Each batch sets these anew, and a file would hold those of the last one.
            content = json.loads(tokenizer.read_text(encoding="utf-8"))
            content |= {"padding": None, "truncation": None}
            tokenizer.write_text(json.dumps(content), encoding="utf-8")
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return Digests().files(files, Path(folder))


def _refuse_hooks(model: Any) -> None:
    """Raise UserError if code of the caller runs inside the model: no digest covers it."""
    for name, hook in _hooks(model):
        module = getmodule(hook)
        place = "" if module is None else f"{module.__name__}."
        if not place.startswith(LIBRARIES):
            raise UserError(
                f"hf_model: {name or 'the model'} has a hook {getattr(hook, '__qualname__', hook)}, and the run "
                "key cannot hold its code; valid: a model without hooks, handle.remove() removes one"
            )


def _hooks(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            yield name, hook
        forward = vars(module).get("forward")
        if forward is not None and not hasattr(module, "_hf_hook"):
            yield name, forward
