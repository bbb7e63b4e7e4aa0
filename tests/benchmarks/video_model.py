"""A model that takes videos, in the place of one of conf/model: a tiny checkpoint of random weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.families import FAMILIES
from tests.tasks.media_tasks import tiny_model
from tests.tiny import save_tiny

#: The device, which the command line of every benchmark names itself.
DEVICE = "model.device=cpu"


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="video-model-")


@cache
def words() -> tuple[str, ...]:
    """Return the words of a command line that choose the model. Cost: one small checkpoint, once a process."""
    spec = FAMILIES["qwen2_5_vl"].spec
    with torch.random.fork_rng():
        torch.manual_seed(0)
        path = save_tiny(spec, Path(_folder().name))
    return tuple(word for word in tiny_model("qwen2_5_vl_7b", spec, path) if word != DEVICE)
