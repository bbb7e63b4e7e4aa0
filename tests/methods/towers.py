"""Methods inside the vision tower on tiny models: the families whose tokens are patches."""

from __future__ import annotations

import torch

from espalier.methods.base import TokenReducer
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.methods.runs import adapter_of, kept_by

#: A class token, crops and their padding, a tower without a class token.
TOWERS = ("llava", "llava_next", "onevision_image")


def chats_of(name: str) -> list[list[dict]]:
    """The family's chats whose tokens are single patches."""
    adapter, chats = adapter_of(name), FAMILIES[name].chats
    return [one for one in chats if not any(adapter.layout(adapter.encode([one])).blended)]


def check_in_tower(name: str, method: TokenReducer) -> None:
    """Ratio 0 changes nothing, dropping equals emulation, a batch equals its rows, and something happens at all."""
    adapter, chats = adapter_of(name), chats_of(name)
    assert len(chats) > 1
    plain = kept_by(adapter, NoReduction(), chats, 0.0)
    assert torch.equal(kept_by(adapter, method, chats, 0.0).logits, plain.logits)
    fast = kept_by(adapter, method, chats, 0.6)
    slow = kept_by(adapter, method, chats, 0.6, backend="emulate")
    assert torch.equal(fast.ids, slow.ids)
    assert (fast.logits - slow.logits).abs().max() < 1e-9 * slow.logits.abs().max()
    assert (fast.logits[:, 0] - plain.logits[:, 0]).abs().max() > 1e-2
    for row, one in enumerate(chats):
        alone = kept_by(adapter, method, [one], 0.6)
        assert alone.records[0].kept == fast.records[row].kept == fast.records[row].requested
        assert torch.equal(alone.records[0].origin, fast.records[row].origin)
        assert (alone.logits[0] - fast.logits[row]).abs().max() < 1e-6
