"""Decoding steps the slow way: full forwards without a cache, with explicit masks for each layer and token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.harness.models.adapter import Adapter
from tests.family_runs import extended, positions
from tests.tiny import causal

#: Maps the step's number, from 1, and the (N,) attention below the site to the (N,) booleans of attended tokens.
Choose = Callable[[int, Tensor], Tensor]


def step_logits(
    adapter: Adapter,
    inputs: Mapping[str, Any],
    ids: Tensor,
    drops: Sequence[tuple[int, Sequence[int]]],
    layer: int,
    choose: Choose,
    sees: Callable[[Tensor, int], Tensor] = causal,
) -> Tensor:
    """Return the (1, T, V) logits of an answer `ids` (1, T) to one prompt.

    Args:
        adapter: a model with eager attention.
        inputs: the prompt.
        ids: the answer.
        drops: for each site, its first layer and the original indices of the visual tokens that live on.
        layer: first decoder layer that follows `choose`.
        choose: says what each step attends to.
        sees: what tokens see in each layer, by which are visual, as in tests/tiny.py.
    """
    longer = extended(inputs, ids[:, :-1])
    length, prompt = longer["input_ids"].shape[1], inputs["input_ids"].shape[1]
    visual = adapter.layout(inputs).visual[0]
    marked = torch.zeros(length, dtype=torch.bool).scatter(0, visual, True)
    masks = []
    for number in range(len(adapter.decoder.layers)):
        mask = sees(marked, number)
        for first, alive in drops:
            if number >= first:
                dropped = torch.ones(len(visual), dtype=torch.bool)
                dropped[torch.as_tensor(alive)] = False
                mask[:, visual[dropped]] = False
        masks.append(mask | torch.eye(length, dtype=torch.bool))
    for step in range(1, ids.shape[1]):
        row = prompt + step - 1
        paid = forward(adapter, longer, masks).attentions[layer - 1][0].mean(0)[row, visual]
        attended = choose(step, paid)
        for mask in masks[layer:]:
            mask[row, visual[~attended]] = False
    return forward(adapter, longer, masks).logits[:, prompt - 1 :]


def forward(
    adapter: Adapter,
    inputs: Mapping[str, Any],
    masks: Sequence[Tensor],
    places: Sequence[Tensor] | None = None,
) -> Any:
    """Run the model once without a cache, each layer under its own (L, L) mask and, if given, at (L,) positions."""

    def by_hand(layer: int) -> Any:
        added = torch.zeros(1, 1, *masks[layer].shape, dtype=torch.float64)
        added.masked_fill_(~masks[layer], torch.finfo(torch.float64).min)
        changed: dict[str, Any] = {"attention_mask": added}
        if places is not None:
            changed["position_embeddings"] = rotary(adapter, places[layer])
        return lambda module, args, kwargs: (args, {**kwargs, **changed})

    handles = [
        module.register_forward_pre_hook(by_hand(layer), with_kwargs=True)
        for layer, module in enumerate(adapter.decoder.layers)
    ]
    try:
        with torch.inference_mode():
            at = positions(adapter, inputs)
            return adapter.model(**inputs, position_ids=at, use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()


def rotary(adapter: Adapter, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (1, L, Dh) of (L,) positions, from the formula of RoPE (in fp32, as the models do)."""
    config = adapter.decoder.config
    half = torch.arange(adapter.facts.text.head_dim // 2)
    angle = places.float()[:, None] / config.rope_parameters["rope_theta"] ** (half / len(half))
    angle = torch.cat([angle, angle], 1)[None]
    return angle.cos().double(), angle.sin().double()
