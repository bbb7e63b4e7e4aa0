"""One denoising step of D3ToM, written out: no batch, no mask; it shares no code with the engine.

Norms and rotary tables are the library's own, which computes them in single precision whatever the model's type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tests.diffusion import models


def reveal(ids, logits: Tensor, among: Iterable[int], count: int) -> None:
    """Put the surest words, by the logits (G, V), into `count` of the masked places among some."""
    allowed = logits.clone()
    allowed[:, [models.MASK, *models.DIFFUSION.forbidden_ids]] = -torch.inf
    sure, word = allowed.softmax(-1).max(-1)
    masked = [place for place in among if ids[place] == models.MASK]
    for place in sorted(masked, key=lambda p: -float(sure[p]))[:count]:
        ids[place] = int(word[place])


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x (L, Dh), rotated by halves."""
    half = x.shape[-1] // 2
    cos, sin = (table[0, :, :half] for table in tables)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(layer, config, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what attention puts out (L, D) and its map, mean over heads (L, L); every token sees every other."""
    weights, heads, kv = layer.self_attn, config.num_attention_heads, config.num_key_value_heads
    size = weights.head_dim
    z = layer.input_layernorm(x)
    outs, total = [], torch.zeros(len(x), len(x), dtype=x.dtype)
    for head in range(heads):
        group = head // (heads // kv)
        q = (z @ weights.q_proj.weight.T)[:, head * size : (head + 1) * size]
        k = (z @ weights.k_proj.weight.T)[:, group * size : (group + 1) * size]
        v = (z @ weights.v_proj.weight.T)[:, group * size : (group + 1) * size]
        logits = rotated(q, tables) @ rotated(k, tables).T / math.sqrt(size)
        a = logits.softmax(-1)
        total += a / heads
        outs.append(a @ v)
    return torch.cat(outs, -1) @ weights.o_proj.weight.T, total


def mlp(layer, x: Tensor) -> Tensor:
    z, weights = layer.post_attention_layernorm(x), layer.mlp
    gate = z @ weights.gate_proj.weight.T
    return (gate * gate.sigmoid() * (z @ weights.up_proj.weight.T)) @ weights.down_proj.weight.T


@torch.no_grad()
def step(model, x: Tensor, visual: list[int], deciders: list[int], answer: int, method, keep: int):
    """Return the logits (G, V) of the answer's places and the indices of the visual tokens kept.

    Args:
        model: with `model.language_model` and `lm_head`.
        x: (L, D) prompt and answer as they enter the decoder.
        visual: places of the visual tokens.
        deciders: places unveiled in the step before.
        answer: places of the answer, the last ones.
        method: with K, merging, state, similarity.
        keep: visual tokens that stay; all of them: nothing happens.
    """
    stack = model.model.language_model
    config = stack.config
    positions = list(range(len(x)))
    kept = list(range(len(visual)))
    for number, layer in enumerate(stack.layers):
        put_out, a = attention(layer, config, x, stack.rotary_emb(x, torch.tensor([positions])))
        if number == method.K and keep < len(visual):
            score = [sum(float(a[i, j]) for i in deciders) for j in visual]
            ranks = sorted(range(len(visual)), key=lambda j: (-score[j], j))
            kept = sorted(ranks[:keep])
            z = layer.input_layernorm(x) if method.similarity == "normed" else x + put_out
            groups = {j: [visual[j]] for j in kept}
            for j, place in enumerate(visual):
                if j not in groups:
                    like = [
                        float(z[place] @ z[visual[k]] / z[place].norm() / z[visual[k]].norm())
                        for k in kept
                    ]
                    groups[kept[max(range(keep), key=lambda n: (like[n], -n))]].append(place)
            behind = x + put_out
            for j in kept:
                h = x if method.state == "entering" else x + put_out
                total = sum(h[i] for i in groups[j])
                if method.merging == "mean":
                    total = total / len(groups[j])
                if method.state == "entering":
                    total = total + put_out[visual[j]]
                behind[visual[j]] = total
            gone = {place for j, place in enumerate(visual) if j not in groups}
            alive = [place for place in range(len(x)) if place not in gone]
            x, positions = behind[alive], [positions[place] for place in alive]
        else:
            x = x + put_out
        x = x + mlp(layer, x)
    return stack.norm(x)[-answer:] @ model.lm_head.weight.T, kept
