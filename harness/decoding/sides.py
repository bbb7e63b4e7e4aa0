"""A loaded model as a side of speculative decoding: prefilled once, then fed what its cache does not hold yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.adapters.base import Adapter
from harness.decoding.cache import RoomyCache
from harness.decoding.drafts import Draft
from harness.decoding.machine import Drafter, Verifier
from harness.engine.session import Session


class GreedySide(Drafter, Verifier):
    """One model and one prompt: what it says behind any answer, by its likeliest tokens.

    The cache holds the prompt and some answer. Whatever is asked next, the part that both answers share stays, the rest
    is cut off, and only what is missing is fed. Rows are remembered for as long as their tokens are in the cache.

    Args:
        session: an open session; its method reduces this side's visual tokens, `none` leaves them alone.
        inputs: one encoded chat.
        room: longest answer, drafted tokens included.

    Raises:
        ValueError: more than one chat.
    """

    def __init__(self, session: Session, inputs: Mapping[str, Any], room: int) -> None:
        if inputs["input_ids"].shape[0] != 1:
            raise ValueError(f"{inputs['input_ids'].shape[0]} chats; a side takes one")
        self._adapter: Adapter = session.adapter
        self._decoder = self._adapter.decoder
        self._embed = self._adapter.model.get_input_embeddings()
        self._head = self._adapter.model.get_output_embeddings()
        self._cache = RoomyCache(len(self._decoder.layers), room)
        self._fed: list[int] = []
        logits, self._next = session.prefill(inputs, self._cache)
        self._rows: list[Tensor] = [logits.argmax()]
        #: Layers may hold prompts of different lengths; then tokens are fed one by one, for one mask does not fit all.
        self._ragged = len(set(self._cache.lengths)) > 1

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], draft: Draft) -> list[Tensor]:
        """Return the likeliest id behind `tokens`, then behind each token of a drafted chain."""
        whole = [*tokens, *draft.tokens]
        self._feed(whole)
        return self._rows[len(tokens) : len(whole) + 1]

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next `count` tokens; ids stay on the device until the last is known."""
        self._feed(list(tokens))
        said = [self._rows[-1]]
        for _ in range(count - 1):
            self._step(said[-1].view(1, 1), len(tokens) + len(said) - 1)
            said.append(self._rows[-1])
        found: list[int] = torch.stack(said).tolist()
        self._fed += found[: count - 1]
        return Draft(tuple(found))

    def _feed(self, tokens: list[int]) -> None:
        """Cut the cache back to what it shares with `tokens` and feed the rest."""
        shared = 0
        for held, wanted in zip(self._fed, tokens, strict=False):
            if held != wanted:
                break
            shared += 1
        if shared < len(self._fed):
            self._cache.cut(len(self._fed) - shared)
            del self._fed[shared:], self._rows[shared + 1 :]
        missing = tokens[shared:]
        if not missing:
            return
        ids = torch.tensor([missing], device=self._adapter.device)
        for part in ids.split(1, dim=1) if self._ragged else (ids,):
            self._step(part, len(self._rows) - 1)
        self._fed += missing

    def _step(self, ids: Tensor, place: int) -> None:
        """Run new tokens (1, t) from `place` of the answer on, and remember the id behind each."""
        steps = torch.arange(place, place + ids.shape[1], device=ids.device)
        hidden = self._decoder(
            inputs_embeds=self._embed(ids),
            position_ids=self._next + steps,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        self._rows += self._head(hidden)[0].argmax(-1).unbind()
