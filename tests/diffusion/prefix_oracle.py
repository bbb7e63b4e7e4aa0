"""Steps under the prefix mask, written out for one sample: the whole sequence anew, and D3ToM's merging in the cache.

It shares no code with the engine. Rotary tables are the library's own, which computes them in single precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.diffusion.oracle import mlp, rotated


def projected(layer, z: Tensor, name: str) -> list[Tensor]:
    """Queries, keys or values (L, Dh) of each head."""
    attention = layer.self_attn
    return list((z @ getattr(attention, f"{name}_proj").weight.T).split(attention.head_dim, 1))


def attended(layer, q: list[Tensor], k: list[Tensor], v: list[Tensor], seen=None):
    """Return what attention puts out (L, D) and its map, mean over heads; keys and queries are turned already."""
    outs, total, size = [], 0.0, layer.self_attn.head_dim
    for head, query in enumerate(q):
        group = head // (len(q) // len(k))
        logits = query @ k[group].T / math.sqrt(size)
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
        a = logits.softmax(-1)
        total = total + a / len(q)
        outs.append(a @ v[group])
    return torch.cat(outs, -1) @ layer.self_attn.o_proj.weight.T, total


@torch.no_grad()
def recomputed(model, x: Tensor, prompt: int, gone: dict[int, int] | None = None) -> Tensor:
    """Return the logits (G, V) of the answer's places; the whole sequence runs through every layer.

    Args:
        model: with `model.language_model` and `lm_head`.
        x: (L, D) prompt and answer as they enter the decoder.
        prompt: its tokens.
        gone: of places that nobody sees any more: the first such layer.
    """
    stack, place = model.model.language_model, torch.arange(len(x))
    tables = stack.rotary_emb(x, place[None])
    for number, layer in enumerate(stack.layers):
        alive = torch.tensor([(gone or {}).get(int(j), len(stack.layers)) > number for j in place])
        visible = ((place < prompt) | (place[:, None] >= prompt)) & alive
        z = layer.input_layernorm(x)
        q, k, v = (projected(layer, z, name) for name in "qkv")
        x = (
            x
            + attended(
                layer, [rotated(h, tables) for h in q], [rotated(h, tables) for h in k], v, visible
            )[0]
        )
        x = x + mlp(layer, x)
    return stack.norm(x)[prompt:] @ model.lm_head.weight.T


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / a.norm() / b.norm())


def merged(store: list[Tensor], goes: dict[int, int], onto: list[int]) -> list[Tensor]:
    """Add up entries of each head (S, Dh), bring targets to their former mean norm, leave out what has gone."""
    norms = [float(head[j].norm()) for head in store for j in onto]
    nu, groups = sum(norms) / len(norms), []
    for head in store:
        rows = []
        for j in range(len(head)):
            if j in goes:
                continue
            row = head[j]
            if j in onto:
                row = row + sum(head[i] for i, to in goes.items() if to == j)
                row = nu * row / (row.norm() + 1e-8)
            rows.append(row)
        groups.append(torch.stack(rows))
    return groups


@torch.no_grad()
def step(
    model, x: Tensor, prompt: int, visual, deciders, method, keep: int, renumber: bool, held=None
):
    """Return the logits (G, V) and which visual tokens stay behind layer K.

    Args:
        visual: places of the visual tokens.
        deciders: of the answer's places, those unveiled in the step before.
        method: with K and targets.
        keep: visual tokens that stay; all of them: nothing happens.
        renumber: whether places left are counted from 0 behind layer K.
        held: visual tokens that stay, as an earlier step chose them; None: this one chooses.
        model, x, prompt: as above.
    """
    stack = model.model.language_model
    h, g, kept = x[:prompt], x[prompt:], held or list(range(len(visual)))
    for number, layer in enumerate(stack.layers):
        z = layer.input_layernorm(h)
        q, keys, values = (projected(layer, z, name) for name in "qkv")
        at = stack.rotary_emb(x, torch.arange(prompt)[None])
        turned = [rotated(head, at) for head in keys]
        h = h + attended(layer, [rotated(head, at) for head in q], turned, values)[0]
        h = h + mlp(layer, h)

        first, entries = prompt, list(range(prompt))
        if number > method.K and keep < len(visual):
            stay = [visual[n] for n in kept]
            away = [j for j in visual if j not in stay]
            entries = [j for j in entries if j not in away]
            onto = stay if method.targets == "visual" else entries
            mean = sum(keys) / len(keys)
            goes = {i: max(onto, key=lambda j: (cosine(mean[i], mean[j]), -j)) for i in away}
            keys, values = merged(keys, goes, onto), merged(values, goes, onto)
            if renumber:
                first, entries = len(entries), list(range(len(entries)))
        at = stack.rotary_emb(x, torch.tensor([entries]))
        rotary = stack.rotary_emb(x, torch.arange(first, first + len(g))[None])
        z = layer.input_layernorm(g)
        q, k, v = (projected(layer, z, name) for name in "qkv")
        put_out, a = attended(
            layer,
            [rotated(head, rotary) for head in q],
            [torch.cat([rotated(a, at), rotated(b, rotary)]) for a, b in zip(keys, k, strict=True)],
            [torch.cat(pair) for pair in zip(values, v, strict=True)],
        )
        if number == method.K and keep < len(visual) and held is None:
            score = [sum(float(a[i, j]) for i in deciders) for j in visual]
            kept = sorted(sorted(range(len(visual)), key=lambda n: (-score[n], n))[:keep])
        g = g + put_out
        g = g + mlp(layer, g)
    return stack.norm(g) @ model.lm_head.weight.T, kept
