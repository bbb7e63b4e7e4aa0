"""A draft that reads and does not see (Gagrani et al., 2024, arXiv 2404.08856): speculative decoding from text alone.

The draft's prompt is the target's without its images: their tokens, and the row ends and separators between them, are
left out and the places closed up. Its prefill is short and no vision tower runs for it, but what only the image tells
it cannot know. Rounds are those of plain speculative decoding. The paper trains a small language model for the purpose;
any draft with the target's vocabulary will do, a vision-language model included, whose language part is used then.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.windows import InTurn


@dataclass(frozen=True)
class OnSD(InTurn):
    """Drafts a chain from the words of the prompt."""

    text_only = True  # the draft sees no visual token
