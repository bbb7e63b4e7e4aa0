"""Starts the model of crowded scenes from ``seedling``: its tower reads each quarter of the picture by itself."""

from __future__ import annotations

from typing import Any

import torch

from espalier.harness.seedling.crowd import GRID as CROWD_GRID
from espalier.harness.seedling.scenes import GRID
from lab.training.crowd_model import TOWER_WIDTH
from lab.training.tower_stage import tower_of

QUARTERS = 4
CODE = 0.1
"""Size of a quarter's code in the position embeddings; the patches' own entries are far longer."""
GAIN = 5.0
"""Factor of the codes after the first layer norm."""
APART = 50.0
"""Factor of the codes in queries and keys of the tower."""

PROJECTED = 20.0
"""Spread of the projector's weights of additional dimensions, in that of the others, which are far longer."""


def quarters() -> torch.Tensor:
    """Returns the quarter of each of the 576 patches."""
    half = torch.arange(CROWD_GRID) // GRID
    return (2 * half[:, None] + half[None]).flatten()


@torch.no_grad()
def start_from_seedling(model: Any, seedling: Any) -> None:
    """Copies ``seedling`` into a model of crowded scenes.

    The decoder is copied. The position embeddings of the tower repeat in every quarter, with the quarter's code in
    additional dimensions. Queries carry the code of their quarter and keys minus those of the other quarters, so
    scores between quarters get a large penalty and those inside one change by nothing. The class token has no code
    and attends to all. Additional dimensions also enter the projector, by small random weights.

    Args:
        model: The new model, changed in place.
        seedling: The trained model.
    """
    model.model.language_model.load_state_dict(seedling.model.language_model.state_dict())
    model.lm_head.load_state_dict(seedling.lm_head.state_dict())
    _start_tower(tower_of(model), tower_of(seedling))
    projector, trained = model.model.multi_modal_projector, seedling.model.multi_modal_projector
    width = trained.linear_1.weight.shape[1]
    scale = PROJECTED * trained.linear_1.weight.std()
    projector.linear_1.weight.copy_(torch.randn(projector.linear_1.weight.shape) * scale)
    projector.linear_1.weight[:, :width] = trained.linear_1.weight
    projector.linear_1.bias.copy_(trained.linear_1.bias)
    projector.linear_2.load_state_dict(trained.linear_2.state_dict())


def _start_tower(tower: Any, trained: Any) -> None:
    width = trained.embeddings.class_embedding.shape[0]
    # A layer norm over the additional dimensions too divides by a smaller deviation.
    rescale = (width / TOWER_WIDTH) ** 0.5
    code = slice(width, width + QUARTERS)
    counter = slice(code.stop, code.stop + QUARTERS)
    for parameter in tower.parameters():
        parameter.zero_()
    tower.embeddings.class_embedding[:width] = _centred(trained.embeddings.class_embedding, 0)
    tower.embeddings.patch_embedding.weight[:width] = _centred(
        trained.embeddings.patch_embedding.weight, 0
    )
    places = _centred(trained.embeddings.position_embedding.weight, 1)
    grid = places[1:].view(GRID, GRID, width).repeat(2, 2, 1).flatten(0, 1)
    target = tower.embeddings.position_embedding.weight
    target[0, :width], target[1:, :width] = places[0], grid
    mark = torch.nn.functional.one_hot(quarters(), QUARTERS) * CODE
    target[1:, code], target[1:, counter] = mark, -mark
    _start_norm(tower.pre_layrnorm, trained.pre_layrnorm, rescale)
    tower.pre_layrnorm.weight[width:] = GAIN
    for layer, source in zip(tower.encoder.layers, trained.encoder.layers, strict=True):
        for name in ("layer_norm1", "layer_norm2"):
            _start_norm(getattr(layer, name), getattr(source, name), rescale)
        _start_attention(layer.self_attn, source.self_attn, code, counter)
        layer.mlp.fc1.weight[:, :width] = source.mlp.fc1.weight
        layer.mlp.fc1.bias.copy_(source.mlp.fc1.bias)
        layer.mlp.fc2.weight[:width] = _centred(source.mlp.fc2.weight, 0)
        layer.mlp.fc2.bias[:width] = _centred(source.mlp.fc2.bias, 0)
    _start_norm(tower.post_layernorm, trained.post_layernorm, rescale)


def _start_norm(norm: Any, source: Any, rescale: float) -> None:
    width = source.weight.shape[0]
    norm.weight.fill_(1.0)
    norm.weight[:width] = source.weight * rescale
    norm.bias[:width] = source.bias


def _start_attention(attention: Any, source: Any, code: slice, counter: slice) -> None:
    """Widens each head by the quarters' codes, less their negatives: layer norms shift both by the same mean."""
    heads, old, new = source.num_heads, source.head_dim, attention.head_dim
    width = heads * old
    query_code = torch.eye(QUARTERS) * APART
    key_code = (torch.eye(QUARTERS) - 1) * APART
    for name, block in (("q_proj", query_code), ("k_proj", key_code), ("v_proj", None)):
        target, trained = getattr(attention, name), getattr(source, name)
        # Queries make up for the smaller scale of the wider heads.
        factor = (new / old) ** 0.5 if name == "q_proj" else 1.0
        weight = target.weight.view(heads, new, -1)
        weight[:, :old, :width] = trained.weight.view(heads, old, width) * factor
        target.bias.view(heads, new)[:, :old] = trained.bias.view(heads, old) * factor
        if block is not None:
            weight[:, old:, code], weight[:, old:, counter] = block, -block
    out = _centred(source.out_proj.weight, 0).view(width, heads, old)
    attention.out_proj.weight.view(-1, heads, new)[:width, :, :old] = out
    attention.out_proj.bias[:width] = _centred(source.out_proj.bias, 0)


def _centred(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Subtracts the mean over the model's width, which every layer norm ignores."""
    return values - values.mean(axis, keepdim=True)
