"""A prompt without its images, for drafts that read only words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from espalier.harness.engine.model_parts import ModelParts


@torch.inference_mode()
def text_only_prefill(
    adapter: ModelParts, inputs: Mapping[str, Any], cache: Cache
) -> tuple[Tensor, Tensor]:
    """Run a prompt without its images: no placeholders, newlines or separators, and positions that count from 0.

    Args:
        adapter: the model; its tower does not run.
        inputs: one encoded chat.
        cache: empty.

    Returns:
        logits: (V,) after the last token of the prompt.
        next: (..., 1) position of the next token, on as many axes as the decoder takes.

    Raises:
        ValueError: several chats.
    """
    words = adapter.layout(inputs).words
    if words.shape[0] != 1:
        raise ValueError(f"{words.shape[0]} prompts; a prefill by itself takes one")
    ids = inputs["input_ids"][:, words[0].to(inputs["input_ids"].device)]
    return prefill_words(adapter, ids, cache)


def prefill_words(adapter: ModelParts, ids: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    """Run the words `ids` (1, L) at positions from 0 and return the same as `text_only_prefill`, on their device."""
    axes = adapter.facts.rotary_axes
    positions = torch.arange(ids.shape[1], device=ids.device).expand(1, -1)
    if axes > 1:
        positions = positions.expand(axes, 1, -1)
    hidden = adapter.decoder(
        inputs_embeds=adapter.model.get_input_embeddings()(ids),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    logits = adapter.model.get_output_embeddings()(hidden[0, -1])
    return logits.to(ids.device), positions[..., -1:] + 1
