"""Models of all families for the Python interface: in memory, as loaded by transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from espalier.harness.models.families import ADAPTERS
from tests.families import FAMILIES
from tests.family_runs import saved


def loaded(name: str) -> tuple[Any, Any]:
    """Return model and processor of a tiny family as somebody would have them."""
    spec = FAMILIES[name].spec
    family = ADAPTERS.load(spec.adapter)
    model = family.data.model_class.from_pretrained(saved(name))
    return model, family.load_processor(replace(spec, path=saved(name), weights="trained"))


def ramps(width: int, height: int) -> Image.Image:
    """Return a picture with red proportional to x and green proportional to y."""
    across = np.linspace(0.5, width - 0.5, width) / width
    down = np.linspace(0.5, height - 0.5, height) / height
    pixels = np.zeros((height, width, 3))
    pixels[..., 0], pixels[..., 1] = across[None, :], down[:, None]
    return Image.fromarray((pixels * 255).round().astype(np.uint8))
