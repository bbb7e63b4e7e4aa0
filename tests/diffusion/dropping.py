"""One denoising step in which tokens are dropped, written out as in the appendix of D3ToM: no batch, no mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.diffusion.oracle import attention, mlp


@torch.no_grad()
def step(
    model,
    x: Tensor,
    visual: list[int],
    answer: int,
    ranking: list[int],
    drops: dict[int, int],
    alive: list[int] | None = None,
) -> tuple[Tensor, list[int], list[int]]:
    """Return the logits (G, V) of the answer's places, the visual tokens kept, and how many entered each layer.

    Args:
        model: with `model.language_model` and `lm_head`.
        x: (L, D) prompt and answer as they enter the decoder.
        visual: places of the visual tokens.
        answer: places of the answer, the last ones.
        ranking: places whose attention ranks, all of them to be added up.
        drops: for each layer before which tokens go, how many stay.
        alive: places of the rows of x; None: all from 0 on.
    """
    stack = model.model.language_model
    alive = list(range(len(x))) if alive is None else alive
    kept, entered = list(range(len(visual))), []
    paid: dict[int, float] = {}
    for number, layer in enumerate(stack.layers):
        if number in drops:
            best = sorted(kept, key=lambda j: (-paid[visual[j]], j))
            kept = sorted(best[: drops[number]])
            gone = set(visual) - {visual[j] for j in kept}
            x = x[[row for row, place in enumerate(alive) if place not in gone]]
            alive = [place for place in alive if place not in gone]
        entered.append(len(kept))
        put_out, a = attention(layer, stack.config, x, stack.rotary_emb(x, torch.tensor([alive])))
        paid = {
            place: sum(float(a[alive.index(i), row]) for i in ranking if i in alive)
            for row, place in enumerate(alive)
        }
        x = x + put_out
        x = x + mlp(layer, x)
    return stack.norm(x)[-answer:] @ model.lm_head.weight.T, kept, entered


@torch.no_grad()
def zipped(model, eager, pixels: Tensor, keep: int) -> tuple[list[int], Tensor]:
    """Return what VisionZip keeps of one picture and the projected tokens (K, D), written out patch by patch.

    Args:
        model: whose tower has a class token and is read behind its last but one layer.
        eager: the same with the library's eager attention, which rounds its maps to single precision.
        pixels: (1, 3, H, W).
        keep: tokens.
    """
    tower = model.model.vision_tower
    seen = tower(pixels, output_hidden_states=True)
    maps = eager.model.vision_tower(pixels, output_attentions=True).attentions
    attention = maps[-2][0].mean(0)[0, 1:]
    features = seen.hidden_states[-2][0, 1:]
    layer = tower.encoder.layers[-2]
    keys = layer.self_attn.k_proj(layer.layer_norm1(seen.hidden_states[-3][0]))[1:]
    keys = keys.view(len(keys), layer.self_attn.num_heads, -1).mean(1)
    n = len(features)
    dominant = math.floor(keep * 54 / 64 + 0.5)
    kept = sorted(range(n), key=lambda j: (-float(attention[j]), j))[:dominant]
    rest = [j for j in range(n) if j not in kept]
    targets = rest[:: max(1, len(rest) // (keep - dominant))][: keep - dominant]
    groups = {j: [j] for j in (*kept, *targets)}
    for j in rest:
        if j not in targets:
            like = [float(keys[j] @ keys[t] / keys[j].norm() / keys[t].norm()) for t in targets]
            groups[targets[like.index(max(like))]].append(j)
    order = sorted(groups)
    merged = [sum(features[i] for i in groups[j]) / len(groups[j]) for j in order]
    return order, model.model.multi_modal_projector(torch.stack(merged))
