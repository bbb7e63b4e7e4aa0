"""Answers on canvases: the class's own loop, hooked where steps read a cache from which visual tokens were dropped.

A step attends to what the cache holds, in a sliding layer to the last positions of a window, and to the whole canvas.
The library measures windows in cache entries; here they are measured in positions, so that dropping equals hiding, as
in harness/engine/layer_inputs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from espalier.harness.engine.decode_steps import DecodeSteps
from espalier.harness.engine.kv_cache import entries_of
from espalier.harness.engine.model_parts import ModelParts, hooked
from espalier.harness.engine.record import SampleRecord
from espalier.harness.specs.generation import CanvasSettings


class FiniteScores(LogitsProcessor):
    """Makes logits finite: sampling from NaN aborts the process on a GPU, before the engine can name the sample."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits (B, G, V) of a canvas, changed in place."""
        return scores.nan_to_num_()


class CanvasHooks:
    """Hooks on a model with a canvas: correct the masks after dropping, count steps and attended pairs.

    Args:
        adapter: a model with a canvas.
        steps: returns the decoding steps that follow the prompt; called only after the prompt has run.
    """

    def __init__(self, adapter: ModelParts, steps: Callable[[], DecodeSteps]) -> None:
        assert adapter.canvas_facts is not None  # every model with a canvas has its sizes
        self._adapter = adapter
        self._canvas = adapter.canvas
        self._steps = steps
        #: By the number of tokens before a canvas: for each step, booleans (B,) of the rows that it still changes.
        self._unfinished: dict[int, list[Tensor]] = {}
        self._length = adapter.canvas_facts.length
        self._limit = 0
        self._is_first_step = False
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        #: For each canvas and layer, (B,) the cache entries and canvas places that each place of a row sees.
        self._visible: list[list[Tensor]] = []
        #: For each canvas but the last and each layer, (B,) the pairs that attend as the canvas enters the cache.
        self._read_pairs: list[list[Tensor]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook both stacks and the class's step inside the block; afterwards the model is as before."""
        model = self._adapter.model
        handles = [
            self._canvas.register_forward_pre_hook(self._before_step, with_kwargs=True),
            *(
                layer.register_forward_pre_hook(partial(self._before_layer, n), with_kwargs=True)
                for n, layer in enumerate(self._canvas.layers)
            ),
            *(
                layer.register_forward_hook(self._after_reading, with_kwargs=True)
                for layer in self._adapter.decoder.layers
            ),
        ]
        model.__dict__["_denoising_step"] = partial(self._step, model._denoising_step)
        with hooked(handles):
            try:
                yield
            finally:
                del model.__dict__["_denoising_step"]

    def _step(self, original: Callable[..., Any], **arguments: Any) -> Any:
        start = arguments["input_ids"].shape[1]
        self._unfinished.setdefault(start, []).append(~arguments["finished_denoising"])
        return original(**arguments)

    def _before_step(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._is_first_step = kwargs["self_conditioning_logits"] is None
        if self._is_first_step:
            self._masks.clear()
            self._visible.append([])

    def _before_layer(
        self, number: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> Any:
        steps, hidden, cache = self._steps(), args[0], kwargs["past_key_values"]
        corrected = None
        if steps.masked:
            key = (*steps.mask_key(number), hidden.device)
            if key not in self._masks:
                self._masks[key] = steps.canvas_mask(number, hidden, kwargs["position_ids"], cache)
            corrected = args, {**kwargs, "attention_mask": self._masks[key]}
        if self._is_first_step:
            mask = kwargs["attention_mask"] if corrected is None else corrected[1]["attention_mask"]
            self._visible[-1].append(_visible_count(mask, cache.layers[number], hidden))
        return corrected

    def _after_reading(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        if not self._visible:
            return  # the layers read the prompt, before any canvas
        if len(self._read_pairs) < len(self._visible):
            self._read_pairs.append([])
        self._read_pairs[-1].append(_attending(kwargs["attention_mask"][:, 0]).sum((1, 2)))

    def answers(
        self, inputs: Mapping[str, Any], generation: Mapping[str, Any], cache: Any
    ) -> Tensor:
        """Generate the answers of a batch by the class's loop; return the new tokens (B, T).

        Raises:
            UserError: a setting that answers on canvases do not have.
        """
        settings = CanvasSettings.of(generation, self._length)
        self._limit = settings.steps
        output = self._adapter.generate(
            **inputs,
            past_key_values=cache,
            generation_config=self._adapter.canvas_config(settings),
            logits_processor=LogitsProcessorList([FiniteScores()]),
        )
        return cast("Tensor", output.sequences[:, inputs["input_ids"].shape[1] :])

    def completed(self, records: Sequence[SampleRecord]) -> tuple[SampleRecord, ...]:
        """Return the records with steps and attended pairs of each canvas, up to the one that ends the answer."""
        counts = [torch.stack(canvas).sum(0).tolist() for canvas in self._unfinished.values()]
        visible, pairs = _on_host(self._visible), _on_host(self._read_pairs)
        types, completed = self._adapter.layer_types, []
        windows = [None] * len(self._canvas.layers) if types is None else types.windows
        for row, record in enumerate(records):
            canvases = range(-(-record.new_tokens // self._length))
            # Before each canvas and in each layer, if nothing of the prompt is dropped.
            lengths = [record.visual + record.text + n * self._length for n in canvases]
            entries = [
                [count if window is None else min(count, window - 1) for window in windows]
                for count in lengths
            ]
            entry = {
                "limit": self._limit,
                "steps": [counts[n][row] for n in canvases],
                "visible": [[layer[row] for layer in visible[n]] for n in canvases],
                "pairs": [[layer[row] for layer in pairs[n]] for n in canvases[:-1]],
                "full_visible": [[count + self._length for count in canvas] for canvas in entries],
                "full_pairs": [
                    [self._pairs(*layer) for layer in zip(canvas, windows, strict=True)]
                    for canvas in entries[:-1]
                ],
            }
            completed.append(replace(record, canvases=entry))
        return tuple(completed)

    def _pairs(self, entries: int, window: int | None) -> int:
        """Return the pairs that attend in a layer as a canvas is read after `entries` cache entries."""
        places = range(entries + 1, entries + 1 + self._length)
        return sum(places) if window is None else sum(min(place, window) for place in places)


def _on_host(counts: Sequence[Sequence[Tensor]]) -> list[list[list[int]]]:
    return [[layer.tolist() for layer in canvas] for canvas in counts]


def _attending(mask: Tensor) -> Tensor:
    """Return booleans of the mask's shape: pairs that attend, from a boolean mask or one added to the logits."""
    return mask if mask.dtype == torch.bool else mask == 0


def _visible_count(mask: Tensor | None, layer: Any, hidden: Tensor) -> Tensor:
    """Return (B,): cache entries and canvas places that each place of `hidden` (B, G, D) sees in a layer."""
    if mask is None:
        return torch.full(hidden.shape[:1], entries_of(layer) + hidden.shape[1])
    return _attending(mask[:, 0, 0]).sum(-1)
