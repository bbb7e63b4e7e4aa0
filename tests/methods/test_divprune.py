"""DivPrune on models, against a slow max-min search; and the newlines that it leaves alone."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.base import Site, View
from espalier.methods.divprune import DivPrune
from espalier.methods.select import maxmin
from espalier.methods.select.cosines import cosines, memory_limit
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.cases import make_view
from tests.methods.runs import kept_by
from tests.methods.slow import farthest_first
from tests.methods.twins import check_method


def slow_max_min(tokens: Tensor, keep: int) -> list[int]:
    """By cosines."""
    units = tokens.double() / tokens.double().norm(dim=1, keepdim=True)
    return farthest_first((1 - units @ units.T).tolist(), keep)


def slow_divprune(_method: DivPrune, view: View, row: int, keep: int) -> list[int]:
    return slow_max_min(view.tokens[row], keep)


test_divprune = check_method(
    "divprune",
    slow_divprune,
    views=lambda method, _keep: make_view(method, [((0, 0, 4, 6),)] * 2),
    keeps=(1, 8, 24),
)


def test_newlines_always_stay_and_are_no_candidates():
    """With the newlines among the candidates, as in the released code, the search would take some and other patches."""
    adapter, chats = adapter_of("llava_next"), FAMILIES["llava_next"].chats[:1]
    layout = adapter.layout(adapter.encode(chats))
    record = kept_by(adapter, DivPrune(), chats, 0.75).records[0]
    assert record.special == layout.special[0] > 0
    assert record.visual == layout.counts[0]
    assert record.kept[-1] == round(0.25 * record.visual)

    patches = shown(adapter, [Site("prefix")], [], chats)[0].tokens[0]
    newline = adapter.model.model.image_newline.detach()
    together = torch.cat([patches, newline.expand(record.special, -1)])
    total = round(0.25 * len(together))
    chosen = [token for token in slow_max_min(together, total) if token < len(patches)]
    assert len(chosen) < total
    assert chosen != record.origin.tolist()


def test_picks_that_share_a_duplicate_are_told_apart() -> None:
    """Each of six tokens is a duplicate of its neighbours alone, so that two picks may have the same one."""
    angles = torch.cat([1.1e-3 * torch.arange(6), 0.5 + 0.2 * torch.arange(14)])
    tokens = torch.stack([angles.cos(), angles.sin()], 1).unsqueeze(0)
    for keep in range(1, 21):
        with memory_limit(0):  # pick by pick
            expected = maxmin.farthest_first(cosines(tokens), keep)
        assert torch.equal(maxmin.farthest_first(cosines(tokens), keep), expected)
