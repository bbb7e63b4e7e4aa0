"""Which patches show an object, and what methods that look at nothing keep of them."""

from __future__ import annotations

import pytest
import torch

from lab.bench import kept_objects as kept


def test_a_patch_shows_a_box_that_covers_half_of_it() -> None:
    found = kept.covered_patches([(4, 0, 16, 8)], side=3, pixels=24).view(
        3, 3
    )  # patches of 8 pixels
    assert found.tolist() == [[True, True, False], [False] * 3, [False] * 3]
    assert not kept.covered_patches([(5, 0, 8, 8)], side=3, pixels=24).any()
    assert torch.equal(kept.covered_patches([], 2, 8), torch.zeros(4, dtype=torch.bool))


@pytest.mark.slow
def test_controls_keep_the_same_share_of_everything(capsys: pytest.CaptureFixture) -> None:
    assert kept.main(["method=none,random,dycoke", "ratio=0.75"]) == 0
    head, none, random, dycoke = capsys.readouterr().out.splitlines()
    assert head.split() == list(kept.KINDS)
    assert none.split()[-4:] == ["1.00", "1.00", "1.00", "0.00"]
    shares = [float(share) for share in random.split()[-4:-1]]
    assert all(abs(share - 0.25) < 0.05 for share in shares)
    assert "0 <= ratio < 0.75" in dycoke
