"""Time, watch and store the vision side of a model, from pixels to the decoder input; skip unused tower blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.replaced_forward import replaced_forwards
from espalier.harness.engine.session_setup import SessionSetup


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
        self._idle = idle(setup.idle_blocks)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> VisionSide:
        """Install the hooks, and skip blocks with unused output."""
        adapter = self._setup.adapter
        self._idle.__enter__()
        self._handles = [
            adapter.tower.register_forward_pre_hook(self._before_tower),
            adapter.projector.register_forward_pre_hook(self._before_projector, with_kwargs=True),
            adapter.vision_end.register_forward_hook(self._after_vision),
            *self._setup.signals.hook_tower(self._clock),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the remaining hooks."""
        self.stop_watching()
        self._idle.__exit__(kind, error, trace)

    def stop_watching(self) -> None:
        """Remove the hooks: later calls of the projector are the engine's."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def features(self) -> Tensor | None:
        """Return (units, D) input of the projector; None if not requested, or without images."""
        return torch.cat(self._features) if self._features else None

    def _before_tower(self, module: nn.Module, args: Any) -> None:
        self._clock.start("vision")

    def _before_projector(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
    ) -> None:
        if self._keeps_features:
            (states,) = (*args, *kwargs.values())[:1]
            self._features.append(self._setup.adapter.features(states))

    def _after_vision(self, module: nn.Module, args: Any, output: Any) -> None:
        self._clock.stop("vision")


def idle(blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Make blocks return their input, for one pass.

    CLIP's last block computes a state that LLaVA's projector, which reads the last but one, never uses. The library
    runs it anyway; skipping it leaves every state that is used bit-identical.
    """
    return replaced_forwards((block, _pass_through) for block in blocks)


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


def _pass_through(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden
