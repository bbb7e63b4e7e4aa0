"""Speculative decoding with a text-only draft (Gagrani et al., 2024, arXiv 2404.08856).

The draft's prompt is the target's without its images: their tokens, and the row ends and separators between them, are
left out and the positions closed up. Its prefill is short and needs no vision tower, but it cannot know what only the
image shows. Rounds are those of plain speculative decoding.

Differs: the paper trains a small language model; any draft with the target's vocabulary works, also the language part
of a vision-language model.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.windows import InTurn


@dataclass(frozen=True)
class OnSD(InTurn):
    """Drafts a chain from the words of the prompt."""

    text_only = True  # the draft sees no visual token
