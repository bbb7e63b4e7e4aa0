"""A draft that reads and does not see (Gagrani et al., 2024, arXiv 2404.08856): speculative decoding from text alone.

The draft's prompt is the target's without its images: their tokens, and the row ends and separators between them, are
left out and the places closed up. Its prefill is short and no vision tower runs for it, but what only the image tells
it cannot know. Rounds are those of plain speculative decoding. The paper trains a small language model for the purpose;
any draft with the target's vocabulary will do, a vision-language model included, whose language part is used then.
"""

from __future__ import annotations

from dataclasses import dataclass

from methods.base import Decoder
from methods.checks import require


@dataclass(frozen=True)
class OnSD(Decoder):
    """Drafts a chain from the words of the prompt.

    Attributes:
        gamma: tokens drafted in a round.
    """

    gamma: int = 5

    def __post_init__(self) -> None:
        """Check the window."""
        require(self.gamma >= 1, "gamma", self.gamma, "1 or more")

    @property
    def window(self) -> int:
        """Tokens drafted in a round."""
        return self.gamma

    @property
    def text_only(self) -> bool:
        """The draft sees no visual token."""
        return True
