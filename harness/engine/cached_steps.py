"""An answer's places run against stored keys and values: of its prompt, or of a whole sequence of an earlier step.

`CachedPrompt`: a prompt that sees only itself is run once. The mask is that of Prefix-DLM (LaViDa, arXiv 2505.16839):
positions of the answer see the prompt and one another, tokens of the prompt see only the prompt, so that its keys and
values do not change from step to step.

`StoredSequence`: prompt and answer have run together, and in later steps some places of the answer run against what is
stored of all others. That is of an earlier step, when other places were masked: these steps are approximate.

`PartialLayer`: in such a step a layer may run only the places with the most changed values (dLLM-Cache, arXiv
2506.06295). Of every place, its values are computed and stored. Those of the lowest cosine with the values stored
before run: their keys are stored, and what the layer adds to their states. To the states of the others it adds what it
added when they last ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers.cache_utils import Cache

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.forward_pass import ActivePass, Pass
from espalier.harness.engine.kv_cache import IndexedCache, IndexedLayer, MergedLayer
from espalier.harness.engine.layer_inputs import closed_positions, reference_mask, rotary_tables
from espalier.harness.engine.layout import Layout, Stage, take
from espalier.harness.engine.model_parts import hooked
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.session_setup import SessionSetup
from espalier.methods.denoiser import as_denoiser
from espalier.methods.none import NoReduction
from espalier.methods.select.entries import KeptEntries, PromptEntries

#: Mask and rotary tables of the layers from a stage's first on, on each device.
LayerArguments = dict[tuple[int, torch.device], dict[str, Any]]


@dataclass(eq=False)
class StepEntries:
    """Keys and values that the answer attends to in a layer with merged entries; steps write over those before.

    Attributes:
        keys, values: (B, H_kv, W, D), each row's entries first, then the answer's; what lies between is finite.
        fixed: rows that start with the entries of their other tokens, which are the same in each step.
    """

    keys: Tensor
    values: Tensor
    fixed: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class EntryChoice:
    """A choice of the visual tokens of a cached prompt that stay, shared by the steps that keep it.

    Attributes:
        keep: their number in each row.
        stages: tokens alive up to the deciders' layer and after it.
        kept: (K,) indices of those that stay of each row, once the deciders' layer has run.
        arguments: of `run_answer`.
    """

    keep: tuple[int, ...]
    stages: tuple[Stage, ...]
    kept: list[Tensor] = field(default_factory=list)
    arguments: LayerArguments = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PlacedEntries:
    """The kept entries of a row, and the rotary tables of their positions.

    Attributes:
        choice: the entries.
        tables: (S, d) cosines and sines of every entry.
        renumber: whether positions of those that stay count from the first, without gaps.
    """

    choice: KeptEntries
    tables: tuple[Tensor, Tensor]
    renumber: bool

    @cached_property
    def non_visual(self) -> tuple[Tensor, Tensor]:
        """Tables of the tokens that are not visual."""
        return self._at(self.choice.non_visual)

    @cached_property
    def staying(self) -> tuple[Tensor, Tensor]:
        """Tables of all entries that stay."""
        return self._at(self.choice.staying)

    @cached_property
    def visual(self) -> tuple[Tensor, Tensor]:
        """Tables of the visual tokens that stay."""
        return self._at(self.choice.visual[self.choice.kept])

    def _at(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables of some of the entries that stay."""
        places = torch.searchsorted(self.choice.staying, entries) if self.renumber else entries
        cos, sin = self.tables
        return cos.index_select(0, places), sin.index_select(0, places)


