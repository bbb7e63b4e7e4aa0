"""The words of the prompt after the image."""

from __future__ import annotations

from torch import Tensor

from espalier.methods.checks import Condition, require_all
from espalier.methods.views import MethodError

NONE = "this method reads the words after the image, and a prompt has none"


def words_after(text_positions: Tensor, visual_positions: Tensor) -> Tensor:
    """Return (B, T) booleans: the words after the last visual token of their row.

    Args:
        text_positions: (B, T) place of each word, -1 where a row has fewer.
        visual_positions: (B, N) place of each visual token.

    Raises:
        MethodError: a row has no such word; read as in `require_all`.
    """
    after = text_positions > visual_positions.amax(dim=1, keepdim=True)
    require_all([Condition(after.any(dim=1).all(), lambda: MethodError(NONE))])
    return after
