"""The model's half of the plug-in: it chooses the tokens of each item, and gives every token its position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
        items = [read_fields({k: v[n] for k, v in fields.items()}) for n in range(number)]
        sites = [self._site(setting, counts) for setting, counts, _, _ in items]
        signals = self._signals([setting for setting, *_ in items], sites)
        with nullcontext() if signals is None else signals.watching():
            encoded = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        modality = "video" if any("video" in name for name in kwargs) else "image"
        results, first, conditions = [], 0, Conditions()
        for n, (setting, counts, layout, question) in enumerate(items):
            tokens = encoded[n].reshape(-1, encoded[n].shape[-1])
            data = {name: kwargs[name][n] for name in SHAPES if name in kwargs}
            places = FAMILIES[self.architecture].places(self.config, modality, data, len(tokens))
            item = _Item(self, places, tokens, setting, signals, first, question)
            # A batch in which every token stays is none for the histogram.
            with nullcontext() if sites[n] is None else self.stopwatch.running():
                with conditions.collecting():
                    embeddings, stay = item.reduced(sites[n], counts[2])
                results.append(self._placed(embeddings, stay, places, layout, setting))
            first += places.units
        self.stopwatch.end_batch()
        # The host waits for the device here alone, once for the batch.
        conditions.settle()
        return tuple(results)

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

    def _placed(
        self, tokens: Tensor, stay: Tensor | None, places: Places, layout: Tensor, setting: Setting
    ) -> Tensor:
        """Return the embeddings of an item, with the words between its tokens and, where needed, positions."""
        positions, span = places.positions, places.span
        if layout.numel():
            ids, embedded = layout[0], layout[1].bool()
            positions, span = among_words(places, embedded)
            words = self._words(ids[~embedded].to(tokens.device), tokens)
            visual = embedded.nonzero()[:, 0].to(tokens.device)
            between = (~embedded).nonzero()[:, 0].to(tokens.device)
            stay, order = torch.cat([between, _taken(visual, stay)]).sort()
            tokens = torch.cat([words, tokens])[order]
        if not self.channelled:
            return tokens
        if setting.positions == "renumbered":
            stay, span = None, len(tokens)
            positions = torch.arange(span).unsqueeze(1).expand(-1, 3)
        # Checked and written on the host for all tokens, so that nothing waits for those that stay.
        table = digits.encode(torch.cat([positions, torch.full((len(positions), 1), span)], dim=1))
        return digits.append(tokens, _taken(table.to(tokens.device), stay))

    def _words(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Return the embeddings of words in the width of an item's tokens."""
        words = self.word_embeddings(ids)
        filled = tokens.new_zeros(len(ids), tokens.shape[1])
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


class _Item:
    """One picture or video on its way through a method."""

    def __init__(
        self,
        model: Any,
        places: Places,
        tokens: Tensor,
        setting: Setting,
        signals: TowerSignals | None,
        first: int,
        question: Tensor,
    ) -> None:
        self._model = model
        self._places = places
        self._tokens = tokens
        self._setting = setting
        self._signals = signals
        self._units = slice(first, first + places.units)
        self._question = question

    def reduced(self, site: Site | None, kept: int) -> tuple[Tensor, Tensor | None]:
        """Return the tokens that stay, merged as the method merges, and (K,) their places; None: all stay."""
        tokens, prunable = self._tokens, None
        if site is None:
            return tokens, None
        if not self._places.prunable.all():
            prunable = self._places.prunable.nonzero()[:, 0].to(tokens.device)
        visual = _taken(tokens, prunable)
        # Features for the decoder's first layers follow the embedding.
        main = visual[:, : self._model.config.get_text_config().hidden_size]
        blended = self._places.blended
        features = self._of_units("features") if site.where == "vision" else main
        view = View(
            site=site,
            tokens=features[None],
            grid=self._places.grid[None].to(tokens.device),
            signals={
                need.key: self._signal(need, main)[None]
                for need in self._setting.reducer.needs(site)
            },
            generators=[self._setting.generator()],
        )
        plan = self._setting.reducer.answer(view, kept)
        index = plan.kept[0]
        values = visual[index]
        if plan.merge is not None:
            onto = main if blended else features
            merged = plan.merge.apply(onto[None], kept)[0]
            if site.where == "vision" and not blended:
                merged = self._model.tower.project(merged)
            deeper = plan.merge.apply(visual[None, :, main.shape[1] :], kept)[0]
            values = torch.cat([merged.to(visual), deeper.to(visual)], dim=1)
        if prunable is None:
            return values, index
        fixed = (~self._places.prunable).nonzero()[:, 0].to(tokens.device)
        stay, order = torch.cat([fixed, prunable[index]]).sort()
        return torch.cat([tokens[fixed], values])[order], stay

    def _of_units(self, key: str) -> Tensor:
        assert self._signals is not None  # the batch watches what its items need
        return self._places.of_units(self._signals[key][self._units])

    def _signal(self, need: Need, main: Tensor) -> Tensor:
        """Return (N, ...) of a signal."""
        if need.signal in OF_TOWER:
            return self._of_units(need.key)
        if need.signal == "tile":
            return self._places.tile.to(main.device)
        if need.signal == "text_embeddings":
            words: Tensor = self._model.word_embeddings(self._question.to(main.device))
            return words
        return main


def _taken(values: Tensor, index: Tensor | None) -> Tensor:
    """Return the values at an index; None: all of them."""
    return values if index is None else values[index]


def tower_name(name: str) -> str:
    """Return a tensor's name with the level `vision_model` that transformers 5.20 and later leave out."""
    for prefix in ("model.vision_tower.", "vision_tower."):
        if name.startswith(prefix) and not name.startswith(f"{prefix}vision_model."):
            return f"{prefix}vision_model.{name.removeprefix(prefix)}"
    return name
