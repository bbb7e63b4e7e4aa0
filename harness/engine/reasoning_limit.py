"""End the reasoning of an answer at its budget, by writing the closing tag in the place of the model's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from espalier.harness.specs.think_tags import spoken

#: Text that ends a reasoning.
CLOSING = "\n</think>\n\n"


class ReasoningLimit(LogitsProcessor):
    """Leaves only the tokens of CLOSING to rows that still reason when these fill up the budget.

    Args:
        tokenizer: tokenizer of the model.
        budget: tokens of reasoning, CLOSING included.
        lead: the tag by which the prompt opens the reasoning; "" if the answer opens it.

    The first call, with the prompt alone, sets where answers start.

    Cost: a decoding of each answer for each forced token.
    """

    def __init__(self, tokenizer: Any, budget: int, lead: str) -> None:
        self._tokenizer = tokenizer
        self._closing = tokenizer.encode(CLOSING, add_special_tokens=False)
        self._forced_from = budget - len(self._closing)
        self._lead = lead
        self._start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V), minus infinity for all but the forced token of a row."""
        if self._start is None:
            self._start = input_ids.shape[1]
        place = input_ids.shape[1] - self._start - self._forced_from
        if not 0 <= place < len(self._closing):
            return scores
        free = input_ids[:, self._start : self._start + self._forced_from]
        texts = (self._lead + text for text in self._tokenizer.batch_decode(free))
        reasons = [bool(text) and not spoken(text) for text in texts]
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._closing[place]] = 0.0
        return torch.where(torch.tensor(reasons, device=scores.device)[:, None], forced, scores)
