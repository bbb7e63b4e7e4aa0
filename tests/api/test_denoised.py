"""Questions to a model that denoises its answers: kept tokens by step, and refused settings."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

import espalier
from tests.refused import refused

HOW = {"max_new_tokens": 4, "steps": 2}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("none", [144, 144]),
        ("random", [36, 36]),
        ("d3tom", [144, 36]),
        ("fastv", [36, 36]),
        ("fastv_denoising", [144, 36]),
        ("visionzip", [36, 36]),
        ("redvtp", [144, 36]),
        ("fastv_first_step", [36, 36]),
    ],
)
def test_an_answer_tells_its_steps(denoising, scene, method, kept):
    with espalier.apply(denoising, method, ratio=0.75) as pruned:
        answer = pruned.ask(*scene, **HOW)
    assert [len(step) for step in answer.kept_by_step] == kept
    assert (answer.kept_indices, answer.kept) == (answer.kept_by_step[-1], kept[-1])
    assert (answer.cache, answer.ratio) == (1.0, pytest.approx(1 - kept[-1] / 144))
    if method == "none":
        assert answer.flops.share == 1.0
    else:
        # The same steps of the row: tokens that enter a layer are what is paid for, text beside them.
        assert sum(kept) / 288 < answer.flops.share < 1


def test_whole_steps_cost_as_much_as_they_are_many(denoising, scene):
    with espalier.apply(denoising, "none") as plain:
        two, four = (
            plain.ask(*scene, max_new_tokens=4, steps=steps).flops.exact for steps in (2, 4)
        )
    # The head runs for masked places: 4 + 2 of them, or 4 + 3 + 2 + 1.
    assert 1.9 * two < four < 2 * two


def test_each_step_has_its_picture(denoising, scene, tmp_path):
    with espalier.apply(denoising, "d3tom", ratio=0.9) as pruned:
        answer = pruned.ask(*scene, **HOW)
    pictures = [answer.show(tmp_path / f"{step}.png", step=step) for step in (0, 1)]
    plain, few = (picture.axes[0].images[0].get_array() for picture in pictures)
    side = few.shape[0] // 12
    for token in range(144):
        row, column = divmod(token, 12)
        cell = np.s_[row * side : (row + 1) * side, column * side : (column + 1) * side]
        assert np.allclose(plain[cell], few[cell]) == (token in answer.kept_by_step[1])
    assert "144 of 144 visual tokens kept in step 0" in pictures[0].get_suptitle()
    assert np.array_equal(answer.show().axes[0].images[0].get_array(), few)
    assert Image.open(tmp_path / "1.png").size[0] > 200


@pytest.mark.parametrize("step", [2, -1, True, 0.5])
def test_a_step_that_there_is_not(denoising, scene, step):
    with espalier.apply(denoising, "none") as plain:
        answer = plain.ask(*scene, **HOW)
    with pytest.raises(espalier.UserError, match=r"show\(step=.*\): valid: 0 to 1, or None"):
        answer.show(step=step)


def test_who_says_one_token_after_another_has_no_steps(model, scene):
    assert "drops tokens at denoising steps" in refused(espalier.apply, model, "fastv_denoising")
    with espalier.apply(model, "none") as plain:
        answer = plain.ask(*scene, max_new_tokens=2)
        assert answer.kept_by_step == ()
        assert "this answer was not denoised" in refused(answer.show, step=0)
        assert "steps=2 is for models that denoise" in refused(plain.ask, *scene, steps=2)


REFUSED = {
    "needs a model that generates one token": lambda m: espalier.apply(m, "vanilla_sd"),
    "method='pearl' needs a model that": lambda m: espalier.apply(m, "pearl", draft=m),
    "method='h2o' needs a model that": lambda m: espalier.apply(m, "h2o", ratio=0.5),
    "acts inside the vision tower": lambda m: espalier.apply(m, "tome", ratio=0.5),
    "compressor='h2o' needs a model that": lambda m: espalier.apply(
        m, "divprune", ratio=0.5, compressor="h2o"
    ),
    "leaves no token under budget=average": lambda m: espalier.apply(
        m, "d3tom", ratio=0.5, budget="average"
    ),
    "budget='flops' cannot be followed": lambda m: espalier.apply(m, "d3tom", budget="flops"),
    "ratio=0.25 leaves each stage": lambda m: espalier.apply(
        m, "pyramiddrop_denoising", ratio=0.25
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_methods_that_cannot_denoise(denoising, line):
    with pytest.raises(espalier.UserError, match=re.escape(line)):
        REFUSED[line](denoising)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"steps": 5}, "steps=5 is above max_new_tokens=4"),
        ({"block_length": 3}, "max_new_tokens=4 is not a multiple of block_length=3"),
        ({"block_length": 2, "steps": 3}, "steps=3 is not divisible by 2 blocks"),
        ({"num_beams": 2}, "num_beams=2 is for models that generate one token after another"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be a number of at least 0"),
        (
            {"schedule": "sudden"},
            "schedule='sudden' is unknown; valid: cosine, linear, logit_normal, maskgit, origin, shift, timesteps",
        ),
    ],
)
def test_settings_that_cannot_be_followed(denoising, scene, settings, line):
    with espalier.apply(denoising, "d3tom", ratio=0.5) as pruned:
        assert line in refused(pruned.ask, *scene, **{**HOW, "steps": None, **settings})


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"do_sample": True}])
def test_drawing_words_leaves_the_same_seed_the_same_answer(denoising, scene, settings):
    with espalier.apply(denoising, "d3tom", ratio=0.5, seed=3) as pruned:
        answers = [pruned.ask(*scene, **HOW, **settings).text for _ in range(2)]
    assert answers[0] == answers[1]
