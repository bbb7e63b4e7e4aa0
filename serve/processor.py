"""The processor's half of the plug-in: it shortens the prompt and makes the setting part of every cache's key."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor

from espalier.methods.base import MethodError, View
from espalier.serve.adapter import ProcessorAdapter
from espalier.serve.families import FAMILIES
from espalier.serve.places import Fields, Places
from espalier.serve.setting import KEY, Setting, SettingError, decode

if TYPE_CHECKING:
    from espalier.serve.metrics import RequestCounts

#: Below vLLM's, which VLLM_LOGGING_LEVEL=DEBUG opens.
LOG = getLogger(f"vllm.{KEY}")

#: Fields that travel with each item to the model: the setting, (visual, kept) counts, words among the tokens.
SETTING, COUNTS, LAYOUT, QUESTION = (
    f"{KEY}_{name}" for name in ("setting", "counts", "layout", "question")
)


@dataclass(frozen=True)
class Request:
    """The prompt that the processor is at.

    Attributes:
        setting: of the request, over the engine's.
        prompt: token ids, a placeholder for each item.
        conditioned: whether the choice depends on the words.
        is_dummy: whether it is vLLM's own, by which it sizes its memory.
    """

    setting: Setting
    prompt: tuple[int, ...]
    conditioned: bool
    is_dummy: bool


#: Per prompt, since servers process several at a time.
REQUEST: ContextVar[Request] = ContextVar("request")


def engine_setting(config: Any) -> Setting:
    """Return the setting of `hf_overrides`, which requests start from.

    Raises:
        SettingError: it is wrong.
    """
    return Setting().changed(getattr(config, KEY, None) or {})


class Placeholders(list[int]):
    """The placeholders of an item that stay, and words between them.

    Vision tokens that may go are `visual`, and `kept` of these stay: vLLM's cache holds no fields of an item.
    """

    visual = kept = 0


class PrunedProcessor(ProcessorAdapter):
    """Mixin over a family's processor."""

    #: Counts requests for /metrics; None: nothing does.
    counts: RequestCounts | None = None

    @contextmanager
    def requested(
        self, values: object, prompt: Sequence[int], items: Any, is_dummy: bool
    ) -> Iterator[str]:
        """Process a prompt under a request's values inside the block; yields what the key of each item must hold.

        Args:
            values: of the request, over the engine's setting.
            prompt: token ids.
            items: pictures and videos of the prompt.
            is_dummy: whether it is vLLM's own, by which it sizes its memory.

        Raises:
            SettingError: the setting is wrong, or cannot be served on this engine.
        """
        config = self.info.ctx.model_config  # type: ignore[attr-defined]
        setting = engine_setting(config.hf_config).changed(values)
        check_served(setting, config, items)
        depth = config.hf_config.get_text_config().num_hidden_layers
        conditioned = setting.method != "none" and setting.reads_words(depth)
        parts: list[Any] = [setting.encode()]
        if conditioned:
            # The words inside the replacements of all items are part of the question, so several items are new in
            # every prompt: of one that comes out of a cache no words are known.
            number = sum(items.get_all_counts().values())
            parts += [list(prompt), uuid4().hex if number > 1 else ""]
        token = REQUEST.set(Request(setting, tuple(prompt), conditioned, is_dummy))
        try:
            yield hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        finally:
            REQUEST.reset(token)

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> list[Any]:
        """Shorten each item's replacement to the tokens that stay, and give the model what it needs for that."""
        updates = super()._get_prompt_updates(  # type: ignore[misc]
            mm_items, hf_processor_mm_kwargs, out_mm_kwargs
        )
        request, counts = REQUEST.get(), mm_items.get_all_counts()
        question: list[int] = []
        if request.conditioned and counts:
            replacements = {
                update.modality: [
                    [update.resolve(n)] for n in range(counts.get(update.modality, 0))
                ]
                for update in updates
            }
            question = self._words(request, replacements)
        config = self.info.ctx.model_config  # type: ignore[attr-defined]

        def short(update: Any, number: int) -> Any:
            data, content = out_mm_kwargs[update.modality][number], update.resolve(number).content
            return _replacement(config, update.modality, data, content, request.setting, question)

        return [replace(update, replacement=partial(short, update)) for update in updates]

    def count(self, items: Sequence[Any]) -> None:
        """Count a prompt by the replacements of its items."""
        request = REQUEST.get()
        if request.is_dummy:
            return
        visual, kept = (sum(getattr(ids, name) for ids in items) for name in ("visual", "kept"))
        LOG.debug(
            "%d of %d visual tokens of %d pictures and videos stay: %s",
            *(kept, visual, len(items), request.setting.encode()),
        )
        if self.counts is not None:
            self.counts.add(request.setting.method, visual, kept)

    def _words(self, request: Request, updates: Any) -> list[int]:
        """Return the prompt's tokens that stand for no picture, in order."""
        ids, places_by_modality = self.expanded(list(request.prompt), updates)
        visual: set[int] = set()
        for items in places_by_modality.values():
            for place in items:
                mask = place.is_embed
                span = range(place.start_idx, place.start_idx + place.length)
                visual |= {index for n, index in enumerate(span) if mask is None or bool(mask[n])}
        return [token for index, token in enumerate(ids) if index not in visual]


@dataclass(frozen=True, eq=False)
class Shortened:
    """The replacement of one item with the placeholders that stay.

    Attributes:
        ids: placeholders and the words between them.
        embedded: (L,) True for a placeholder; all of them where words become embeddings.
        fields: what the model needs of the setting, by field name.
    """

    ids: Placeholders
    embedded: Tensor
    fields: Mapping[str, Tensor]


def shortened(
    config: Any,
    modality: str,
    fields: Fields,
    ids: Sequence[int],
    embedded: Tensor,
    setting: Setting,
    question: Sequence[int],
) -> Shortened:
    """Return the replacement of one item with fewer placeholders, and the fields for the model.

    Args:
        config: vLLM's configuration of the model.
        modality: image or video.
        fields: of the item.
        ids: of the whole replacement.
        embedded: (T,) True for its placeholders, False for its words.
        setting: of the request.
        question: ids of the prompt's words, where the method reads them.

    Raises:
        SettingError: the method cannot keep as many, or the item has another number of tokens than its family.
    """
    total = int(embedded.sum())
    item = FAMILIES[config.architecture].places(config.hf_config, modality, fields, total)
    if len(item.prunable) != total:
        raise SettingError(
            f"{config.architecture} has {total} tokens for this {modality}, and this plug-in places "
            f"{len(item.prunable)}; valid: a checkpoint with the usual tower of the class, or no hf_overrides.{KEY}"
        )
    count = int(item.prunable.sum())
    kept = setting.kept(count)
    if kept < count:
        check_plan(setting, item, config.hf_config.get_text_config().num_hidden_layers, kept)
    places = embedded.nonzero()[:, 0]
    among_words = bool((places.diff() > 1).any())
    layout = torch.zeros(2, 0, dtype=torch.long)
    if among_words and (kept < count or config.uses_mrope):
        # How many tokens each frame keeps is not known yet: the words between become embeddings of the item.
        layout = torch.stack([torch.tensor(ids), embedded.long()])
    stays = torch.ones(len(ids), dtype=torch.bool)
    stays[places[total - (count - kept) :]] = False
    mask = embedded[stays]
    remaining = Placeholders(itertools.compress(ids, stays.tolist()))
    remaining.visual, remaining.kept = count, kept
    return Shortened(
        ids=remaining,
        embedded=torch.ones_like(mask) if layout.numel() else mask,
        fields={
            SETTING: torch.tensor(list(setting.encode().encode()), dtype=torch.uint8),
            COUNTS: torch.tensor([total, count, kept]),
            LAYOUT: layout,
            QUESTION: torch.tensor(question, dtype=torch.long),
        },
    )