@dataclass(eq=False)
class CachedPrompt:
    """A batch of prompts that has been run, and what its steps share.

    Attributes:
        cache: keys and values, with room for the answer's positions; it holds none of these between two steps.
        layout: of the prompts.
        stages: tokens alive in the cache's layers, first to last.
        records: of each row, for the run of its prompt.
        last: (B, 1, D) last states of the prompts' last tokens.
        prepared: entries of a layer and row that merge, made by the first step that merges them.
        merged: of each layer, the entries of the last step that merged them.
        choice: the last choice of entries.
        arguments: of `run_answer`, for steps that merge nothing.
    """

    cache: IndexedCache
    layout: Layout
    stages: tuple[Stage, ...]
    records: tuple[SampleRecord, ...]
    last: Tensor
    prepared: dict[tuple[int, int], PromptEntries] = field(default_factory=dict, repr=False)
    merged: dict[int, StepEntries] = field(default_factory=dict, repr=False)
    choice: EntryChoice | None = field(default=None, repr=False)
    arguments: LayerArguments = field(default_factory=dict, repr=False)
    _tables: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)

    def rotary(self, setup: SessionSetup, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the tables (B, S, D) of the prompt's positions, as the model applied them to its keys."""
        if keys.device not in self._tables:
            positions = closed_positions(self.stages[0].valid.to(keys.device))
            tables = rotary_tables(setup.adapter.decoder.rotary_emb, keys, positions)
            self._tables[keys.device] = tuple(table.to(dtype) for table in tables)
        return self._tables[keys.device]

    def step_records(self) -> tuple[SampleRecord, ...]:
        """Return each row's record of a step without a choice."""
        return tuple(replace(record, times_ms={"select": 0.0}) for record in self.records)


def run_stack(
    setup: SessionSetup,
    active: ActivePass,
    prompt: Prompt,
    samples: Sequence[str],
    cache: IndexedCache | None,
    step: int = 0,
    watched: bool = True,
) -> tuple[Tensor, tuple[SampleRecord, ...], tuple[Stage, ...]]:
    """Run the embeddings (B, L, D) of a prompt through the decoder stack; return states, records and stages.

    A denoising stack takes no other argument of the family.

    Args:
        setup: method, model and settings.
        active: shows the pass to the session's watchers.
        prompt: the whole sequence.
        samples: one id for each row.
        cache: filled, if there is one.
        step: number of the denoising step.
        watched: whether the watchers act.
    """
    layout, embeddings = prompt.layout, prompt.arguments["inputs_embeds"]
    prompt = replace(prompt, arguments={"inputs_embeds": embeddings})
    setup.signals.begin(prompt.inputs, prompt.signals)
    valid = layout.valid.to(embeddings.device)
    # The library reads a mask to see that it hides nothing.
    lengths = [n + text for n, text in zip(layout.counts, layout.text, strict=True)]
    is_padded = min(lengths) < valid.shape[1]
    with (
        Pass(setup, layout, tuple(samples), prompt, step) as current_pass,
        active.running(current_pass.clock, current_pass if watched else None),
    ):
        states: Tensor = setup.adapter.decoder(
            inputs_embeds=embeddings,
            attention_mask=valid.long() if is_padded else None,
            position_ids=closed_positions(valid),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return states, current_pass.step_records(), tuple(current_pass.prefill.stages)


@torch.inference_mode()
def cache_prompt(
    setup: SessionSetup,
    active: ActivePass,
    prompt: Prompt,
    samples: Sequence[str],
    answer_length: int,
) -> CachedPrompt:
    """Run prompts into a cache with room for `answer_length` more tokens. A method for one prefill acts here, once.

    A method for denoising steps does not act yet: it needs the deciders, which do not exist before the first step.
    """
    acts_in_steps = as_denoiser(setup.method) is not None
    if acts_in_steps:
        setup = replace(setup, method=NoReduction(), sites=(), budget=Budget("kept", 0.0))
    cache = IndexedCache(len(setup.adapter.decoder.layers), answer_length)
    states, records, stages = run_stack(
        setup, active, prompt, samples, cache, watched=not acts_in_steps
    )
    return CachedPrompt(cache, prompt.layout, stages, records, states[:, -1:].clone())


def run_answer(
    setup: SessionSetup,
    cached_prompt: CachedPrompt,
    stages: Sequence[Stage],
    cache: Cache,
    arguments: LayerArguments,
    embeddings: Tensor,
    parts: Sequence[PartialLayer] = (),
) -> Tensor:
    """Run the answer's positions (B, G, D) against the prompt and one another; return their last states.

    Args:
        setup: of the session.
        cached_prompt: the prompt.
        stages: tokens of the prompt alive in the layers of `cache`, first to last.
        cache: keys and values of the prompt; those of the positions are appended.
        arguments: of earlier steps with these stages; those that miss are added.
        embeddings: of the tokens at the positions.
        parts: of the last layers, those that run a part of the positions.

    Cost: a layer's linear maps on G tokens, attention of G queries to the remaining entries and themselves.
    """
    layout, decoder = cached_prompt.layout, setup.adapter.decoder

    def enter(number: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: Any) -> Any:
        stage = next(stage for stage in reversed(stages) if stage.first <= number)
        key = (stage.first, args[0].device)
        if key not in arguments:
            arguments[key] = _answer_arguments(setup, layout, stage.move(args[0].device), args[0])
        return args, {**kwargs, **arguments[key]}

    handles = [
        layer.register_forward_pre_hook(partial(enter, number), with_kwargs=True)
        for number, layer in enumerate(decoder.layers)
    ]
    # The parts take what the hooks make for all positions.
    for layer, part in zip(decoder.layers[len(decoder.layers) - len(parts) :], parts, strict=True):
        handles += (
            layer.register_forward_pre_hook(part.enter, with_kwargs=True),
            layer.register_forward_hook(part.leave),
        )
    with hooked(handles):
        states: Tensor = decoder(
            inputs_embeds=embeddings,
            position_ids=_answer_positions(setup, layout, stages[0], embeddings),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    return states


def _answer_arguments(
    setup: SessionSetup, layout: Layout, stage: Stage, hidden: Tensor
) -> dict[str, Any]:
    """Return mask and rotary tables of a stage's layers: the library's masks support caches of one length only."""
    decoder, mask = setup.adapter.decoder, None
    if stage.padded or setup.emulate:
        mask = torch.cat([stage.valid, stage.valid.new_ones(hidden.shape[:2])], 1)
        if setup.emulate or not decoder.config._attn_implementation.startswith("flash"):
            mask = reference_mask(decoder.config, hidden, mask, stage.valid.shape[1])
    positions = _answer_positions(setup, layout, stage, hidden)
    tables = rotary_tables(decoder.rotary_emb, hidden, positions)
    return {"attention_mask": mask, "position_embeddings": tables}


def _answer_positions(setup: SessionSetup, layout: Layout, stage: Stage, hidden: Tensor) -> Tensor:
    """Return (B, G) positions after the prompt, or after its remaining tokens if gaps are closed."""
    counts = stage.counts if setup.renumber else layout.counts
    first_position = [text + count for text, count in zip(layout.text, counts, strict=True)]
    count, device = hidden.shape[1], hidden.device
    return torch.stack([torch.arange(n, n + count, device=device) for n in first_position])


@contextmanager
def recorded_changes(
    changes: list[Tensor], layers: Sequence[nn.Module], count: int
) -> Iterator[None]:
    """Record what each layer adds to the last `count` states (B, count, D) while a block runs all of these.

    Args:
        changes: written over, first layer to last.
        layers: of the decoder.
        count: an answer's places.
    """
    changes.clear()

    def record(layer: nn.Module, args: tuple[Tensor, ...], states: Tensor) -> None:
        changes.append(states[:, -count:] - args[0][:, -count:].to(states.device))

    with hooked([layer.register_forward_hook(record) for layer in layers]):
        yield


class PartialLayer:
    """One layer of a step in which a part of an answer's G places runs.

    Args:
        stored: its keys and values, the answer's last; written over.
        changes: (B, G, D) what it added to the answer's states; written over.
        count: places that run.
    """

    def __init__(self, stored: IndexedLayer, changes: Tensor, count: int) -> None:
        self._changes, self._count = changes, count
        self._entries = stored.entries
        self._keys, self._values = (store[:, :, -changes.shape[1] :] for store in stored.entries)
        self._states: Tensor
        #: (B, count) places that run, ascending, once the layer is reached.
        self.places: Tensor

    def enter(self, layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """Choose among the states (B, G, D) that enter the layer; return its arguments for those that run."""
        # The library moves a layer's arguments to its card after this hook.
        self._states = args[0].to(self._values.device)
        values: Tensor = layer.self_attn.v_proj(layer.input_layernorm(self._states))
        former, dtype = (
            self._values.transpose(1, 2).flatten(2),
            torch.promote_types(values.dtype, torch.float32),
        )
        likeness = cosine_similarity(values.to(dtype), former.to(dtype), dim=-1)
        order = likeness.argsort(dim=1, stable=True)
        self.places = order[:, : self._count].sort(dim=1).values
        self._values.copy_(values.unflatten(2, (self._values.shape[1], -1)).transpose(1, 2))
        device = self.places.device
        tables = tuple(
            take(table.to(device), self.places, -2) for table in kwargs["position_embeddings"]
        )
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:  # every place sees the same
            mask = mask[:, :, : self._count]
        changed = {"position_embeddings": tables, "attention_mask": mask, "position_ids": None}
        return (take(self._states, self.places, -2), *args[1:]), {**kwargs, **changed}

    def written(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, H_kv, count, Dh) of the places that run; return those of all tokens."""
        index = self.places[:, None, :, None]
        for store, states in ((self._keys, keys), (self._values, values)):
            store.scatter_(2, index.expand_as(states), states)
        return self._entries

    def leave(self, layer: nn.Module, args: tuple[Tensor, ...], states: Tensor) -> Tensor:
        """Return the states (B, G, D) of all places, from those (B, count, D) of the places that ran."""
        index = self.places.unsqueeze(-1).expand_as(states)
        self._changes.scatter_(1, index, states - args[0])
        return (self._states + self._changes).scatter(1, index, states)


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
        changes: (B, G, D) what each layer added to the answer's states, first to last, if steps run a part of the
            window; else empty.
    """

    cache: IndexedCache
    layout: Layout
    stages: tuple[Stage, ...]
    states: Tensor
    length: int
    records: tuple[SampleRecord, ...]
    window: range
    changes: list[Tensor] = field(default_factory=list)


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
        pairs = zip(stored.cache.indexed[1:], changes[1:], strict=True)
        parts = [PartialLayer(layer, change, part) for layer, change in pairs]
        layers[1:] = [MergedLayer(layer_part.written) for layer_part in parts]
    recorded = recorded_changes(changes, setup.adapter.decoder.layers, len(window))
    with recorded if changes and not part else nullcontext():
        cache = Cache(layers=[*layers])
        states = run_answer(setup, before, stages, cache, before.arguments, embeddings, parts)
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
