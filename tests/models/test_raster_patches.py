"""PaddleOCR-VL, HunyuanOCR, MiniCPM-V: patches that projectors join, chats without pictures, and released sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.harness.models.build_adapter import random_processor
from espalier.harness.models.families import ADAPTERS
from tests.family_runs import Tiny
from tests.tiny import chat, full_model, model_of, picture

#: Grids of patches; MiniCPM-V's tower joins four, and enlarges small pictures.
GRIDS = {
    "paddleocr_vl": [(4, 8), (10, 4), (4, 4)],
    "hunyuan_ocr": [(4, 8), (10, 4), (4, 4)],
    "minicpm_v": [(8, 16), (20, 8), (12, 12)],
}
NAMES = tuple(GRIDS)


def projected(name: str, projector: Any, patches: Tensor, grids: Tensor) -> Tensor:
    """Return what the projector makes of the patches of all pictures."""
    if name == "paddleocr_vl":
        return projector(patches, pad(grids, (1, 0), value=1))
    if name == "minicpm_v":
        return torch.cat(projector(patches[None], grids))
    pairs = zip(patches.split(grids.prod(1).tolist()), grids.tolist(), strict=True)
    return torch.cat([projector(part[None], size=size)[0] for part, size in pairs])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_made_of_the_patches_that_the_projector_joins(name: str) -> None:
    """A changed patch changes one token's projection, in a batch of three grids."""
    adapter = Tiny(name).adapter
    inputs = adapter.encode([chat("w1", picture(0, 56, 28)), chat("w2", picture(1, 28, 70), 2)])
    assert adapter.grids(inputs) == GRIDS[name]
    grids = torch.tensor(GRIDS[name]) // (2 if name == "minicpm_v" else 1)
    (items,) = adapter.items(inputs).values()
    source = torch.cat([item.source for item in items])
    cells = [torch.ones(len(item)) if item.prunable is None else item.prunable for item in items]
    source = source.masked_fill(~torch.cat(cells).bool()[:, None], -1)
    patches = torch.rand(int(grids.prod(1).sum()), 32, dtype=torch.float64)
    with torch.inference_mode():
        before = projected(name, adapter.projector, patches, grids)
        assert len(before) == len(source)
        for patch in range(len(patches)):
            other = patches.clone()
            other[patch] = -other[patch]
            changed = (projected(name, adapter.projector, other, grids) != before).any(1)
            assert changed.nonzero().tolist() == (source == patch).nonzero()[:, :1].tolist()


def test_pictures_of_hunyuan_are_numbered_in_each_row_alone() -> None:
    """Once the library does so, the last comparison fails, and the adapter's rule can go."""
    adapter = Tiny("hunyuan_ocr").adapter
    library, model = type(adapter.model.model).get_rope_index, adapter.model.model
    chats = [chat("w1 w2", 1, picture(2, 56, 28)), chat("w3"), chat("w4", picture(3, 28, 70))]
    batch = {key: value for key, value in adapter.encode(chats).items() if key != "pixel_values"}
    positions, deltas = model.get_rope_index(**batch)
    for row, question in enumerate(chats):
        alone, delta = library(model, **adapter.encode([question]))
        assert torch.equal(positions[:, row, batch["attention_mask"][row].bool()], alone[:, 0])
        assert deltas[row] == delta[0] == 0
    # The second picture of row 0, the first of row 2, and text: number of the picture, or place.
    assert positions[3].max(1).values.tolist() == positions[0].max(1).values.tolist()
    assert not torch.equal(library(model, **batch)[0], positions)


#: SigLIP's pooling head and positions for packed pictures, which PaddleOCR-VL's files hold and the library leaves out.
LEFT_OUT = 1152 + 4 * (1152**2 + 1152) + 2 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 32768 * 1152


@pytest.mark.parametrize(
    ("name", "parameters", "page"),
    [
        # The sums on the hub; a page of 2480 x 3508 becomes 71 x 50 tokens, 42 x 30, or 110 x 78.
        ("paddleocr_vl_0_9b", 958_588_736 - LEFT_OUT, 3550),
        ("paddleocr_vl_1_5_0_9b", 958_588_736 - LEFT_OUT, 1260),
        ("hunyuan_ocr_1b", 996_208_112, 8580),
    ],
)
def test_the_config_files_build_the_released_architectures(
    name: str, parameters: int, page: int
) -> None:
    spec = model_of(f"model={name}")
    assert sum(parameter.numel() for parameter in full_model(spec).parameters()) == parameters
    images = random_processor(ADAPTERS.load(spec.adapter), spec).image_processor
    for size, tokens in (((480, 640), spec.facts.visual_tokens), ((3508, 2480), page)):
        assert torch.tensor(images.get_number_of_image_patches(*size)).prod() // 4 == tokens
