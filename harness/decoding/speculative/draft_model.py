"""A draft model: loaded once, ready for one request after another, in whatever thread or process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.drafts import Draft, RandomNumbers
from espalier.harness.decoding.speculative.guidance import Guidance, GuidedReducer
from espalier.harness.decoding.speculative.samplers import sampler_of
from espalier.harness.decoding.speculative.shared_vocabulary import common_ids
from espalier.harness.decoding.speculative.state_machine import Drafter, DrafterLost
from espalier.harness.engine.layout import groups
from espalier.harness.engine.session import Session
from espalier.harness.engine.text_stack import graphs_for, text_only_prefill
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.chat_media import Chat
from espalier.harness.specs.run_spec import (
    AnswerRequest,
    Auto,
    ModelSpec,
    PositionPolicy,
    Separators,
    in_words_of_the_draft,
)
from espalier.methods.base import Decoder, TokenReducer
from espalier.methods.none import NoReduction


class TreeDrafter:
    """Drafts a tree of fixed shape: the children of a node are its likeliest successors, most probable first.

    Args:
        side: the draft model; it needs room for the inner nodes.
        parents: of each token, level by level, -1 for a first token.

    Raises:
        ValueError: a parent that does not come before its child, or levels out of order.
    """

    def __init__(self, side: CachedModel, parents: tuple[int, ...]) -> None:
        self._side = side
        self._shape = shape = Draft((0,) * len(parents), parents=parents)
        depths, device = shape.depths, side.stack.device
        if not parents or list(depths) != sorted(depths):
            raise ValueError(f"parents {parents} are not given level by level")
        self._levels = [nodes for _, nodes in groups(depths)]
        #: Nodes of each level that have children.
        self._inner = [[node for node in level if shape.children(node)] for level in self._levels]
        fed = [node for level in self._inner for node in level]
        rows = [
            above.index(parents[node])
            for above, level in zip([[-1], *self._inner], self._levels, strict=False)
            for node in level
        ]
        ranks = [shape.children(parent).index(node) for node, parent in enumerate(parents)]
        #: (2, N) of each node, its parent among the inner nodes of the level above, and its rank among the siblings.
        self._places = torch.tensor([rows, ranks], device=device)
        #: (F,) inner nodes, and (F, F) which of them each sees: its ancestors and itself.
        self._fed = torch.tensor(fed, dtype=torch.long, device=device)
        visible = [[ancestor in shape.path_to(node) for ancestor in fed] for node in fed]
        self._visible = torch.tensor(visible, dtype=torch.bool, device=device)

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the tree after `tokens`, for any `count`; children are chosen deterministically, so they have no rows.

        Cost: one forward for each level of the tree but the last, plus the tokens verified since the last draft.
        """
        side, shape = self._side, self._shape
        logits = side.logits_after(tokens)[None]
        chosen_ids = torch.zeros(len(shape.tokens), dtype=torch.long, device=logits.device)
        parents, fed = [-1], 0
        with side.stack.folding():
            for depth, (level, inner) in enumerate(zip(self._levels, self._inner, strict=True)):
                level_slots = slice(level[0], level[-1] + 1)
                best = self._best(logits, tokens, chosen_ids, parents)
                chosen_ids[level_slots] = best[*self._places[:, level_slots]]
                if not inner:
                    break
                first, fed = fed, fed + len(inner)
                logits = side.stack.run(
                    chosen_ids[self._fed[first:fed]],
                    [len(tokens) + depth] * len(inner),
                    self._visible[first:fed, :fed],
                )
                parents = inner
        side.cache.cut(fed)
        chosen: list[int] = chosen_ids.tolist()
        return Draft(tuple(chosen), parents=shape.parents)

    def _best(
        self, logits: Tensor, tokens: Sequence[int], chosen_ids: Tensor, parents: Sequence[int]
    ) -> Tensor:
        """Return the likeliest ids (P, n) after each of the parents, as many as one of them has children."""
        shape, sampler, pasts = self._shape, self._side.sampler, list[Tensor]()
        if sampler.reads_past:
            past = torch.tensor(list(tokens), dtype=torch.long, device=logits.device)
            pasts = [torch.cat([past, chosen_ids[shape.path_to(node)]]) for node in parents]
        return sampler.best(logits, pasts, max(len(shape.children(node)) for node in parents))