def _replacement(
    config: Any,
    modality: str,
    data: Any,
    content: Any,
    setting: Setting,
    question: Sequence[int],
) -> Any:
    """Return vLLM's form of a shortened replacement, and add its fields to the item's `data`."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
    from vllm.multimodal.processing import PromptUpdateDetails

    ids = list(content.full)
    every = torch.ones(len(ids), dtype=torch.bool)
    embedded = every if content.is_embed is None else content.is_embed(ids)
    fields: Fields = {name: element.data for name, element in data.items()}
    short = shortened(config, modality, fields, ids, embedded, setting, question)
    batched = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
    values = {name: [value] for name, value in short.fields.items()}
    data.update(
        MultiModalKwargsItems.from_hf_inputs(values, dict.fromkeys(values, batched))[modality][0]
    )
    if bool(short.embedded.all()):
        return PromptUpdateDetails.from_seq(short.ids)
    return PromptUpdateDetails(full=short.ids, is_embed=lambda full: short.embedded)


def check_served(setting: Setting, config: Any, items: Any) -> None:
    """Check that an engine can serve a setting.

    Args:
        setting: of a request.
        config: vLLM's configuration of the model.
        items: pictures and videos of the prompt; None: of no prompt.

    Raises:
        SettingError: it cannot; one line with the key and what is valid.
    """
    family, hf_config = FAMILIES[config.architecture], config.hf_config
    text, vision = hf_config.get_text_config(), hf_config.vision_config
    needs = setting.needs(text.num_hidden_layers)
    if setting.positions == "renumbered" and family.axes > 1:
        raise SettingError(
            "espalier.positions='renumbered' needs positions on one axis, this model has "
            f"{family.axes}; valid: original"
        )
    if setting.positions == "original" and not config.uses_mrope and setting.method != "none":
        raise SettingError(
            "espalier.positions='original' is not possible where the engine's default is renumbered; "
            "valid: renumbered"
        )
    if items is not None and setting.reducer.needs_frames() and "image" in items:
        raise SettingError(f"espalier.method={setting.method!r} compares frames; valid: videos")
    depth = getattr(vision, "num_hidden_layers", None) or vision.depth
    built = built_layers(hf_config, depth)
    full_layers = getattr(vision, "fullatt_block_indexes", None)
    for need in needs:
        if (
            full_layers is not None
            and need.layer is not None
            and need.layer % depth not in full_layers
        ):
            raise SettingError(
                f"espalier.method={setting.method!r} reads layer {need.layer % depth} of the tower, which attends in "
                f"windows; valid: a method that reads {', '.join(map(str, full_layers))}"
            )
        if need.layer is not None and need.layer % depth >= built:
            raise SettingError(
                f"espalier.method={setting.method!r} reads layer {need.layer % depth} of the tower, "
                f"and vLLM builds the {built} of {depth} that the projector needs; valid: a method "
                "that reads one of them"
            )


def check_plan(setting: Setting, item: Places, depth: int, kept: int) -> None:
    """Check that a method of crops or frames can keep as many of an item's: an error later ends the engine.

    Raises:
        SettingError: it does not, with its reason.

    Cost: one plan on values that are all 0, for these methods alone.
    """
    (site,) = setting.sites(depth)
    needs = setting.reducer.needs(site)
    reads_crops = any(need.signal == "tile" for need in needs)
    if not reads_crops and not setting.reducer.needs_frames():
        return
    nothing = torch.zeros(1, len(item.grid))
    signals = {need.key: item.tile[None] if need.signal == "tile" else nothing for need in needs}
    view = View(site, nothing.unsqueeze(-1), item.grid[None], signals, [setting.generator()])
    try:
        setting.reducer.answer(view, kept)
    except MethodError as error:
        raise SettingError(f"espalier.method={setting.method!r}: {error}") from error


def built_layers(config: Any, depth: int) -> int:
    """Return how many layers of the tower vLLM builds."""
    layer = getattr(config, "vision_feature_layer", -1)
    return int(layer + depth + 1 if layer < 0 else layer)


def read_fields(data: Fields) -> tuple[Setting, tuple[int, int, int], Tensor, Tensor]:
    """Return an item's setting, its counts (all, those that may go, those that stay), layout and question."""
    setting = decode(bytes(torch.as_tensor(data[SETTING]).tolist()).decode())
    total, count, kept = (int(number) for number in data[COUNTS])
    return setting, (total, count, kept), data[LAYOUT], data[QUESTION]
