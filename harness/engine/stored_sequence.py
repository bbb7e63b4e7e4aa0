"""A sequence that has run, with its keys and values: in later steps some places of the answer run against them.

What is stored of the other tokens is of an earlier step, when other places were masked: these steps are approximate.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor
from transformers.cache_utils import Cache

from espalier.harness.engine.layout import Layout, Stage
from espalier.harness.engine.partial_layers import LayerChanges, PartialLayer
from espalier.harness.engine.prefix_cache import CachedPrompt, run_answer
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.session_setup import SessionSetup
from espalier.harness.engine.text.kv_cache import IndexedCache, IndexedLayer, MergedLayer


@dataclass(frozen=True, eq=False)
class StoredSequence:
    """A batch of prompts and answers.

    Attributes:
        cache: keys and values; those of the answer, of G places, are the last of every layer.
        layout: of the prompts.
        stages: tokens alive in the cache's layers, first to last, the answer's included.
        states: (B, G, D) last states that predict the answer's places (`DenoisingSession._whole`), each of the last
            step in which its position ran.
        length: G.
        records: of each row, for the run of the whole sequence.
        window: places that run in later steps.
        changes: what layers added to the answer's states, if steps run a part of the window.
    """

    cache: IndexedCache
    layout: Layout
    stages: tuple[Stage, ...]
    states: Tensor
    length: int
    records: tuple[SampleRecord, ...]
    window: range
    changes: LayerChanges = field(default_factory=LayerChanges)


def run_window(
    setup: SessionSetup, stored: StoredSequence, embeddings: Tensor, part: int = 0
) -> None:
    """Run the window's places (B, W, D), and write their keys, values and states over those stored.

    With `part`, so many of the places run in each layer but the first, if the window is the whole answer.

    Cost: a layer's linear maps on W tokens, attention of W queries to all entries.
    """
    window, changes = stored.window, stored.changes
    # The answer's places are alive everywhere, so it does not matter which of their slots the mask is of.
    stages = tuple(
        replace(stage, valid=stage.valid[:, : -len(window)], rotary=None, mask=None)
        for stage in stored.stages
    )
    layout = stored.layout.extended_by(window.start)
    before = CachedPrompt(stored.cache, layout, stages, stored.records, stored.states[:, :1])
    first = window.start - stored.length
    layers = [MergedLayer(partial(_written, layer, first)) for layer in stored.cache.indexed]
    parts: list[PartialLayer] = []
    if part:
        pairs = zip(stored.cache.indexed[1:], changes.of_layer[1:], strict=True)
        parts = [PartialLayer(layer, change, part) for layer, change in pairs]
        layers[1:] = [MergedLayer(layer_part.written) for layer_part in parts]
    recorded = changes.recorded(setup.adapter.decoder.layers, len(window))
    with recorded if changes.of_layer and not part else nullcontext():
        states = run_answer(setup, before, stages, Cache(layers=[*layers]), embeddings, parts)
    lead = stored.states.shape[1] - stored.length
    stored.states[:, lead + window.start : lead + window.stop] = states


def _written(
    layer: IndexedLayer, first: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values over a layer's, from the place `first` before its end; return those of all tokens."""
    stored_keys, stored_values = layer.entries
    start = stored_keys.shape[2] + first
    stored_keys[:, :, start : start + keys.shape[2]] = keys
    stored_values[:, :, start : start + keys.shape[2]] = values
    return stored_keys, stored_values
