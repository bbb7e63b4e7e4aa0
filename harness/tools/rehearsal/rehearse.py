"""A rehearsal: the engine answers one prompt of a run on simulated cards, at the model's real sizes.

`rehearse("model=llava_ov_72b", "method=parallelvlm", "ratio=0.9", cards="4x80")` takes the words of a command line.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from warnings import catch_warnings

import numpy as np
import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers.integrations.accelerate import _get_device_map

from espalier.harness.api.open_method import CheckedMethod, open_responder
from espalier.harness.api.questions import question_chat, video
from espalier.harness.config.build_spec import specs_of
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.decoding.speculative.decoding_record import ForwardTimes
from espalier.harness.decoding.speculative.forward_times import MEASUREMENTS
from espalier.harness.decoding.speculative.speculation import Speculation
from espalier.harness.engine.priors import Prior, prior_layers
from espalier.harness.engine.record import SampleRecord
from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import positions_of
from espalier.harness.kinds.kind import OpenMethod
from espalier.harness.kinds.lookup import kind_of, method_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import build_skeleton, read_parts, weight_bytes
from espalier.harness.models.chat_media import Chat
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.loader import quiet_library
from espalier.harness.models.memory_check import check_memory, free_bytes, weight_limits
from espalier.harness.runs.cluster.resources import GpuKind, gpu_kinds
from espalier.harness.specs.generation import settings
from espalier.harness.specs.hub_cache import file_of_hub
from espalier.harness.specs.run_spec import ModelSpec, RunSpec
from espalier.harness.tools.rehearsal.real_sizes import RealSizes
from espalier.harness.tools.rehearsal.simulated_cards import TAKEN
from espalier.methods.base import Method

GIB = 2**30

#: (height, width) of the prompt's picture, or of a video's frames.
PICTURE, FRAME = (768, 1024), (384, 384)
QUESTION = "what is in the picture ?"

#: Numbers of cards: torch has places for eight that are not there.
COUNTS = tuple(map(str, range(1, 9)))

#: Tokens of the answer: one check of its end, and the steps between.
NEW_TOKENS = 9


@dataclass(frozen=True)
class Counts:
    """Work since the cards were there; the names are those of `RealSizes`."""

    kernels: float
    reads: float
    uploads: float
    moves: float
    waits: float
    flops: float
    traffic: float
    seconds: float

    @classmethod
    def of(cls, cards: RealSizes) -> Counts:
        """Return the present counts."""
        return cls(**{name: getattr(cards, name) for name in cls.__dataclass_fields__})

    def since(self, earlier: Counts, times: int = 1) -> Counts:
        """Return the mean work of each of `times` steps since an earlier moment."""
        pairs = zip(vars(self).values(), vars(earlier).values(), strict=True)
        return Counts(*((now - before) / max(times, 1) for now, before in pairs))


@dataclass(frozen=True)
class Moment:
    """The moment at which a part of an answer begins or ends: work so far, bytes alive, and their peaks before it."""

    name: str
    counts: Counts
    bytes_held: Mapping[int, int]
    peak: Mapping[int, int]


@dataclass(frozen=True)
class CardUse:
    """Bytes of one card.

    Attributes:
        weights: of all models on it.
        bytes_held: alive besides between the prompt and the next step: the cache, and what the loop keeps.
        tower: the peak while the tower runs, weights included.
        peak: the peak of all.
    """

    weights: int
    bytes_held: int
    tower: int
    peak: int


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal saw.

    Attributes:
        spec: the run.
        kind: the cards.
        cards: the use of each.
        record: of the answer: tokens of the prompt, visual tokens, and how many were kept.
        prompt: work until the decoder runs a second time: tower, prefill, first token.
        step: work of each later forward of the decoder: a token, a window of a draft, a denoising step.
        batch: the most rows that fit; None where a decoder answers one at a time.
        video_frames: frames of the prompt's video; None: it holds a picture.
        frames: the most that fit, and that the model has positions for.
    """

    spec: RunSpec
    kind: GpuKind
    cards: tuple[CardUse, ...]
    record: SampleRecord
    prompt: Counts
    step: Counts
    batch: int | None
    video_frames: int | None
    frames: int | None

    @property
    def room(self) -> int:
        """Bytes of a card that the run may take."""
        return self.kind.memory - TAKEN

    @property
    def fits(self) -> bool:
        """Whether every card holds its peak, also with the rows of `engine.batch_size`."""
        size = self.spec.engine.batch_size
        rows = 1 if size == "auto" or self.batch is None else size
        batch_fits = self.batch is None or rows <= self.batch
        return batch_fits and all(card.peak <= self.room for card in self.cards)


