"""A prompt as it stands in front of the decoder: made once, kept, and given to any number of methods that start there.

Chats are encoded, pictures go through tower and projector, and the model runs up to the entry of its text stack; what
it was about to hand to the stack is the prompt. Methods that act behind that start from it as from the inputs, with the
same answers and records to the bit, but for times. Whatever makes many passes over one prompt begins here, too: the
steps of a denoising run, the points of a sweep, the two sides of a decoder that reads one video twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.layout import Layout
from espalier.harness.engine.session_setup import SessionSetup
from espalier.harness.engine.shared_prefill import StopForward, Trunk
from espalier.harness.engine.sites.site_table import reads_features, tower_sites
from espalier.harness.engine.vision_pass import VisionSide
from espalier.harness.errors import UserError
from espalier.methods.base import MethodError, Site, TokenReducer


@dataclass(frozen=True, eq=False)
class Prompt:
    """One batch in front of the decoder stack. It outlives the session that made it; the tensors are nobody's to write.

    Attributes:
        model: what it was made with.
        inputs: what was encoded, without the pixels.
        layout: of the batch.
        arguments: what the decoder stack was about to be given, but for the cache: `inputs_embeds` (B, L, D),
            `position_ids` (B, L) or (axes, B, L), `attention_mask`, and what else the family hands over.
        signals: what was read before the decoder, for each unit of the projector, by `Need.key`.
        features: (units, D) what went into the projector; None if nobody asked for it, or there are no pictures.
        keeps_features: whether somebody did.
        times_ms: milliseconds of the whole batch in `vision` and `select`; a sample that starts here is not charged.
        trunk: the first decoder layers, if they have been run for all who leave them as they are
            (`espalier.harness.engine.shared_prompt.carried_on`).
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
        """Put the prompt in the place of what the decoder stack is given by a model that saw no pixels.

        The call's own positions, masks and cache stay: they follow from the inputs alone, and a caller may have others.

        Raises:
            UserError: beams, and the family hands over what has no row for each sample or visual token.
        """
        times = kwargs["inputs_embeds"].shape[0] // self.layout.rows
        missing = {
            name: self._repeated(name, times) for name in self.arguments if kwargs.get(name) is None
        }
        embeddings = self._repeated("inputs_embeds", times)
        return {**kwargs, **missing, "inputs_embeds": embeddings}

    def _repeated(self, name: str, times: int) -> Any:
        """Repeat an argument sample by sample, as `generate` does for beams."""
        value = self.arguments[name]
        if times == 1:
            return value
        parts = value if isinstance(value, list | tuple) else (value,)
        repeated = [_repeat(part, self.layout, times) for part in parts]
        if any(part is None for part in repeated):
            raise UserError(
                f"generation.num_beams={times}: a prompt cannot repeat the {name} of this family for beams; "
                "valid: 1, or the inputs in place of the prompt"
            )
        return type(value)(repeated) if isinstance(value, list | tuple) else repeated[0]

    def check(self, setup: SessionSetup) -> None:
        """Refuse a method that cannot start here.

        Raises:
            UserError: another model made the prompt.
            MethodError: the method acts in the tower, or reads what was not kept.
        """
        name = type(setup.method).__name__
        if self.model is not setup.adapter.model:
            raise UserError("this prompt was made with another model; valid: a session of the same")
        refuse_tower_sites(setup.method, setup.sites)
        if reads_features(setup.sites) and not self.keeps_features:
            raise MethodError(
                f"{name} acts on tower features, which this prompt was not asked to keep; "
                "valid: a prompt made for a method that acts on them"
            )
        missing = sorted(setup.signals.before_decoder() - set(self.signals))
        if missing:
            raise MethodError(
                f"{name} reads {', '.join(missing)}, which this prompt was not asked to keep; "
                f"kept: {', '.join(sorted(self.signals)) or 'nothing'}"
            )


def refuse_tower_sites(method: TokenReducer, sites: Sequence[Site]) -> None:
    """Refuse a method that acts in front of the place where prompts are kept.

    Raises:
        MethodError: it acts inside the tower.
    """
    if tower_sites(sites):
        raise MethodError(
            f"{type(method).__name__} acts inside the vision tower and cannot start from a prompt, which lies behind "
            "it; valid: the inputs"
        )


def make_prompt(
    setup: SessionSetup, inputs: Mapping[str, Any], layout: Layout, clock: Clock
) -> Prompt:
    """Run a batch up to the decoder stack's entry and keep what arrives there.

    The caller has begun the signals, lets their watchers see, and counts their work on the same clock.

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
    try:
        with vision, suppress(StopForward):
            adapter.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    finally:
        handle.remove()
    return Prompt(
        model=adapter.model,
        inputs=adapter.without_pixels(inputs),
        layout=layout,
        arguments={
            name: value
            for name, value in arguments.items()
            if not isinstance(value, Cache | int | None)  # settings are the call's own
        },
        signals=_signals(setup, layout),
        features=vision.features(),
        keeps_features=reads_features(setup.sites),
        times_ms={name: clock.totals_ms().get(name, 0.0) for name in ("vision", "select")},
    )


def _signals(setup: SessionSetup, layout: Layout) -> dict[str, Tensor]:
    if any(layout.counts):
        return setup.signals.kept_units()
    return {key: torch.empty(0) for key in setup.signals.before_decoder()}  # nobody will look


def _repeat(value: Any, layout: Layout, times: int) -> Tensor | None:
    """Repeat what has a row for each sample, or for each visual token of one after the other; None for all else."""
    if not isinstance(value, Tensor):
        return None
    if value.shape[0] == layout.rows:
        return value.repeat_interleave(times, 0)
    if value.shape[0] == sum(layout.counts):
        return torch.cat(
            [sample_values.repeat(times, 1) for sample_values in value.split(list(layout.counts))]
        )
    return None
