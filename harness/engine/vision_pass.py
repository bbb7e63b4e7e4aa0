"""Time, watch and store the vision side of a model, from pixels to the decoder's input."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.idle_blocks import IdleBlocks
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
        self._idle = IdleBlocks(setup.idle_blocks)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> VisionSide:
        """Install the hooks, and skip blocks with unused output."""
        adapter = self._setup.adapter
        self._idle.__enter__()
        self._handles = [
            adapter.tower.register_forward_pre_hook(self._before_tower),
            adapter.projector.register_forward_pre_hook(self._before_projector),
            adapter.projector.register_forward_hook(self._after_projector),
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
        self._idle.__exit__()

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

    def _before_projector(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._keeps_features:
            self._features.append(self._setup.adapter.features(args[0]))

    def _after_projector(self, module: nn.Module, args: Any, output: Any) -> None:
        self._clock.stop("vision")
