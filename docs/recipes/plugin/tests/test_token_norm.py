from __future__ import annotations

import pytest
from PIL import Image

import espalier


def test_the_longest_tokens_stay():
    model = espalier.load("seedling")
    with espalier.apply(model, "token_norm", ratio=0.9, p=1.0) as pruned:
        answer = pruned.ask(Image.new("RGB", (96, 96)), "is there a star ?")
    assert (answer.visual, answer.kept) == (144, 14)


def test_a_wrong_power_is_one_line():
    with pytest.raises(espalier.UserError, match=r"p=0.5.*1 or more"):
        espalier.apply(espalier.load("seedling"), "token_norm", p=0.5)
