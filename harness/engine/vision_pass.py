"""From pixels to the decoder's entry: what is timed, watched and kept while the vision side of a model runs."""

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
    """Hooks on tower and projector for one run of them.

    Args:
        setup: method, model and settings.
        clock: times the vision phase.
        keeps_features: whether what goes into the projector is wanted.
    """

    def __init__(self, setup: SessionSetup, clock: Clock, keeps_features: bool) -> None:
        self._setup = setup
        self._clock = clock
        self._keeps_features = keeps_features
        self._features: list[Tensor] = []
        self._idle = IdleBlocks(setup.idle_blocks)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> VisionSide:
        """Install the hooks, and let blocks idle that nobody reads."""
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
        """Remove what is left."""
        self.stop_watching()
        self._idle.__exit__()

    def stop_watching(self) -> None:
        """Look no longer: whatever goes through the projector from here on is the engine's own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def features(self) -> Tensor | None:
        """Return (units, D) what went into the projector; None if it was not wanted, or there were no pictures."""
        return torch.cat(self._features) if self._features else None

    def _before_tower(self, module: nn.Module, args: Any) -> None:
        self._clock.start("vision")

    def _before_projector(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._keeps_features:
            self._features.append(self._setup.adapter.features(args[0]))

    def _after_projector(self, module: nn.Module, args: Any, output: Any) -> None:
        self._clock.stop("vision")