def rehearse(*overrides: str, cards: str, rows: int = 1) -> Rehearsal:
    """Rehearse the run of a command line.

    Args:
        overrides: words of a command line, such as `model=llava_ov_7b`.
        cards: their number and GiB, `4x80`, or their kind in conf/gpus.yaml, `4xH100`.
        rows: prompts that are answered together; of a decoder 1.

    Raises:
        UserError: a mistake in the command line, or weights that do not fit on the cards; one line.

    Cost: seconds for a model of 7B, a minute for 72B; 1 GiB of memory.
    """
    count, kind = read_cards(cards)
    with RealSizes(count, kind) as simulated:
        (spec,) = specs_of(*overrides, typed=True)
        return rehearse_run(spec, simulated, rows)


def read_cards(text: str) -> tuple[int, GpuKind]:
    """Return the number of cards and their kind.

    A size in GiB has the peaks of the first kind of that size, or of the first kind.

    Raises:
        UserError: another form, or an unknown kind.
    """
    number, _, name = text.partition("x")
    kinds = gpu_kinds()
    if number in COUNTS and name in kinds:
        return int(number), kinds[name]
    if number in COUNTS and name.isdecimal() and int(name):
        memory = int(name) * GIB
        of_size = [kind for kind in kinds.values() if kind.memory == memory]
        return int(number), replace((of_size or [*kinds.values()])[0], memory=memory)
    raise UserError(
        f"cards={text!r}; valid: <1 to 8>x<GiB of each>, as 4x80, or <1 to 8>x<one of {', '.join(kinds)}>"
    )


