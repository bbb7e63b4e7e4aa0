"""A method on tiny models of several families: the checks that every one must pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from harness.adapters.base import Adapter
from harness.budget import Budget
from harness.engine.record import Generated
from harness.engine.session import Session
from methods.base import TokenReducer
from methods.none import NoReduction
from tests.families import FAMILIES
from tests.tiny import load_tiny, save_tiny

#: Raster and class token, crops and newlines, merged patches and windows, shrunk planes, video, pixel shuffle.
NAMES = ("llava", "llava_next", "qwen2_5_vl", "onevision_image", "onevision_video", "internvl")

_FOLDER = TemporaryDirectory(prefix="espalier-methods-")


@cache
def loaded(name: str) -> Adapter:
    folder = Path(_FOLDER.name) / name
    if not folder.exists():
        save_tiny(FAMILIES[name].spec, folder)
    return load_tiny(FAMILIES[name].spec, folder)


def run(
    name: str, method: TokenReducer, ratio: float, chats: list, backend: str = "drop"
) -> Generated:
    adapter = loaded(name)
    inputs = adapter.encode(chats)
    with Session(adapter, method, Budget("kept", ratio), backend=backend) as session:
        return session.generate(
            inputs,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            suppress_tokens=list(adapter.items(inputs)),
        )


def check_method(name: str, method: TokenReducer) -> None:
    """Ratio 0 changes nothing, dropping equals emulation, a batch equals its rows, and something happens at all."""
    chats = list(FAMILIES[name].chats)
    plain = run(name, NoReduction(), 0.0, chats)
    assert torch.equal(run(name, method, 0.0, chats).logits, plain.logits)
    fast = run(name, method, 0.6, chats)
    slow = run(name, method, 0.6, chats, backend="emulate")
    assert torch.equal(fast.ids, slow.ids)
    assert (fast.logits - slow.logits).abs().max() < 1e-9 * slow.logits.abs().max()
    assert (fast.logits[:, 0] - plain.logits[:, 0]).abs().max() > 1e-2
    for row, one in enumerate(chats):
        alone = run(name, method, 0.6, [one])
        assert alone.records[0].kept == fast.records[row].kept == fast.records[row].requested
        assert torch.equal(alone.records[0].origin, fast.records[row].origin)
        assert (alone.logits[0] - fast.logits[row]).abs().max() < 1e-3
