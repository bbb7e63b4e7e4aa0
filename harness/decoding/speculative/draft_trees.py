"""Drafting a tree: several guesses at each place, level by level, for one forward of the target to judge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.drafts import Draft


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
