"""A draft model: loaded once, ready for one chat after another, in whatever thread or process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.utils import logging

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.draft_trees import TreeDrafter
from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.guidance import Given, Guidance
from espalier.harness.decoding.speculative.position_random import RandomNumbers
from espalier.harness.decoding.speculative.samplers import sampler_of
from espalier.harness.decoding.speculative.shared_vocabulary import common_ids
from espalier.harness.decoding.speculative.state_machine import Drafter, DrafterLost
from espalier.harness.engine.session import Session
from espalier.harness.engine.text.cuda_graphs import graphs_for
from espalier.harness.engine.text.text_only import text_only_prefill
from espalier.harness.models.adapter import Adapter, load_adapter
from espalier.harness.models.chat_media import Chat
from espalier.harness.specs.draft_errors import in_words_of_the_draft
from espalier.harness.specs.run_spec import Asked, Auto, ModelSpec, PositionPolicy, Separators
from espalier.methods.base import Decoder, TokenReducer
from espalier.methods.none import NoReduction


@dataclass(frozen=True)
class Order:
    """One answer to be drafted.

    Attributes:
        chat: what is asked, with its pictures or the names of its video files.
        sample: its id.
        config: generation settings, resolved by the target.
        room: longest answer, drafted tokens included.
        numbers: with which drafted tokens are drawn.
    """

    chat: Chat
    sample: str
    config: GenerationConfig
    room: int
    numbers: RandomNumbers


@dataclass(frozen=True)
class DraftSpec:
    """What a draft model is built from, wherever that happens.

    Attributes:
        model: the draft.
        decoder: says what the draft sees.
        budget: how much of it.
        seed: of the run.
        common: ids that target and draft share, from 0 on.
        positions: `engine.positions`, of the tokens that a guided draft sees.
        separators: `engine.separators`.
        threads: for torch, in a process of its own; None leaves the setting alone.
        graphs: `engine.graphs`.
    """

    model: ModelSpec
    decoder: Decoder
    budget: Budget
    seed: int
    common: int
    positions: PositionPolicy = "original"
    separators: Separators = "keep"
    threads: int | None = None
    graphs: bool | Auto = False

    def build(self) -> DraftModel:
        """Load the model, in a process of its own."""
        logging.disable_progress_bar()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return DraftModel(self, load_adapter(self.model))


def draft_of(asked: Asked, decoder: Decoder) -> DraftSpec | None:
    """Return what the draft of a run is built from; None where no second model drafts."""
    if asked.method.draft is None:
        return None
    engine, common = asked.engine, common_ids(asked.model, asked.method.draft)
    return DraftSpec(
        *(asked.method.draft, decoder, asked.budget, asked.seed, common),
        positions=engine.positions,
        separators=engine.separators,
        threads=engine.threads,
        graphs=engine.graphs,
    )


class DraftModel(Drafter):
    """Drafts for one order after another.

    Args:
        spec: what it does without.
        adapter: the loaded model.
        patience: seconds to wait for guidance that another thread brings.

    Raises:
        Refused: `engine.graphs=true`, and steps of this model cannot be recorded.
    """

    def __init__(self, spec: DraftSpec, adapter: Adapter, patience: float = 600.0) -> None:
        self._spec = spec
        self._adapter = adapter
        with in_words_of_the_draft():
            self._graphs = graphs_for(adapter, spec.graphs)
        self._patience = patience
        self._told: SimpleQueue[Guidance] = SimpleQueue()
        self._side: CachedModel | None = None
        self._drafter: Drafter | None = None
        #: Waits until guidance has been brought, where it does not come by itself.
        self.listen: Callable[[], None] = lambda: None

    def begin(self, order: Order) -> None:
        """Read the chat; nothing runs through the model before the first draft.

        Raises:
            UserError: the model cannot read it.
        """
        self._told = SimpleQueue()
        self._side = self._drafter = None
        adapter = self._adapter
        inputs = adapter.encode([list(order.chat)])
        sampler = sampler_of(
            adapter, order.config, inputs["input_ids"], self._spec.common, order.numbers
        )

        def prefill(cache: Cache) -> tuple[Tensor, Tensor]:
            return self._prefill(inputs, cache, order.sample)

        self._side = CachedModel(adapter, sampler, order.room, prefill, self._graphs)
        tree = self._spec.decoder.tree
        self._drafter = TreeDrafter(self._side, tree) if tree else self._side

    def start(self) -> None:
        """Run the prompt; without this call the first draft does."""
        assert self._side is not None  # an order was given
        self._side.start()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the model is."""
        return self._adapter.devices

    @property
    def unread(self) -> bool:
        """Whether the next draft begins with the prompt."""
        return self._side is not None and not self._side.started

    def guide(self, guidance: Guidance) -> None:
        """Take what the target chose."""
        self._told.put(guidance)

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Draft, after the prompt has been read; waits for guidance if the decoder is guided."""
        assert self._drafter is not None  # an order was given
        return self._drafter.draft(tokens, count)

    def _prefill(
        self, inputs: Mapping[str, Any], cache: Cache, sample: str
    ) -> tuple[Tensor, Tensor]:
        spec, adapter = self._spec, self._adapter
        if spec.decoder.text_only:
            return text_only_prefill(adapter, inputs, cache)
        method = self._reducer()
        with Session(
            adapter,
            method,
            spec.budget,
            seed=spec.seed,
            positions=spec.positions if spec.decoder.guided else "original",
            timed=False,
            separators=spec.separators,
        ) as session:
            return session.prefill(inputs, cache, sample)

    def _reducer(self) -> TokenReducer:
        if self._spec.decoder.guided:
            return Given(self._guidance)
        return self._spec.decoder.reducer or NoReduction()

    def _guidance(self) -> Guidance:
        """Return what the target chose, as soon as it has.

        Raises:
            DrafterLost: it never comes.
        """
        if self._told.empty():
            self.listen()
        try:
            return self._told.get(timeout=self._patience)
        except Empty as error:
            raise DrafterLost(f"no guidance came within {self._patience:g} s") from error
