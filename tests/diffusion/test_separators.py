"""Newline tokens of LaViDa as candidates at denoising steps."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.specs.catalogue import build_method
from tests.diffusion.models import denoised
from tests.diffusion.test_loop import HOW
from tests.families.llada import DENOISING, adapter_of

CHATS = list(DENOISING["lavida"].chats)


def answers(label, chats, ratio=0.6, **how):
    how = {"separators": "candidates", "output_logits": True, **HOW, **how}
    return denoised(adapter_of("lavida"), build_method(label, {}), ratio, chats, CHATS, **how)


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    "label", ["fastv_denoising", "d3tom", "divprune", "redvtp", "fastv_first_step"]
)
def test_dropping_equals_hiding_and_a_batch_its_rows(label) -> None:
    assert build_method(label, {}).takes_separators
    drop = answers(label, CHATS)
    layout = adapter_of("lavida").layout(adapter_of("lavida").encode(CHATS))
    assert min(layout.special) > 0
    positions = [n + m for n, m in zip(layout.counts, layout.special, strict=True)]
    assert [record.visual for record in drop.records] == positions
    assert [record.special for record in drop.records] == [0] * len(CHATS)
    hidden = answers(label, CHATS, backend="emulate")
    assert torch.equal(drop.ids, hidden.ids)
    assert (drop.logits - hidden.logits).abs().max() < 2e-6 * hidden.logits.abs().max()
    for row, chat in enumerate(CHATS):
        alone = answers(label, [chat])
        assert alone.ids[0].tolist() == drop.ids[row].tolist()
        assert alone.records[0].denoising["kept"] == drop.records[row].denoising["kept"]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_ratio_zero_is_bit_identical(prefix_cache) -> None:
    plain = answers("none", CHATS, 0.0, separators="keep", prefix_cache=prefix_cache)
    for label in ("d3tom", "fastv" if prefix_cache else "fastv_denoising"):
        generated = answers(label, CHATS, 0.0, prefix_cache=prefix_cache)
        assert torch.equal(generated.ids, plain.ids)
        assert torch.equal(generated.logits, plain.logits)


def test_a_cached_prompt_merges_newlines_too() -> None:
    drop = answers("d3tom", CHATS, prefix_cache=True)
    for record in drop.records:
        assert all(step[-1] == round(0.4 * record.visual) for step in record.denoising["kept"][1:])
    for row, chat in enumerate(CHATS):
        assert answers("d3tom", [chat], prefix_cache=True).ids[0].tolist() == drop.ids[row].tolist()
