"""Tower blocks after the one that the projector reads: they run only if a method reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn


class IdleBlocks:
    """Makes blocks return their input, for one pass.

    CLIP's last block computes a state that LLaVA's projector, which reads the last but one, never uses. The library
    runs it anyway; skipping it leaves every state that is used bit-identical.

    Args:
        blocks: the blocks to skip.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._saved: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> IdleBlocks:
        """Replace the blocks' forward by the identity."""
        for block in self._blocks:
            self._saved.append((block, block.__dict__.get("forward")))
            block.__dict__["forward"] = _pass_through
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the blocks' forward."""
        for block, forward in self._saved:
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward
        self._saved.clear()


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
