"""Which patches show an object."""

from __future__ import annotations

import torch

from lab.bench.object_patches import covered_patches


def test_a_patch_shows_a_box_that_covers_half_of_it() -> None:
    covered = covered_patches([(4, 0, 16, 8)], side=3, pixels=24).view(3, 3)  # patches of 8 pixels
    assert covered.tolist() == [[True, True, False], [False] * 3, [False] * 3]
    assert not covered_patches([(5, 0, 8, 8)], side=3, pixels=24).any()
    assert torch.equal(covered_patches([], 2, 8), torch.zeros(4, dtype=torch.bool))
