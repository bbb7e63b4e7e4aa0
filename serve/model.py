"""The model's half of the plug-in: it chooses the tokens of each item, and gives every token its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from espalier.methods.base import Need, Site, View
from espalier.methods.checks import Conditions
from espalier.serve import digits
from espalier.serve.clock import Stopwatch
from espalier.serve.families import FAMILIES
from espalier.serve.places import Places, Tower, among_words
from espalier.serve.processor import COUNTS, LAYOUT, QUESTION, SETTING, read_fields
from espalier.serve.setting import Setting
from espalier.serve.signals import TowerSignals

#: Signals that the tower's hooks catch; the others are known without it.
OF_TOWER = frozenset(
    {"cls_attention", "cls_logits", "tower_keys", "wide_cls_attention", "wide_tower_keys"}
)

#: Fields that an item's places are computed from.
SHAPES = (
    *("image_sizes", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "pixel_values"),
)

#: Most pairs of tokens in a group of items: a method may hold a similarity of each, 64 MiB in fp32.
PAIRS = 2**24


class PrunedModel:
    """Mixin over a family's model."""

    #: vLLM's graphs of an encoder go around `embed_multimodal`: it runs without.
    supports_encoder_cudagraph = False

    #: Architecture of the checkpoint, and whether embeddings carry positions.
    architecture: str
    channelled: bool
    config: Any
    #: Counts what the plug-in adds to the encoder.
    stopwatch: Stopwatch
    #: Embeddings (N, D) of words, without an adapter.
    word_embeddings: Callable[[Tensor], Tensor]

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode the items of a batch, and leave the tokens that each item's method keeps."""
        fields = {name: kwargs.pop(name, None) for name in (SETTING, COUNTS, LAYOUT, QUESTION)}
        if fields[SETTING] is None:
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        number = len(fields[SETTING])
        entries = [read_fields({k: v[n] for k, v in fields.items()}) for n in range(number)]
        sites = [self._site(setting, counts) for setting, counts, _, _ in entries]
        signals = self._signals([setting for setting, *_ in entries], sites)
        with nullcontext() if signals is None else signals.watching():
            encoded = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        groups: list[_ItemGroup] = []
        for item in self._items(entries, sites, encoded, kwargs):
            group = next((group for group in groups if group.takes(item)), None)
            if group is None:
                groups.append(group := _ItemGroup(self, signals))
            group.items.append(item)
        results: dict[int, Tensor] = {}
        conditions = Conditions()
        for group in groups:
            # A batch in which every token stays is none for the histogram.
            idle = group.items[0].site is None
            with nullcontext() if idle else self.stopwatch.running():
                with conditions.collecting():
                    tokens, stay = group.reduced()
                embeddings = self._placed(tokens, stay, group.items[0])
            results |= dict(zip((item.number for item in group.items), embeddings, strict=True))
        self.stopwatch.end_batch()
        # Besides a method's own reads the host waits for the device here alone, once for the batch.
        conditions.settle()
        return tuple(results[n] for n in range(number))

    def _items(
        self,
        entries: Sequence[tuple[Setting, tuple[int, int, int], Tensor, Tensor]],
        sites: Sequence[Site | None],
        encoded: Sequence[Tensor],
        data: Mapping[str, Any],
    ) -> Iterator[_Item]:
        """Yield the items of a batch, from the fields of this package and vLLM's fields `data` of all."""
        modality, first = "video" if any("video" in name for name in data) else "image", 0
        for n, (setting, counts, layout, question) in enumerate(entries):
            tokens = encoded[n].reshape(-1, encoded[n].shape[-1])
            shapes = {name: data[name][n] for name in SHAPES if name in data}
            places = FAMILIES[self.architecture].places(self.config, modality, shapes, len(tokens))
            units = slice(first, first + places.units)
            first += places.units
            yield _Item(n, tokens, places, units, setting, sites[n], counts[2], layout, question)

    def load_weights(self, weights: Any) -> Any:
        """Load a checkpoint; towers that newer versions of transformers save get the names that vLLM reads."""
        nested = hasattr(getattr(self, "vision_tower", None), "vision_model")
        return super().load_weights(  # type: ignore[misc]
            ((tower_name(name) if nested else name), tensor) for name, tensor in weights
        )

    def _site(self, setting: Setting, counts: tuple[int, int, int]) -> Site | None:
        """Return where an item's method acts; None if every token stays."""
        if counts[1] == counts[2]:
            return None
        return setting.sites(self.config.get_text_config().num_hidden_layers)[0]

    def _signals(
        self, settings: Sequence[Setting], sites: Sequence[Site | None]
    ) -> TowerSignals | None:
        """Return the watchers of a batch's signals; None if no item needs any."""
        needs: set[Need] = set()
        features = False
        for setting, site in zip(settings, sites, strict=True):
            if site is not None:
                features |= site.where == "vision"
                needs |= {n for n in setting.reducer.needs(site) if n.signal in OF_TOWER}
        if not needs and not features:
            return None
        return TowerSignals(self.tower, needs, features, self.stopwatch)

    @cached_property
    def tower(self) -> Tower:
        """The vision tower as vLLM has built it."""
        return FAMILIES[self.architecture].tower(self)

    # ---------------------------------------------------------------- positions

    def forward(self, input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder; one with one axis gets that one, since compiled ones take no others."""
        if FAMILIES[self.architecture].axes == 1 and positions.ndim > 1:
            positions = positions[0]
        return super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]

    def _placed(self, tokens: Tensor, stay: Tensor | None, item: _Item) -> Tensor:
        """Return the embeddings (B, K, D) of items like `item`, with the words between their tokens and positions.

        Args:
            tokens: (B, K, D) that stay.
            stay: (B, K) their places; None: all stay.
            item: one of them.
        """
        positions, span = item.places.positions, item.places.span
        if item.layout.numel():
            ids, embedded = item.layout[0], item.layout[1].bool()
            positions, span = among_words(item.places, embedded)
            words = self._words(ids[~embedded].to(tokens.device), tokens)
            visual = embedded.nonzero()[:, 0].to(tokens.device)
            between = (~embedded).nonzero()[:, 0].to(tokens.device)
            tokens, stay = _merged(
                words.expand(len(tokens), -1, -1), between, tokens, _taken(visual, stay)
            )
        if not self.channelled:
            return tokens
        if item.setting.positions == "renumbered":
            stay, span = None, tokens.shape[1]
            positions = torch.arange(span).unsqueeze(1).expand(-1, 3)
        # Checked and written on the host for all tokens, so that nothing waits for those that stay.
        table = digits.encode(torch.cat([positions, torch.full((len(positions), 1), span)], dim=1))
        numbers = _taken(table.to(tokens.device), stay)
        return digits.append(tokens, numbers.expand(len(tokens), -1, -1))

    def _words(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Return the embeddings of words in the width of an item's tokens."""
        words = self.word_embeddings(ids)
        filled = tokens.new_zeros(len(ids), tokens.shape[2])
        filled[:, : words.shape[1]] = words
        return filled

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[Tensor, int]:
        """Return the positions (3, L) of a prompt: words have theirs, a place of item i holds -1 - its start.

        How far an item reaches is known from its size, so what follows it needs no second look: a prompt that is
        read in pieces, or in part from the prefix cache, has the same positions.
        """
        positions = torch.empty(3, len(input_tokens), dtype=torch.long)
        at = done = 0
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            place = feature.mm_position
            first, last = 0, place.length
            if place.is_embed is not None:
                visual = torch.as_tensor(place.is_embed).nonzero()[:, 0]
                first, last = int(visual[0]), int(visual[-1]) + 1
            begin, end = place.offset + first, place.offset + last
            positions[:, done:begin] = at + torch.arange(begin - done)
            at += begin - done
            positions[:, begin:end] = -1 - at
            at += self._span(feature, end - begin)
            done = end
        positions[:, done:] = at + torch.arange(len(input_tokens) - done)
        return positions, at - done

    def _span(self, feature: Any, length: int) -> int:
        """Return the number of positions from an item's start to the text after it, for `length` tokens."""
        data = {name: element.data for name, element in feature.data.items()}
        setting, counts, layout, _ = read_fields(data)
        if setting.positions == "renumbered":
            return length
        family = FAMILIES[self.architecture]
        places = family.places(self.config, feature.modality, data, counts[0])
        return among_words(places, layout[1].bool())[1] if layout.numel() else places.span

    def recompute_mrope_positions(
        self,
        input_ids: Any,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        """Fill the places of the items, or parts of them, that enter now; the embeddings lose their channels."""
        del input_ids
        positions = mrope_positions.clone()
        open_places = (positions[0] < 0).nonzero()[:, 0]
        open_places = open_places[open_places >= num_computed_tokens]
        embeddings, end = [], 0
        # One copy to the host, where vLLM has the positions.
        channels = [part[:, -digits.WIDTH :] for part in multimodal_embeddings]
        numbers = digits.decode(torch.cat(channels).to(positions.device)) if channels else None
        for part in multimodal_embeddings:
            assert numbers is not None
            embeddings.append(part[:, : -digits.WIDTH])
            filled, open_places = open_places[: len(part)], open_places[len(part) :]
            entering, numbers = numbers[: len(part)], numbers[len(part) :]
            start = -1 - positions[0, filled]
            positions[:, filled] = start + entering[:, :3].T
            if len(filled):
                end = max(end, int(start[-1] + entering[-1, 3]))
        end = max(end, int(positions.max()) + 1)
        return embeddings, positions, end - positions.shape[1]


@dataclass(frozen=True, eq=False)
class _Item:
    """One picture or video of a batch: its `number` there, tokens (T, D), and what is done with them.

    Attributes:
        units: its inputs of the projector, among those of the batch.
        site: where its method acts; None: every token stays.
        kept: tokens that stay.
        layout: words between its tokens.
        question: ids of the prompt's words, where the method reads them.
    """

    number: int
    tokens: Tensor
    places: Places
    units: slice
    setting: Setting
    site: Site | None
    kept: int
    layout: Tensor
    question: Tensor

    def is_like(self, item: _Item) -> bool:
        """Return whether the items differ only in their values and in chance."""
        return self._call == item._call and all(map(torch.equal, self._shape, item._shape))

    @property
    def _call(self) -> tuple[Any, ...]:
        setting = self.setting
        return self.kept, setting.reducer, setting.positions, self.question.shape

    @property
    def _shape(self) -> tuple[Tensor, ...]:
        places = self.places
        return places.grid, places.tile, places.prunable, places.positions, self.layout


class _ItemGroup:
    """Items that are alike on their way through their method, which chooses for all of them in one call.

    Args:
        model: that encodes them.
        signals: of the tower, over the batch.
    """

    def __init__(self, model: Any, signals: TowerSignals | None) -> None:
        self._model, self._signals = model, signals
        self.items: list[_Item] = []

    def takes(self, item: _Item) -> bool:
        """Return whether an item belongs to the group, and the group stays small enough for its memory."""
        pairs = (1 + len(self.items)) * len(item.tokens) ** 2
        return item.site is not None and pairs <= PAIRS and self.items[0].is_like(item)

    def reduced(self) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (B, K, D) that stay, merged if the method merges, and (B, K) their places (None: all)."""
        item, tokens = self.items[0], _stacked([item.tokens for item in self.items])
        site, places, prunable = item.site, item.places, None
        if site is None:
            return tokens, None
        if not places.prunable.all():
            prunable = places.prunable.nonzero()[:, 0].to(tokens.device)
        visual = tokens if prunable is None else tokens[:, prunable]
        # Features for the decoder's first layers follow the embedding.
        main = visual[:, :, : self._model.config.get_text_config().hidden_size]
        features = self._of_units("features") if site.where == "vision" else main
        view = View(
            site=site,
            tokens=features,
            grid=places.grid.to(tokens.device).expand(len(tokens), -1, -1),
            signals={
                need.key: self._signal(need, main) for need in item.setting.reducer.needs(site)
            },
            generators=[item.setting.generator() for item in self.items],
        )
        plan = item.setting.reducer.answer(view, item.kept)
        values = visual.take_along_dim(plan.kept.unsqueeze(2), dim=1)
        if plan.merge is not None:
            merged = plan.merge.apply(main if places.blended else features, item.kept)
            if site.where == "vision" and not places.blended:
                projected = self._model.tower.project(merged.flatten(0, 1))
                merged = projected.unflatten(0, merged.shape[:2])
            deeper = plan.merge.apply(visual[:, :, main.shape[2] :], item.kept)
            values = torch.cat([merged.to(visual), deeper.to(visual)], dim=2)
        if prunable is None:
            return values, plan.kept
        fixed = (~places.prunable).nonzero()[:, 0].to(tokens.device)
        return _merged(tokens[:, fixed], fixed, values, prunable[plan.kept])

    def _of_units(self, key: str) -> Tensor:
        """Return (B, N, ...) of a value for each unit of the projector."""
        assert self._signals is not None  # the batch watches what its items need
        values = self._signals[key]
        return _stacked([item.places.of_units(values[item.units]) for item in self.items])

    def _signal(self, need: Need, main: Tensor) -> Tensor:
        """Return (B, N, ...) of a signal."""
        if need.signal in OF_TOWER:
            return self._of_units(need.key)
        if need.signal == "tile":
            return self.items[0].places.tile.to(main.device).expand(len(main), -1)
        if need.signal == "text_embeddings":
            ids = torch.cat([item.question for item in self.items]).to(main.device)
            words: Tensor = self._model.word_embeddings(ids).unflatten(0, (len(main), -1))
            return words
        return main


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one, without a copy of a single one."""
    return torch.stack([*tensors]) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _taken(values: Tensor, index: Tensor | None) -> Tensor:
    """Return the values (B, K, ...) at an index (B, K); None: all of them, (1, N, ...)."""
    return values.unsqueeze(0) if index is None else values[index]


def _merged(
    first: Tensor, first_places: Tensor, second: Tensor, second_places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two runs of tokens (B, ., D) as one by their ascending places, (F,) and (B, K), and the places."""
    places = torch.cat([first_places.expand(len(first), -1), second_places], dim=1)
    stay, order = places.sort(dim=1)
    return torch.cat([first, second], dim=1).take_along_dim(order.unsqueeze(2), dim=1), stay


def tower_name(name: str) -> str:
    """Return a tensor's name with the level `vision_model` that transformers 5.20 and later leave out."""
    for prefix in ("model.vision_tower.", "vision_tower."):
        if name.startswith(prefix) and not name.startswith(f"{prefix}vision_model."):
            return f"{prefix}vision_model.{name.removeprefix(prefix)}"
    return name
