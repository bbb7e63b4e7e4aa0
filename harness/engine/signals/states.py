"""States that enter the site's layer: `text_states`, `text_normed`, `normed`.

Captured when the site is reached; no module is watched.
"""

from __future__ import annotations

from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest, word_states


class ReachedStates(DecoderSignal):
    """Base of signals taken from the states themselves."""

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Watch nothing."""
        return []


class TextStates(ReachedStates):
    """Words as they are."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the words."""
        self._captured = word_states(hidden, stage.words)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, T, D)."""
        return self.captured[request.rows]


class TextNormed(TextStates):
    """Words after the decoder's final norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the words and normalise them."""
        self._captured = self.context.parts.decoder.norm(word_states(hidden, stage.words))


class Normed(ReachedStates):
    """Visual tokens after the decoder's final norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the visual tokens and normalise them."""
        self._captured = self.context.parts.decoder.norm(self.per_token(stage, hidden))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n, D)."""
        return request.select(self.captured)