@dataclass(frozen=True)
class DraftRequest:
    """One answer to be drafted.

    Attributes:
        chat: the prompt, with its images or the names of its video files.
        sample: its id.
        config: generation settings, resolved by the target.
        room: longest answer, drafted tokens included.
        numbers: random numbers for drafted tokens.
    """

    chat: Chat
    sample: str
    config: GenerationConfig
    room: int
    numbers: RandomNumbers


@dataclass(frozen=True)
class DraftSpec:
    """Settings from which a draft model is built in any process.

    Attributes:
        model: the draft.
        decoder: decides what the draft sees.
        budget: visual tokens of the draft.
        seed: of the run.
        common: number of ids, from 0 on, that target and draft share.
        positions: `engine.positions`, of the tokens that a guided draft sees.
        separators: `engine.separators`.
        threads: torch threads in a separate process; None keeps the setting.
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
        """Load the model, in a separate process."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return DraftModel(self, load_adapter(self.model))


def draft_of(spec: AnswerRequest, decoder: Decoder) -> DraftSpec | None:
    """Return the settings of a run's draft; None if no second model drafts."""
    if spec.method.draft is None:
        return None
    engine, common = spec.engine, common_ids(spec.model, spec.method.draft)
    return DraftSpec(
        *(spec.method.draft, decoder, spec.budget, spec.seed, common),
        positions=engine.positions,
        separators=engine.separators,
        threads=engine.threads,
        graphs=engine.graphs,
    )


class DraftModel(Drafter):
    """Drafts for one request after another.

    Args:
        spec: settings of the draft.
        adapter: the loaded model.
        patience: seconds to wait for guidance from another thread.

    Raises:
        Refused: `engine.graphs=true`, and steps of this model cannot be recorded.
    """

    def __init__(self, spec: DraftSpec, adapter: Adapter, patience: float = 600.0) -> None:
        self._spec = spec
        self._adapter = adapter
        with in_words_of_the_draft():
            self._graphs = graphs_for(adapter, spec.graphs)
        self._patience = patience
        self._guidance_queue: SimpleQueue[Guidance] = SimpleQueue()
        self._side: CachedModel | None = None
        #: Of the answer, once it has begun.
        self._drafter: Drafter
        #: Waits for guidance that another process sends.
        self.listen: Callable[[], None] = lambda: None

    def begin(self, request: DraftRequest) -> None:
        """Read the chat; nothing runs through the model before the first draft.

        Raises:
            UserError: the model cannot read it.
        """
        self._guidance_queue = SimpleQueue()
        self._side = None
        adapter = self._adapter
        inputs = adapter.encode([list(request.chat)])
        sampler = sampler_of(
            adapter, request.config, inputs["input_ids"], self._spec.common, request.numbers
        )
        prefill = partial(self._prefill, inputs, request.sample)
        self._side = CachedModel(adapter, sampler, request.room, prefill, self._graphs)
        tree = self._spec.decoder.tree
        self._drafter = TreeDrafter(self._side, tree) if tree else self._side

    def start(self) -> None:
        """Run the prompt; without this call the first draft does."""
        assert self._side is not None  # begin() was called
        self._side.start()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the model."""
        return self._adapter.devices

    @property
    def unread(self) -> bool:
        """Whether the next draft begins with the prompt."""
        return self._side is not None and not self._side.started

    def guide(self, guidance: Guidance) -> None:
        """Take the target's choice of tokens."""
        self._guidance_queue.put(guidance)

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Draft after running the prompt; waits for guidance if the decoder is guided."""
        return self._drafter.draft(tokens, count)

    def _prefill(
        self, inputs: Mapping[str, Any], sample: str, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        spec, adapter = self._spec, self._adapter
        if spec.decoder.text_only:
            return text_only_prefill(adapter, inputs, cache)
        method: TokenReducer = spec.decoder.reducer or NoReduction()
        if spec.decoder.guided:
            method = GuidedReducer(self._guidance)
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

    def _guidance(self) -> Guidance:
        """Return the target's choice, as soon as it is known.

        Raises:
            DrafterLost: it does not come in time.
        """
        if self._guidance_queue.empty():
            self.listen()
        try:
            return self._guidance_queue.get(timeout=self._patience)
        except Empty as error:
            raise DrafterLost(f"no guidance came within {self._patience:g} s") from error