def rehearse_run(spec: RunSpec, cards: RealSizes, rows: int = 1) -> Rehearsal:
    """Rehearse a run that was composed inside the block of the cards."""
    method = method_of(spec.method)
    spec = kind_of(method, spec).normalise(_unloaded(spec), method)
    adapter = open_model(spec.model, cards)
    draft = None if spec.method.draft is None else open_model(spec.method.draft, cards)
    weights = dict(cards.held)
    checked = CheckedMethod(spec, method, _even_prior(method, spec.model))
    with open_responder(checked, adapter, draft) as opened:
        if isinstance(opened.generator, Speculation) and draft is not None:
            # Measured times would choose the window; here the bytes that a forward reads stand for them.
            sizes = (weight_bytes(model.model) for model in (adapter, draft))
            opened.generator.window.timings = [ForwardTimes(*sizes)] * MEASUREMENTS
        frames = spec.model.video.frames if spec.benchmark.dataset.video else None

        def peaks(rows: int, frames: int | None) -> list[int]:
            _, moments = answer(spec, opened, cards, rows, frames, 1)
            return [max(moment.peak[card] for moment in moments) for card in range(cards.count)]

        record, moments = answer(spec, opened, cards, rows, frames, NEW_TOKENS)
        room, batch, longest = cards.memory - TAKEN, None, None
        if not method.drafts:
            batch = largest(1, 2, room, lambda rows: peaks(rows, frames))
        if frames is not None:
            longest = largest(max(frames // 2, 1), max(frames, 2), room, partial(peaks, 1))
            positions = positions_of(spec.model) or sys.maxsize
            longest = min(longest, (positions - record.text) * frames // record.visual)
    forwards = [moment for moment in moments if moment.name == "decoder"]
    prompt_end, end = [*forwards, moments[-1]][1], moments[-1]
    uses = (
        CardUse(
            weights.get(card, 0),
            prompt_end.bytes_held[card] - weights.get(card, 0),
            max((moment.peak[card] for moment in moments if moment.name == "tower"), default=0),
            max(moment.peak[card] for moment in moments),
        )
        for card in range(cards.count)
    )
    prompt = prompt_end.counts.since(moments[0].counts)
    step = end.counts.since(prompt_end.counts, len(forwards) - 1)
    return Rehearsal(spec, cards.kind, tuple(uses), record, prompt, step, batch, frames, longest)


def largest(few: int, many: int, room: int, peaks: Callable[[int], list[int]]) -> int:
    """Return the largest number of rows or frames with peaks of at most `room` bytes on each card; 0 if none fits.

    By a line through the peaks at two numbers.
    """
    counts = [
        few + (room - low) * (many - few) // max(high - low, 1)
        for low, high in zip(peaks(few), peaks(many), strict=True)
    ]
    return max(min(counts), 0)


def answer(
    spec: RunSpec,
    opened: OpenMethod,
    cards: RealSizes,
    rows: int,
    frames: int | None,
    tokens: int,
) -> tuple[SampleRecord, list[Moment]]:
    """Answer `rows` equal prompts, with a video of some frames or a picture, and return a record and the moments."""
    chats = [prompt_of(spec.model, frames)] * rows
    facts = spec.model.facts
    generation = settings(
        {},
        {**spec.model.generation, **short_answer(facts, tokens)},
        denoises=facts.denoises,
        draws=facts.canvas is not None,
    ).generate
    with moments_of(opened.adapter, cards) as moments:
        inputs = opened.encode(chats)
        names = [str(row) for row in range(rows)]
        generated = opened.generator.generate(inputs, names, **generation)
    return generated.records[0], moments


def prompt_of(model: ModelSpec, frames: int | None) -> Chat:
    """Return the chat of a rehearsal: a picture of noise, or a video of some frames, and a question."""
    size = PICTURE if frames is None else FRAME
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    return question_chat(pixels if frames is None else video([pixels] * frames), QUESTION, model)


def short_answer(facts: ModelFacts, tokens: int) -> dict[str, int]:
    """Return the settings of an answer of some tokens, or of some steps of one block where it is denoised."""
    if facts.diffusion is not None:
        return {"max_new_tokens": facts.diffusion.block or facts.diffusion.length, "steps": tokens}
    if facts.canvas is not None:
        return {"max_denoising_steps": tokens}
    return {"max_new_tokens": tokens}


@contextmanager
def moments_of(adapter: Adapter, cards: RealSizes) -> Iterator[list[Moment]]:
    """Note the moments of an answer inside the block: `decoder` before each forward, `tower` after each of its."""
    moments: list[Moment] = []

    def note(name: str) -> None:
        moments.append(Moment(name, Counts.of(cards), Counter(cards.held), Counter(cards.peak)))
        cards.peak = Counter(cards.held)

    hooks = [
        adapter.tower.register_forward_pre_hook(lambda *_: note("before the tower")),
        adapter.tower.register_forward_hook(lambda *_: note("tower")),
    ]
    for stack in filter(None, (adapter.decoder, adapter.canvas)):
        hooks.append(stack.register_forward_pre_hook(lambda *_: note("decoder")))
    note("start")
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()
    note("end")


# ---------------------------------------------------------------------- models


def open_model(spec: ModelSpec, cards: RealSizes) -> Adapter:
    """Return a model on simulated cards, placed as loading places it.

    Raises:
        UserError: its layers do not fit on the cards.
    """
    family: type[Adapter] = ADAPTERS.load(spec.adapter)
    with quiet_library(), catch_warnings(action="ignore"):
        config, processor = read_parts(family, spec)
        model = build_skeleton(family.class_of(config), config, spec)
        check_memory(spec, weight_bytes(model), free_bytes(), model)
        if spec.device_map is None:
            place(model, {"": torch.device(spec.device).index or 0}, cards)
        else:
            limits = dict(weight_limits(spec, free_bytes()))
            places = _get_device_map(model, spec.device_map, limits, None)
            place(model, places, cards)
            skipped = getattr(model, "_skip_keys_device_placement", None)
            model = dispatch_model(model, places, skip_keys=skipped, force_hooks=True)
        model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
        model.generation_config.eos_token_id = None
        return family(model, processor, spec)


def place(model: nn.Module, places: Mapping[str, Any], cards: RealSizes) -> None:
    """Put the tensors of a model without weights on its cards; tied tensors stay tied.

    Args:
        model: with all tensors on the meta device.
        places: numbers of cards by the names of modules; the innermost name holds.
        cards: where the tensors go.
    """
    placed: dict[Tensor, Tensor] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                if tensor is None:
                    continue
                path = f"{prefix}.{leaf}."
                owners = (name for name in places if not name or path.startswith(f"{name}."))
                card = torch.device("cuda", places[max(owners, key=len)])
                if tensor not in placed:
                    card_tensor = cards.wrap(_with_values(tensor.detach()), card)
                    is_weight = isinstance(tensor, nn.Parameter)
                    placed[tensor] = (
                        nn.Parameter(card_tensor, requires_grad=False) if is_weight else card_tensor
                    )
                table[leaf] = placed[tensor]


def _with_values(tensor: Tensor) -> Tensor:
    """Return a buffer of integers with values, which are indices of positions; floats as they are."""
    if tensor.is_floating_point():
        return tensor
    return torch.arange(tensor.numel()).view(tensor.shape).to(tensor.dtype)


def _unloaded(spec: RunSpec) -> RunSpec:
    """Return a run that needs no checkpoint and has both sides of a decoder in this thread."""
    draft = spec.method.draft
    return replace(
        spec,
        model=_without_weights(spec.model),
        method=replace(spec.method, draft=None if draft is None else _without_weights(draft)),
        engine=replace(spec.engine, transport="sequential", compare=False, graphs=False),
    )


def _without_weights(model: ModelSpec) -> ModelSpec:
    """Return a model with the configuration and tokenizer of its checkpoint, or by its file if there is none here."""
    is_here = model.path or file_of_hub(model.hub, "config.json", model.revision)
    return model if is_here else replace(model, weights="random")


def _even_prior(method: Method, model: ModelSpec) -> Prior | None:
    """Return a prior that prefers no place, for a method that reads a calibrated one."""
    side = math.isqrt(model.facts.visual_tokens)
    return (torch.ones(side, side),) * 2 if prior_layers(method, model.facts.text.layers) else None
