"""Work of one batch row before the decoder, in counts from which FLOPs follow."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Work of one batch row before the decoder; pairs are attended pairs of tokens in one layer.

    Attributes:
        tokens: tokens that the vision tower processes.
        pairs: pairs in a layer with attention inside each image or frame.
        window_pairs: pairs in a layer with attention inside windows (0: the tower has none).
        units: inputs of the projector, each mapped to one visual token.
        pooled: patches that the projector's attention pools into these tokens, padding included (0: it has none).
        stem_tokens: tokens of the stack that runs before the tower (DeepSeek-OCR's SAM), 0 elsewhere.
        stem_pairs: its pairs in a global layer.
        stem_window_pairs: its pairs in a windowed layer.
        stem_window_tokens: attention tokens in a windowed layer, with windows padded at the border.
        stem_lines: pairs of a token and a row or column of tokens that it sees, in a global layer (relative positions).
        stem_window_lines: the same in a windowed layer.
        extra_tokens: tokens of tower layers that ran for a method alone (the projector does not read them), summed over
            these layers.
        extra_pairs: their pairs.
        reprojected: units that went through the projector a second time, after merging.
        spared_attention: tokens that a method inside the tower removed from attentions, summed over its layers.
        spared_mlp: tokens that it removed from MLPs, likewise.
        spared_pairs: attended pairs that it removed, likewise.
    """

    tokens: int = 0
    pairs: int = 0
    window_pairs: int = 0
    units: int = 0
    pooled: int = 0
    stem_tokens: int = 0
    stem_pairs: int = 0
    stem_window_pairs: int = 0
    stem_window_tokens: int = 0
    stem_lines: int = 0
    stem_window_lines: int = 0
    extra_tokens: int = 0
    extra_pairs: int = 0
    reprojected: int = 0
    spared_attention: int = 0
    spared_mlp: int = 0
    spared_pairs: int = 0

    def plus(self, addend: Work) -> Work:
        """Return the sum, entry by entry."""
        return Work(*(a + b for a, b in zip(self, addend, strict=True)))

    def untouched(self) -> Work:
        """Return the work of the same row without a method."""
        return self._replace(
            reprojected=0,
            extra_tokens=0,
            extra_pairs=0,
            spared_attention=0,
            spared_mlp=0,
            spared_pairs=0,
        )


NO_WORK = Work()
