"""Two bases of decoders with a window as hyper-parameter: a number, or one that may follow the measured times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espalier.methods.base import Decoder, Window
from espalier.methods.checks import require


@dataclass(frozen=True)
class InTurn(Decoder):
    """Drafts a window, then lets the target verify it.

    Attributes:
        gamma: tokens drafted in a round.
    """

    gamma: int = 5

    def __post_init__(self) -> None:
        """Raise MethodError for a window below 1."""
        require(self.gamma >= 1, "gamma", self.gamma, "1 or more")

    @property
    def window(self) -> int:
        """Tokens drafted in a round."""
        return self.gamma


@dataclass(frozen=True)
class AtOnce(Decoder):
    """Drafts while the target verifies, so that the best window depends on the speed of both.

    Attributes:
        gamma: tokens drafted in a round; `auto`: as many as fit into one step of the target; `best`: fewer where what
            was accepted so far promises more for fewer.
    """

    overlap: ClassVar[bool] = True

    gamma: Window = "auto"

    def __post_init__(self) -> None:
        """Raise MethodError unless the window is a positive number, `auto` or `best`."""
        gamma = self.gamma
        holds = gamma in ("auto", "best") if isinstance(gamma, str) else gamma >= 1
        require(holds, "gamma", self.gamma, "1 or more, auto or best")

    @property
    def window(self) -> Window:
        """Tokens drafted in a round."""
        return self.gamma
