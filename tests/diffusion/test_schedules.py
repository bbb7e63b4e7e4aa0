"""Number and choice of the places revealed at each step."""

from __future__ import annotations

import math

import pytest
import torch

from espalier.harness.decoding.diffusion.denoising_loop import candidates, unveiled
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.decoding.diffusion.schedules import SCHEDULES, counts
from espalier.harness.errors import UserError


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shift", [0.33, 1.0, 3.0])
def test_counts_are_at_least_one_and_sum_up(schedule, shift) -> None:
    for places in range(1, 40):
        for steps in range(1, places + 1):
            reveals = counts(schedule, places, steps, shift)
            assert len(reveals) == steps
            assert min(reveals) >= 1
            assert sum(reveals) == places


def test_shifted_counts_of_the_released_code() -> None:
    assert counts("shift", 32, 8, 3.0) == (2, 2, 2, 2, 4, 4, 7, 9)
    assert counts("shift", 32, 8, 0.33) == (10, 7, 4, 4, 2, 2, 2, 1)


def test_even_counts_leave_the_rest_to_the_first_steps() -> None:
    assert counts("linear", 10, 4) == (3, 3, 2, 2)


def test_the_cosine_of_the_released_code_is_slow_at_both_ends() -> None:
    assert counts("cosine", 64, 8) == (3, 7, 10, 12, 13, 10, 7, 2)


@pytest.mark.parametrize(("places", "steps"), [(64, 8), (32, 16), (12, 5), (128, 32), (7, 7)])
def test_curves_are_dealt_out_place_by_place(places, steps) -> None:
    def dealt(curve) -> list[int]:
        reached = [int(places * curve(step / steps) + 1e-9) for step in range(steps + 1)]
        reveals = [max(reached[n + 1] - reached[n], 1) for n in range(steps)]
        while sum(reveals) > places:
            for n in range(steps):
                if reveals[n] > 1 and sum(reveals) > places:
                    reveals[n] -= 1
        return reveals[::-1]

    curves = {
        "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2,
        "maskgit": lambda t: math.sin(math.pi * t / 2),
    }
    for name, curve in curves.items():
        assert list(counts(name, places, steps)) == dealt(curve)


def test_maskgits_cosine_unveils_few_places_at_first() -> None:
    reveals = counts("maskgit", 64, 8)
    assert reveals == (2, 3, 6, 8, 10, 11, 12, 12)
    assert list(reveals) == sorted(reveals)


def test_blocks_follow_one_another() -> None:
    how = Denoising.of({"max_new_tokens": 8, "block_length": 4, "steps": 4, "schedule": "linear"})
    assert how.reveals == (2, 2, 2, 2)
    assert Denoising.of({"max_new_tokens": 5}).reveals == (1,) * 5


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"block_length": 5}, "max_new_tokens=16 is not a multiple of generation.block_length=5"),
        ({"block_length": 32}, "max_new_tokens=16 is not a multiple of generation.block_length=32"),
        ({"steps": 17}, "generation.steps=17 is above generation.max_new_tokens=16"),
        ({"steps": 6, "block_length": 4}, "generation.steps=6 is not divisible by 4"),
        ({"schedule": "sudden"}, "generation.schedule='sudden'"),
        ({"num_beams": 3}, "generation.num_beams=3 is for models that generate one token"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given, line) -> None:
    with pytest.raises(UserError, match=line):
        Denoising.of({"max_new_tokens": 16, **given})


def test_the_most_confident_masked_places_are_unveiled() -> None:
    confidence = torch.tensor([[0.9, 0.2, 0.7, 0.7, 0.8]])
    masked = torch.tensor([[False, True, True, True, True]])
    assert unveiled(confidence, masked, 2).tolist() == [[False, False, True, False, True]]
    assert unveiled(confidence, masked, 4).tolist() == masked.tolist()


def test_a_word_that_is_forbidden_is_never_said() -> None:
    logits = torch.tensor([[[5.0, 4.0, 1.0], [0.0, 0.0, 9.0]]])
    for temperature in (0.0, 2.0):
        generators = [torch.Generator().manual_seed(1)]
        words, confidence = candidates(logits, (0,), temperature, generators)
        assert 0 not in words
        allowed = logits[..., 1:].double().softmax(-1)
        expected = allowed.gather(-1, (words - 1).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(confidence, expected)


def test_words_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(1, 4000, 3)
    words, _ = candidates(logits, (), 0.7, [torch.Generator().manual_seed(3)])
    shares = torch.bincount(words[0], minlength=3) / 4000
    assert (shares - (logits[0, 0] / 0.7).softmax(-1)).abs().max() < 0.03
