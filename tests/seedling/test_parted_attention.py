"""Attention of packed dialogues in parts equals a masked kernel, including gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lab.training.dialogue_packs import Packed
from lab.training.parted_attention import attend_in_parts, groups_of

#: Words of each dialogue, of two clips; the second row ends in words of none.
LENGTHS = ((1, 5, 30, 2, 17, 16), (40, 3, 3))
ROWS = sum(LENGTHS[0])


def segments() -> torch.Tensor:
    segment_ids = torch.full((len(LENGTHS), ROWS), -1)
    for line, lengths in enumerate(LENGTHS):
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        segment_ids[line, : len(numbers)] = numbers
    return segment_ids


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return what one kernel gives that is told by a mask who sees whom."""
    every = segments()
    mask = Packed(every, every, every, every, every).mask(key.shape[2] - query.shape[2])
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.to(query.dtype), scale=scale
    )


def test_every_word_of_a_dialogue_is_in_one_group() -> None:
    groups = groups_of(segments())
    words = torch.cat([group.words[~group.filled] for group in groups])
    belong = (segments() >= 0).flatten().nonzero()[:, 0]
    assert torch.equal(words.sort().values, belong)
    rows = [row for group in groups for row in zip(group.words, group.filled, strict=True)]
    assert len(rows) == sum(map(len, LENGTHS))
    sizes = sorted(int((~filled).sum()) for _, filled in rows)
    assert sizes == sorted(size for lengths in LENGTHS for size in lengths)
    # Hardly more is filled up than there are words.
    assert max(group.filled.float().mean() for group in groups) <= 0.5


@pytest.mark.parametrize("prefix", [1, 50])
def test_parts_are_merged_to_what_a_mask_gives(prefix: int) -> None:
    torch.manual_seed(prefix)
    shape = (len(LENGTHS), 3, ROWS, 8)
    longer = (*shape[:2], prefix + ROWS, 8)
    inputs = [
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in (shape, longer, longer)
    ]
    belongs = (segments() >= 0)[:, None, :, None]
    worth = torch.randn(shape, dtype=torch.float64) * belongs
    merged, wanted = (
        attend_in_parts(*inputs, groups_of(segments()), 0.3),
        masked(*inputs, 0.3),
    )
    torch.testing.assert_close(merged * belongs, wanted * belongs, atol=1e-12, rtol=1e-12)
    gradients = [torch.autograd.grad((output * worth).sum(), inputs) for output in (merged, wanted)]
    for output, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(output, reference, atol=1e-12, rtol=1e-12)


def test_words_of_no_dialogue_see_the_prefix_alone() -> None:
    query, key, value = (
        torch.randn(len(LENGTHS), 2, size, 8) for size in (ROWS, ROWS + 4, ROWS + 4)
    )
    merged = attend_in_parts(query, key, value, groups_of(segments()), 0.3)
    alone = F.scaled_dot_product_attention(query, key[:, :, :4], value[:, :, :4], scale=0.3)
    outside = segments() < 0
    assert outside.any()
    torch.testing.assert_close(merged.transpose(1, 2)[outside], alone.transpose(1, 2)[outside])
