"""Cache eviction: layers are scored as the prompt runs, and shortened afterwards, each to its own budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from espalier.harness.engine.attention_probe import process_rows
from espalier.harness.engine.kv_cache import IndexedLayer, entries_of
from espalier.harness.engine.layer_inputs import held_entries
from espalier.harness.engine.layout import Layout, Stage
from espalier.harness.engine.prefill import Prefill, merge_into
from espalier.harness.errors import UserError, brief
from espalier.methods.base import PlanError, Site
from espalier.methods.blame import Blame
from espalier.methods.chance import generators_of
from espalier.methods.checks import Condition, read, require_all
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.plans import Plan, require_tensor
from espalier.methods.select.topk import indices_of

WRITTEN = (
    "`score` writes into view.keys or view.queries, which the model goes on to use; valid: new tensors, such as "
    "view.keys / norm or view.keys.clone()"
)

TARGETS = "what `merge` returns must lie in [-1, {}): a candidate, itself if it stays, -1 if it is dropped"

#: Ratios are decimal: a count this close to a half is rounded as a half.
TIE = 1e-9


@dataclass(frozen=True)
class CacheBudget:
    """Implements CacheEvictor: a compressor, and the share of the cache to evict or the entries to keep.

    Attributes:
        compressor: scores entries and splits the budget over layers.
        ratio: share of the candidates to evict, on average over layers; 0 leaves the cache unchanged.
        count: candidates to keep, on average over layers, or all if there are fewer; None: the ratio applies.
    """

    compressor: CacheCompressor
    ratio: float
    count: int | None = None

    @property
    def acts(self) -> bool:
        """Whether it may evict entries of some sample."""
        return self.ratio > 0 or self.count is not None

    def total(self, candidates: Sequence[int]) -> int:
        """Return the entries kept over all layers: the count in each layer, or the share (1 - ratio), rounded half up.

        At least one per layer.
        """
        if self.count is not None:
            return sum(min(self.count, entries) for entries in candidates)
        rounded = math.floor((1 - self.ratio) * sum(candidates) + 0.5 + TIE)
        return max(rounded, len(candidates))

    def begin(self, prefill: Prefill, depth: int) -> ScoredEviction:
        """Return the eviction of one pass."""
        return ScoredEviction(self, prefill, depth)


@dataclass(frozen=True)
class RowSlots:
    """Slots of a sample's tokens in a left-padded batch, counted from its first token.

    Attributes:
        start: slot of its first token.
        candidates, visual, words, between, pictures: as in `CacheView`.
        special: slots of newline and separator tokens that are not visual tokens, if the whole prompt may be evicted.
    """

    start: int
    candidates: Tensor
    visual: Tensor
    words: Tensor
    between: Tensor
    pictures: Tensor
    special: Tensor


#: A sample's slots, the (H, S) ascending ones from its first token on that stay, and what `merge` returned.
RowChoice = tuple[RowSlots, Tensor, Tensor | None]


class ScoredEviction:
    """Implements PassEviction: scores and evicts the cache of one pass.

    Args:
        evicting: compressor and ratio.
        prefill: the batch.
        depth: decoder layers.
    """

    def __init__(self, evicting: CacheBudget, prefill: Prefill, depth: int) -> None:
        self._evicting = evicting
        self._prefill = prefill
        self._depth = depth
        #: (H, N) of each layer that is evicted from, and row; None for a row without candidates.
        self._scores: dict[int, list[Tensor | None]] = {}
        self._rows: dict[tuple[int, torch.device], list[RowSlots]] = {}
        self._layer_rows: dict[int, list[RowSlots]] = {}
        #: Of each row, once for all layers.
        self._chance: list[Sequence[torch.Generator]] = []
        #: Visual entries that each layer holds, for each row of the batch; empty before `shorten`.
        self.held_visual: list[tuple[int, ...]] = []
        self._held_special: list[tuple[int, ...]] = []

    @property
    def held_special(self) -> Sequence[Sequence[int]]:
        """Newline and separator entries that each layer holds, for each row; empty if they are not candidates."""
        return self._held_special if self._evicting.compressor.scope == "prompt" else ()

    def score_layer(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Score a layer from its queries (B, H, M, D) and keys (B, H_kv, M, D). Cost: the method's, row by row."""
        stage = self._prefill.active_stage()
        if stage is None:
            return
        if not self._chance:
            names = [name for name in self._prefill.samples for _ in range(self._prefill.beams)]
            draws = partial(generators_of, self._evicting.compressor, self._prefill.setup.seed)
            self._chance = [draws([name], 0) for name in names]
        stage, key_of_rows = stage.move(key.device), (id(stage), key.device)
        if key_of_rows not in self._rows:
            layout = self._prefill.layout.repeat(self._prefill.beams)
            self._rows[key_of_rows] = self._slots_of_rows(stage, layout)
        rows = self._rows[key_of_rows]
        layer_scores: list[Tensor | None] = []
        for number, row in enumerate(rows):
            view = CacheView(
                layer=layer,
                queries=query[number, :, row.start :],
                keys=key[number, :, row.start :],
                scaling=scaling,
                candidates=row.candidates,
                visual=row.visual,
                words=row.words,
                chance=self._chance[number],
                between=row.between,
                pictures=row.pictures,
            )
            with self._prefill.setup.conditions.collecting():
                layer_scores.append(self._score(view) if len(row.candidates) else None)
            self._collect(view, number, stage, layer_scores[-1])
        self._scores[layer] = layer_scores
        self._layer_rows[layer] = rows

    def _score(self, view: CacheView) -> Tensor:
        compressor, (heads, kv_heads) = self._evicting.compressor, view.heads
        before = _sums(view)
        with Blame(compressor, "score", Site("cache", view.layer)):
            scores = compressor.score(view)
            # A copy would cost more, and the layer's attention runs after this on the same tensors.
            written = ((before != _sums(view)) & before.isfinite()).any()
            require_all([Condition(~written, lambda: PlanError(WRITTEN))])
            shape = (None, len(view.candidates))
            require_tensor("what `score` returns", scores, shape, view.keys.device, real=True)
            if scores.shape[0] not in (1, kv_heads, heads):
                raise PlanError(
                    f"`score` returns {scores.shape[0]} rows; valid: 1, {kv_heads} (KV heads) or {heads} (heads)"
                )
        return scores

    def _collect(self, view: CacheView, number: int, stage: Stage, scores: Tensor | None) -> None:
        """Hand the scores of a row's visual entries to whoever collects them."""
        collector = self._prefill.setup.collector
        if collector is None or scores is None:
            return
        is_candidate = torch.isin(view.visual, view.candidates)
        place = torch.searchsorted(view.candidates, view.visual[is_candidate])
        origin = stage.origin[number, : len(view.visual)][is_candidate]
        collector.add(view.layer, [number], origin[None], scores.mean(0)[place][None])

    def _slots_of_rows(self, stage: Stage, layout: Layout) -> list[RowSlots]:
        """Return the slots of each row. Waits for the device once, to count the words around the images."""
        around = []
        for words, slots, count in zip(stage.words, stage.slots, stage.counts, strict=True):
            ends = (slots[0], slots[count - 1]) if count else (-1, -1)
            around.append(torch.stack([((words >= 0) & (words < end)).sum() for end in ends]))
        counts = read(torch.stack(around))[0].tolist()
        return [self._row(stage, number, layout, *pair) for number, pair in enumerate(counts)]

    def _row(
        self, stage: Stage, number: int, layout: Layout, n_before: int, n_up_to: int
    ) -> RowSlots:
        """Return the slots of a row with so many words before its first visual token, and before its last."""
        count, width = stage.counts[number], stage.valid.shape[1]
        length = layout.text[number] + count
        start, n_special = width - length, layout.special[number]
        visual = stage.slots[number, :count] - start
        words = stage.words[number, : layout.text[number] - n_special] - start
        special = visual[:0]
        if n_special and self._evicting.compressor.scope == "prompt":
            is_special = torch.ones(1, length, dtype=torch.bool, device=visual.device)
            is_special.index_fill_(1, torch.cat([visual, words]), False)
            special = indices_of(is_special, n_special)[0]
        pictures = layout.picture[number].to(visual.device)[stage.origin[number, :count]]
        between, words = words[n_before:n_up_to], words[n_up_to:]
        name = f"sample {self._prefill.samples[number // self._prefill.beams]}"
        if len(words) == 0:
            raise UserError(
                f"{name}: no word follows the image, so that no query can score its cache entries; "
                "valid: a prompt that ends in text"
            )
        candidates = visual
        if self._evicting.compressor.scope == "prompt":
            exempt_first, exempt_last = self._evicting.compressor.exempt
            candidates = torch.arange(
                exempt_first, max(length - exempt_last, exempt_first), device=visual.device
            )
            if len(candidates) == 0:
                raise UserError(
                    f"{name}: none of its {length} prompt tokens may be evicted, since the first {exempt_first} "
                    f"and the last {exempt_last} always stay; "
                    "valid: method.params.scope=visual, or a smaller method.params.window or recent"
                )
        return RowSlots(start, candidates, visual, words, between, pictures, special)

    # ------------------------------------------------------------------ after the prefill

    def shorten(self, cache: Any) -> list[Stage]:
        """Shorten the cache, layer by layer, and return each layer's stage for the decoding steps.

        Keys and values are gathered into new storage, and the old is released before the next layer is shortened.

        Raises:
            PlanError: the method wrote into a view.
            UserError: a cache of a class that cannot be shortened.
        """
        with self._prefill.setup.conditions.collecting():
            budgets = dict(zip(self._scores, zip(*self._budgets(), strict=True), strict=True))
            choices = {layer: self._choose(layer, budget) for layer, budget in budgets.items()}
            counts = read(*(numbers for _, numbers in choices.values()))
        stages = []
        for layer in range(self._depth):
            if layer in choices:
                self._scores[layer] = []
                rows, numbers = choices.pop(layer)[0], counts.pop(0).tolist()
                stages.append(self._evict(layer, cache.layers[layer], rows, numbers))
            else:
                # It does not hold the whole prompt, and stays as it is.
                stage = self._prefill.stage_of(layer)
                self.held_visual.append(held_entries(stage, entries_of(cache.layers[layer])))
                self._held_special.append(self._prefill.layout.repeat(self._prefill.beams).special)
                stages.append(replace(stage, first=layer))
        return stages

    def _budgets(self) -> list[list[int]]:
        """Return the number of candidates that each row keeps in each layer that is evicted from."""
        budgets = []
        for number in range(self._prefill.layout.rows * self._prefill.beams):
            scores = [layer[number] for layer in self._scores.values()]
            candidate_scores = [layer_scores for layer_scores in scores if layer_scores is not None]
            if len(candidate_scores) < len(scores):
                budgets.append([0] * len(scores))
                continue
            # The layers of a spread model meet on the card of the first.
            place = candidate_scores[0].device
            candidate_scores = [layer_scores.to(place) for layer_scores in candidate_scores]
            total = self._evicting.total(
                [layer_scores.shape[-1] for layer_scores in candidate_scores]
            )
            with Blame(self._evicting.compressor, "allocate"):
                shares = self._evicting.compressor.allocate(candidate_scores, total)
                budgets.append(self._checked_shares(shares, candidate_scores, total))
        return budgets

    def _checked_shares(self, shares: Any, scores: Sequence[Tensor], total: int) -> list[int]:
        place = shares.device if isinstance(shares, Tensor) else torch.device("cpu")
        require_tensor("what `allocate` returns", shares, (len(scores),), place)
        counts: list[int] = shares.tolist()
        sizes = [layer_scores.shape[-1] for layer_scores in scores]
        limit = total + self._evicting.compressor.slack(len(scores))
        inside = all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))
        if not inside or not total <= sum(counts) <= limit:
            raise PlanError(
                f"`allocate` returns {brief(str(counts))} of {brief(str(sizes))} entries, in sum {sum(counts)}; valid: "
                f"1 or more of each layer, in sum {total}, such as "
                "espalier.methods.select.budgets.entries(shares, total, sizes)"
            )
        return counts

    def _choose(self, layer: int, budgets: Sequence[int]) -> tuple[list[RowChoice], Tensor]:
        """Choose what stays in one layer; each row keeps a number of its candidates.

        Also returns (B, 2): the visual tokens that stay in all heads together, and the special ones.
        """
        rows, scores = self._layer_rows[layer], self._scores[layer]
        width, compressor = self._prefill.stage_of(layer).valid.shape[1], self._evicting.compressor
        site = Site("cache", layer)
        heads = max((len(row_scores) for row_scores in scores if row_scores is not None), default=1)
        choices, numbers = [], []
        for row, row_scores, budget in zip(rows, scores, budgets, strict=True):
            length, merge_targets = width - row.start, None
            alive = torch.ones(heads, length, dtype=torch.bool, device=row.visual.device)
            if row_scores is not None:
                n_entries = row_scores.shape[1]
                with Blame(compressor, "keep", site):
                    kept = compressor.keep(row_scores, budget)
                    shape = len(row_scores), budget
                    require_tensor("what `keep` returns", kept, shape, row_scores.device)
                    Plan(kept).check(n_entries, budget)
                    kept = Plan(kept).inside(n_entries).kept
                with Blame(compressor, "merge", site):
                    merge_targets = compressor.merge(row_scores, kept)
                    if merge_targets is not None:
                        place, size = row_scores.device, tuple(row_scores.shape)
                        require_tensor("what `merge` returns", merge_targets, size, place)
                        inside = ((merge_targets >= -1) & (merge_targets < n_entries)).all()
                        require_all(
                            [Condition(inside, partial(PlanError, TARGETS.format(n_entries)))]
                        )
                alive.index_fill_(1, row.candidates, False)
                alive.scatter_(1, row.candidates[kept].expand(heads, -1), True)
            stays = indices_of(alive, length - len(row.candidates) + budget)
            choices.append((row, stays, merge_targets))
            counts = [alive.index_select(1, slots).sum() for slots in (row.visual, row.special)]
            numbers.append(torch.stack(counts))
        return choices, torch.stack(numbers)

    def _evict(
        self,
        layer: int,
        cache_layer: Any,
        choices: Sequence[RowChoice],
        numbers: Sequence[Sequence[int]],
    ) -> Stage:
        """Shorten one layer by the choices of its rows and their numbers, as `_choose` returns them."""
        keys, values, compressor = cache_layer.keys, cache_layer.values, self._evicting.compressor
        n_rows, kv_heads = keys.shape[:2]
        total = self._prefill.setup.adapter.facts.text.kv_heads
        first = choices[0][1]
        shards, heads = total // kv_heads, len(first)
        if heads > total:
            keys, values = self._repeat_heads(cache_layer, heads // total)
            kv_heads = heads // shards
        lengths = [stays.shape[1] for _, stays, _ in choices]
        index = first.new_full((n_rows, heads, max(lengths)), -1)
        for number, (row, stays, targets) in enumerate(choices):
            index[number, :, max(lengths) - stays.shape[1] :] = stays + row.start
            stores = keys[number, :, row.start :], values[number, :, row.start :]
            if targets is not None:
                local_targets = process_rows(targets, shards)
                for store in stores:
                    merge_into(store, row.candidates, local_targets, compressor.merge_shift)
            if not len(row.candidates):
                continue
            with Blame(compressor, "fold", Site("cache", layer)):
                local_stays = process_rows(stays, shards).expand(kv_heads, -1)
                folded = compressor.fold(*stores, local_stays, row.visual)
                for store, new in zip(stores, folded, strict=True) if folded is not None else ():
                    require_tensor("what `fold` returns", new, store.shape, store.device, True)
                    store.copy_(new)
        visuals, specials = (
            tuple(count // heads for count in counts) for counts in zip(*numbers, strict=True)
        )
        slots = torch.stack([process_rows(rows, shards) for rows in index.clamp(min=0)])
        slots = slots.unsqueeze(-1)
        shortened = [
            store.gather(2, slots.expand(n_rows, kv_heads, -1, store.shape[-1]))
            for store in (keys, values)
        ]
        del keys, values
        _replace(cache_layer, *shortened)
        self.held_visual.append(visuals)
        self._held_special.append(specials)
        empty, valid = index.new_zeros(n_rows, 0), index[:, 0] >= 0
        return Stage(layer, valid, len(set(lengths)) > 1, empty, visuals, empty, empty)

    def _repeat_heads(self, cache_layer: Any, copies: int) -> tuple[Tensor, Tensor]:
        """Return keys and values with a copy for each query head.

        Raises:
            UserError: decoding steps of the library, which would repeat them again.
        """
        if self._prefill.beams > 1 or not isinstance(cache_layer, IndexedLayer):
            raise UserError(
                "a cache with a copy for every query head can only be read by the engine's own loop; valid: "
                "engine.decode=loop, generation.num_beams=1"
            )
        keys, values = (entries.repeat_interleave(copies, dim=1) for entries in cache_layer.entries)
        return keys, values


def _sums(view: CacheView) -> Tensor:
    """Return (2,) sums of a view's queries and keys. Cost: one read of both."""
    return torch.stack([view.queries.sum(dtype=torch.float32), view.keys.sum(dtype=torch.float32)])


def _replace(cache_layer: Any, keys: Tensor, values: Tensor) -> None:
    """Replace the contents of a cache layer by these keys and values (B, H_kv, S, D).

    Raises:
        UserError: a layer that stores its entries in another form (quantised, offloaded, of fixed size).
    """
    if isinstance(cache_layer, IndexedLayer):
        cache_layer.replace(keys, values)
    elif type(cache_layer) is DynamicLayer:
        cache_layer.keys, cache_layer.values = keys, values
    else:
        raise UserError(
            f"a cache layer of class {type(cache_layer).__name__} cannot be shortened; "
            "valid: IndexedLayer, DynamicLayer"
        )
