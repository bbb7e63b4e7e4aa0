"""A stored prompt at the decoder's input: computed once, reused by any number of passes.

Chats are encoded, images go through tower and projector, and the model runs up to the input of its text stack; the
arguments of the stack are the prompt. A method that acts later gives the same answers and records from the prompt as
from the inputs, to the bit, except for times. Everything that makes many passes over one prompt starts here: the steps
of a denoising run, the points of a sweep, the two sides of a decoder that reads one video twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from espalier.harness.cost.clock import Clock, DelayedTimes
from espalier.harness.engine.layout import Layout
from espalier.harness.engine.model_parts import StopForward, hooked, remove_hooks, replaced_forwards
from espalier.harness.engine.session_setup import SessionSetup
from espalier.harness.engine.sites import reads_features, tower_sites
from espalier.harness.errors import UserError
from espalier.methods.base import MethodError, Site, TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.trunk import Trunk


@dataclass(frozen=True, eq=False)
class Prompt:
    """One batch at the input of the decoder stack. It outlives the session that made it; its tensors are read-only.

    Attributes:
        model: the model that made it.
        inputs: encoded inputs, without the pixels.
        layout: of the batch.
        arguments: arguments of the decoder stack, without the cache: `inputs_embeds` (B, L, D), `position_ids` (B, L)
            or (axes, B, L), `attention_mask`, and others that the family passes.
        signals: signals read before the decoder, for each unit of the projector, by `Need.key`.
        features: (units, D) input of the projector; None if not requested, or without images.
        keeps_features: whether the features were requested.
        times_ms: milliseconds of the whole batch in `vision` and `select`; not charged to samples that start here.
        trunk: the first decoder layers, if run for all methods that leave them unchanged
            (`espalier.harness.engine.session.prompt_with_trunk`).
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    layout: Layout
    arguments: Mapping[str, Any] = field(repr=False)
    signals: Mapping[str, Tensor] = field(repr=False)
    features: Tensor | None = field(repr=False)
    keeps_features: bool
    times_ms: Mapping[str, float]
    trunk: Trunk | None = field(default=None, repr=False)

    def enter(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the arguments of a decoder stack that saw no pixels by those of the prompt.

        The call's own positions, masks and cache stay: they follow from the inputs alone, and a caller may use others.

        Raises:
            UserError: beams, with an argument that has no row for each sample or visual token.
        """
        times = kwargs["inputs_embeds"].shape[0] // self.layout.rows
        missing = {
            name: self._repeat_argument(name, times)
            for name in self.arguments
            if kwargs.get(name) is None
        }
        embeddings = self._repeat_argument("inputs_embeds", times)
        return {**kwargs, **missing, "inputs_embeds": embeddings}

    def _repeat_argument(self, name: str, times: int) -> Any:
        """Repeat an argument sample by sample, as `generate` does for beams."""
        value = self.arguments[name]
        if times == 1:
            return value
        parts = value if isinstance(value, list | tuple) else (value,)
        repeated = [_repeat_rows(part, self.layout, times) for part in parts]
        if any(part is None for part in repeated):
            raise UserError(
                f"generation.num_beams={times}: a prompt cannot repeat the {name} of this family for beams; "
                "valid: 1, or the inputs in place of the prompt"
            )
        return type(value)(repeated) if isinstance(value, list | tuple) else repeated[0]

    def check(self, setup: SessionSetup) -> None:
        """Refuse a method that cannot start from this prompt.

        Raises:
            UserError: another model made the prompt.
            MethodError: the method acts in the tower, or reads data that was not stored.
        """
        name = type(setup.method).__name__
        if self.model is not setup.adapter.model:
            raise UserError("this prompt was made with another model; valid: a session of the same")
        refuse_tower_sites(setup.method, setup.sites)
        if reads_features(setup.sites) and not self.keeps_features:
            raise MethodError(
                f"{name} acts on tower features, which this prompt does not store; "
                "valid: a prompt made for a method that acts on them"
            )
        missing = sorted(setup.signals.before_decoder() - set(self.signals))
        if missing:
            raise MethodError(
                f"{name} reads {', '.join(missing)}, which this prompt does not store; "
                f"stored: {', '.join(sorted(self.signals)) or 'nothing'}"
            )


def refuse_tower_sites(method: TokenReducer, sites: Sequence[Site]) -> None:
    """Refuse a method that acts before the point where prompts are stored.

    Raises:
        MethodError: it acts inside the tower, or on the pictures.
    """
    if method.shrinks_pictures:
        raise MethodError(
            f"{type(method).__name__} changes the pictures and cannot start from a stored prompt; valid: the inputs"
        )
    if tower_sites(sites):
        raise MethodError(
            f"{type(method).__name__} acts inside the vision tower and cannot start from a stored prompt; "
            "valid: the inputs"
        )


def make_prompt(
    setup: SessionSetup, inputs: Mapping[str, Any], layout: Layout, clock: Clock
) -> Prompt:
    """Run a batch up to the decoder stack's input and store the arguments.

    The caller has started the signals, enables their watchers, and counts their work on the same clock.

    Raises:
        MethodError: the method acts inside the tower.
    """
    refuse_tower_sites(setup.method, setup.sites)
    adapter = setup.adapter
    arguments: dict[str, Any] = {}

    def arrive(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        arguments.update(kwargs)
        raise StopForward

    vision = VisionSide(setup, clock, reads_features(setup.sites))
    handle = adapter.decoder.register_forward_pre_hook(arrive, with_kwargs=True)
    with hooked([handle]), vision, suppress(StopForward):
        adapter.generate(**inputs, max_new_tokens=1, do_sample=False)
    signals = {key: torch.empty(0) for key in setup.signals.before_decoder()}  # never read
    if any(layout.counts):
        signals = setup.signals.kept_units()
    return Prompt(
        model=adapter.model,
        # Enough for prompts and their positions.
        inputs={name: value for name, value in inputs.items() if not name.startswith("pixel_")},
        layout=layout,
        arguments={
            name: value
            for name, value in arguments.items()
            if not isinstance(value, Cache | int | None)  # settings are the call's own
        },
        signals=signals,
        features=vision.features(),
        keeps_features=reads_features(setup.sites),
        times_ms=DelayedTimes(lambda: dict.fromkeys(("vision", "select"), 0.0) | clock.totals_ms()),
    )


def _repeat_rows(value: Any, layout: Layout, times: int) -> Tensor | None:
    """Repeat a tensor with one row for each sample or visual token; return None for anything else."""
    if not isinstance(value, Tensor):
        return None
    if value.shape[0] == layout.rows:
        return value.repeat_interleave(times, 0)
    if value.shape[0] == sum(layout.counts):
        return torch.cat(
            [sample_values.repeat(times, 1) for sample_values in value.split(list(layout.counts))]
        )
    return None


class VisionSide:
    """Hooks on tower and projector for one run.

    Args:
        setup: method, model and settings.
        clock: times the vision phase.
        keeps_features: whether to store the projector's input.
    """

    def __init__(self, setup: SessionSetup, clock: Clock, keeps_features: bool) -> None:
        self._setup = setup
        self._clock = clock
        self._keeps_features = keeps_features
        self._features: list[Tensor] = []
        self._idle = ExitStack()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> VisionSide:
        """Install the hooks, and skip blocks with unused output."""
        adapter = self._setup.adapter
        self._idle.enter_context(idle(self._setup.idle_blocks))
        self._handles = [
            adapter.tower.register_forward_pre_hook(lambda *_: self._clock.start("vision")),
            adapter.projector.register_forward_pre_hook(self._before_projector, with_kwargs=True),
            adapter.vision_end.register_forward_hook(lambda *_: self._clock.stop("vision")),
            *self._setup.signals.hook_tower(self._clock),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the remaining hooks."""
        self.stop_watching()
        self._idle.close()

    def stop_watching(self) -> None:
        """Remove the hooks: later calls of the projector are the engine's."""
        remove_hooks(self._handles)

    def features(self) -> Tensor | None:
        """Return (units, D) input of the projector; None if not requested, or without images."""
        return torch.cat(self._features) if self._features else None

    def _before_projector(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
    ) -> None:
        if self._keeps_features:
            (states,) = (*args, *kwargs.values())[:1]
            self._features.append(self._setup.adapter.features(states))


def idle(blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Make blocks return their input, for one pass.

    CLIP's last block computes a state that LLaVA's projector, which reads the last but one, never uses. The library
    runs it anyway; skipping it leaves every state that is used bit-identical.
    """
    return replaced_forwards((block, lambda hidden, *_, **__: hidden) for block in blocks)


def split_idle(
    unread: Sequence[nn.Module], watched: Iterable[nn.Module]
) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
    """Return (blocks that run, blocks that may idle) among those that the projector does not read.

    Args:
        unread: in their order in the tower.
        watched: modules with inputs or outputs that a method reads; the blocks before them have to run.
    """
    watched_modules = set(watched)
    last_watched = max(
        (number for number, block in enumerate(unread) if watched_modules & set(block.modules())),
        default=-1,
    )
    return unread[: last_watched + 1], unread[last_watched + 1 :]
