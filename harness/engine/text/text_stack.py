"""New tokens through the text stack of a loaded model: embedding, layers and head, after the contents of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.text.cuda_graphs import Graphs
from espalier.harness.engine.text.fixed_steps import FixedSteps, TextForward
from espalier.harness.engine.text.kv_cache import IndexedCache
from espalier.harness.engine.text.step_attention import (
    attention_configs,
    chain_mask,
    fold_heads,
    window_mask,
)
from espalier.harness.errors import UserError


class TextStack:
    """Runs new tokens, in a row or branching, and appends their keys and values to its cache.

    Everything that is constant over steps is looked up once, here: on a small model a step is mostly Python.

    Args:
        adapter: the model.
        room: tokens that the cache has room for after the prompt.
        graphs: records steps of one token and replays them; None: every step is launched operation by operation.
    """

    #: (..., 1, 1) position of the first token of the answer, known once the prompt has run.
    following: Tensor

    def __init__(self, adapter: ModelParts, room: int, graphs: Graphs | None = None) -> None:
        self.device = adapter.device
        self._decoder = adapter.decoder
        self._configs = attention_configs(self._decoder)
        text = self._decoder.config
        self._groups = text.num_attention_heads // text.num_key_value_heads
        self._text = TextForward.of(adapter)
        self._dtype = adapter.model.get_input_embeddings().weight.dtype
        self._graphs = graphs
        self._steps: FixedSteps | None = None
        #: Keys and values of the prompt and of the tokens run after it.
        self.cache = IndexedCache(len(self._decoder.layers), room)

    def folding(self) -> AbstractContextManager[bool]:
        """Return `fold_heads` for this model; opened around several calls of `run`, it is not opened in each."""
        return fold_heads(self._configs)

    def run(self, ids: Tensor, places: Sequence[int], visible: Tensor | None = None) -> Tensor:
        """Run new tokens and return the logits (t, V) after each, on the input device.

        Args:
            ids: (t,) after the contents of the cache.
            places: of each in the answer.
            visible: (t, s) which of the last s keys, their own included, each sees; None: all earlier ones and itself.

        Raises:
            UserError: tokens that branch, on attention that takes no mask, or in layers of different lengths.
        """
        with self.folding() as folds_heads:
            lengths, count = self.cache.lengths, len(places)
            keys = max(lengths) + count
            ragged = min(lengths) < max(lengths)
            mask = None
            if (
                self._graphs is not None
                and count == 1
                and visible is None
                and folds_heads
                and not ragged
            ):
                return self._recorded_steps(self._graphs).run(ids, places[0])
            if visible is not None:
                if not folds_heads:
                    self._check_branches(ragged)
                groups = self._groups if folds_heads else 1
                mask = window_mask(visible.to(self.device), keys, groups, self._dtype)
            elif count > 1 and folds_heads:
                mask = chain_mask(count, keys, self._groups, self._dtype, self.device)
            elif count > 1 and ragged:
                # The single mask that the stack builds does not fit all layers.
                token_logits = [
                    self._forward(ids[n : n + 1], [places[n]], None) for n in range(count)
                ]
                return torch.cat(token_logits)
            return self._forward(ids, places, mask)

    def _check_branches(self, ragged: bool) -> None:
        """Refuse trees if one explicit mask cannot serve all layers."""
        name = self._decoder.config._attn_implementation
        if name != "eager" or ragged:
            raise UserError(
                f"model.attention={name!r} cannot verify a drafted tree"
                f"{' over layers of different lengths' if ragged else ''}; valid: sdpa"
            )

    def _forward(self, ids: Tensor, places: Sequence[int], mask: Tensor | None) -> Tensor:
        if list(places) == list(range(places[0], places[0] + len(places))):
            steps = torch.arange(places[0], places[0] + len(places), device=ids.device)
        else:
            steps = torch.tensor(places, device=ids.device)
        logits = self._text(ids[None], self.following + steps, mask, self.cache)[0]
        # A model spread over devices ends on the last one; callers read on the first.
        return logits.to(self.device)

    def _recorded_steps(self, graphs: Graphs) -> FixedSteps:
        """Return the answer's recorded steps, created at the first call."""
        if self._steps is None:
            shape = self._groups, self._dtype
            self._steps = FixedSteps(self._text, self.cache, self.following, shape, graphs)
        return self._steps
