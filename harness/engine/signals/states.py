"""States that enter the site's layer: `text_states`, `text_normed`, `normed`.

Captured when the site is reached; no module is watched.
"""

from __future__ import annotations

from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import Asked, InDecoder, of_words


class Reached(InDecoder):
    """Base of what is taken from the states themselves."""

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Watch nothing."""
        return []


class TextStates(Reached):
    """Words as they are."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the words."""
        self._found = of_words(hidden, stage.words)

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, T, D)."""
        return self.found[asked.rows]


class TextNormed(TextStates):
    """Words after the decoder's final norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the words and norm them."""
        self._found = self.context.parts.decoder.norm(of_words(hidden, stage.words))


class Normed(Reached):
    """Visual tokens after the decoder's final norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the visual tokens and norm them."""
        self._found = self.context.parts.decoder.norm(self.per_token(stage, hidden))

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, n, D)."""
        return asked.chosen(self.found)
