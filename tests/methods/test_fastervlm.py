"""FasterVLM: the same share of every crop, by the class token's attention."""

from __future__ import annotations

from espalier.methods.base import View
from espalier.methods.fastervlm import FasterVLM
from tests.methods.crop_views import ROWS, best, crop_view, crops_with_shares
from tests.methods.twins import check_method


def slow_fastervlm(method: FasterVLM, view: View, row: int, keep: int) -> list[int]:
    scores = view.signals["cls_attention"][row]
    pairs = crops_with_shares(view, row, keep)
    return sorted(token for tokens, quota in pairs for token in best(scores, tokens, quota))


test_fastervlm = check_method("fastervlm", slow_fastervlm, views=crop_view, varied=ROWS)
