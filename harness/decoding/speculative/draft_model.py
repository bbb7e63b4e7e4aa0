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
from espalier.harness.specs.run_spec import Asked, ModelSpec, PositionPolicy, Separators
from espalier.methods.base import Decoder, TokenReducer
from espalier.methods.none import NoReduction


class TreeDrafter:
    """Drafts a tree of fixed shape: the children of a node are its likeliest successors, most probable first.

    Args:
        side: the draft model; it needs room for the nodes that have children.
        parents: of each token, level by level, -1 for a first token.

    Raises:
        ValueError: a parent that does not come before its child, or levels out of order.
    """

    def __init__(self, side: CachedModel, parents: tuple[int, ...]) -> None:
        self._side = side
        self._shape = Draft((0,) * len(parents), parents=parents)
        depths = self._shape.depths
        if not parents or list(depths) != sorted(depths):
            raise ValueError(f"parents {parents} are not given level by level")
        self._levels = [
            [node for node, one in enumerate(depths) if one == depth]
            for depth in range(depths[-1] + 1)
        ]

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the tree behind `tokens`, whatever the `count`; children are chosen outright, so they have no rows.

        Cost: one forward for each level of the tree but the last, besides what was verified since the last draft.
        """
        del count
        side, shape = self._side, self._shape
        logits = side.behind(tokens)[None]
        said = torch.zeros(len(shape.tokens), dtype=torch.long, device=logits.device)
        past = torch.tensor(list(tokens), dtype=torch.long, device=logits.device)
        askers, fed = [-1], list[int]()
        with side.stack.folding():
            for depth, level in enumerate(self._levels):
                self._choose(said, logits, askers, past)
                askers = [node for node in level if shape.children(node)]
                if not askers:
                    continue
                fed += askers
                ids = said[torch.tensor(askers, device=said.device)]
                places = [len(tokens) + depth] * len(askers)
                logits = side.stack.run(ids, places, self._seen(fed, askers))
        side.cache.cut(len(fed))
        found: list[int] = said.tolist()
        return Draft(tuple(found), parents=shape.parents)

    def _choose(self, said: Tensor, logits: Tensor, askers: list[int], past: Tensor) -> None:
        """Give the children of the nodes `askers` their tokens; nobody waits for them."""
        shape, sampler = self._shape, self._side.sampler
        families = [shape.children(node) for node in askers]
        pasts = (
            [torch.cat([past, said[shape.way(node)]]) for node in askers]
            if sampler.reads_past
            else []
        )
        best = sampler.best(logits, pasts, max(map(len, families)))
        for likeliest, children in zip(best, families, strict=True):
            said[torch.tensor(children, device=said.device)] = likeliest[: len(children)]

    def _seen(self, fed: list[int], new: list[int]) -> Tensor:
        """Return (t, s) which of the nodes fed so far each of the `new` ones sees: those on its way, and itself."""
        column = {node: place for place, node in enumerate(fed)}
        seen = torch.zeros(len(new), len(fed), dtype=torch.bool)
        for row, node in enumerate(new):
            seen[row, [column[above] for above in self._shape.way(node)]] = True
        return seen


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
    graphs: bool | None = False

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
