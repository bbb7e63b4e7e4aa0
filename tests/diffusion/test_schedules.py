"""Number and choice of the places revealed at each step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.decoding.diffusion.denoising_loop import candidates
from espalier.harness.decoding.diffusion.denoising_settings import Denoising, counts, drawn_counts
from espalier.harness.errors import UserError
from espalier.harness.specs.generation import REMASKING, SCHEDULES


def read(**settings) -> Denoising:
    return Denoising.of(settings, DiffusionFacts(92, (2,)))


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shift", [0.33, 1.0, 3.0])
def test_counts_are_at_least_one_and_sum_up(schedule, shift) -> None:
    for places in range(1, 40):
        for steps in range(1, places + 1):
            reveals = counts(schedule, places, steps, shift)
            assert len(reveals) == steps or schedule == "timesteps"
            assert min(reveals) >= 1
            assert sum(reveals) == places


def test_even_counts_leave_the_rest_to_the_first_steps() -> None:
    assert counts("linear", 10, 4) == (3, 3, 2, 2)


def released(curve, places, steps) -> tuple[int, ...]:
    """Places by step of a curve on a grid in single precision, dealt out place by place as LaViDa's code does it."""
    reached = (curve(torch.linspace(0, 1, steps + 1)) * torch.tensor([places])).to(torch.int64)
    dealt = torch.clamp(reached[1:] - reached[:-1], min=1)
    extra, step = int(dealt.sum()) - places, 0
    while extra > 0:
        if dealt[step % steps] > 1:
            dealt[step % steps] -= 1
            extra -= 1
        step += 1
    return tuple(dealt.flip(0).tolist())


#: 1,062 answers: all up to 40 places, and the first steps of longer ones.
PAIRS = [(places, steps) for places in range(1, 41) for steps in range(1, places + 1)]
PAIRS += [(places, steps) for places in (64, 96, 100, 128, 256) for steps in range(1, 49)]
PAIRS += [(64, 64), (128, 128)]
CURVES = {
    **{
        f"shift {s}": (lambda t, s=s: s * t / (1 + (s - 1) * t), "shift", s)
        for s in (0.33, 1 / 3, 0.5, 1, 2, 3, 5, 10)
    },
    "cosine": (lambda t: 1 - 0.5 * (1 + torch.cos(math.pi * t)), "cosine", 3.0),
    "logit_normal": (
        lambda t: 0.5 * (1 + torch.erf(torch.log(t / (1 - t)) / torch.sqrt(torch.tensor(2.0)))),
        "logit_normal",
        3.0,
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CURVES)
def test_curves_are_those_of_the_release_for_every_length(name) -> None:
    curve, schedule, shift = CURVES[name]
    assert len(PAIRS) == 1062
    differing = [pair for pair in PAIRS if counts(schedule, *pair, shift) != released(curve, *pair)]
    assert differing == []


def test_maskgits_cosine_unveils_few_places_at_first() -> None:
    reveals = counts("maskgit", 64, 8)
    assert (reveals, list(reveals)) == ((2, 3, 6, 8, 10, 11, 12, 12), sorted(reveals))


def test_steps_are_a_share_of_a_block_and_a_length_is_the_models_own() -> None:
    facts = DiffusionFacts(92, (2,), length=256, block=128)
    assert Denoising.of({}, facts).steps == 256
    half = Denoising.of({"step_ratio": 0.5, "max_new_tokens": 100}, facts)
    assert (half.block, half.steps) == (100, 50)
    assert Denoising.of({"max_new_tokens": 1024}, facts).blocks == 8


def test_blocks_follow_one_another() -> None:
    how = read(max_new_tokens=8, block_length=4, steps=4, schedule="linear")
    assert (how.reveals, read(max_new_tokens=5).reveals) == ((2, 2, 2, 2), (1,) * 5)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"block_length": 5}, "max_new_tokens=16 is not a multiple of generation.block_length=5"),
        ({"block_length": 32}, "max_new_tokens=16 is not a multiple of generation.block_length=32"),
        ({"steps": 17}, "generation.steps=17 is above generation.max_new_tokens=16"),
        ({"steps": 6, "block_length": 4}, "generation.steps=6 is not divisible by 4"),
        ({"step_ratio": 0.5, "steps": 8}, "steps=8 and generation.step_ratio=0.5 both set"),
        (
            {"step_ratio": 0.05},
            "step_ratio=0.05 leaves a block of 16 places no step; valid: 0.0625",
        ),
        ({"threshold": 0.9, "steps": 8}, "steps=8 with generation.threshold=0.9"),
        ({"threshold": 0.9, "remasking": "margin"}, "remasking='margin' with generation.threshold"),
        ({"shift": 5.0}, "shift=5 changes nothing without schedule=shift"),
        ({"stop_words": ["x"]}, "stop_words=.'x'. changes nothing without stop=freeze"),
        ({"top_k": 5}, "top_k=5 changes nothing without a temperature above 0"),
        ({"top_p": 0.9, "temperature": 0.5, "do_sample": False}, "top_p=0.9 changes nothing"),
        ({"schedule": "sudden"}, "generation.schedule='sudden'"),
        ({"eps": 0.01}, "eps=0.01 changes nothing without schedule=timesteps"),
        ({"alg_temp": 0.1, "remasking": "random"}, "alg_temp=0.1 changes nothing"),
        ({"alg_temp": 0.1, "threshold": 0.9}, "alg_temp=0.1 with generation.threshold=0.9"),
        ({"schedule": "origin"}, "remasking='low_confidence' with generation.schedule='origin'"),
        ({"infill": "no mark"}, "generation.infill='no mark' has no place to fill; valid: a text"),
        ({"infill": "<mask:2> <mask:0>"}, "has a mark that is none; valid"),
        ({"infill": "a<mask:3>", "steps": 4}, "generation.steps=4 is above the places to fill=3"),
        ({"num_beams": 3}, "generation.num_beams=3 is for models that generate one token"),
        *(
            ({name: 3}, f"generation.{name}=3 is for models that .*valid: max_new")
            for name in (
                *("typical_p", "length_penalty", "eos_token_id", "max_length", "suppress_tokens"),
                *("stop_strings", "min_length", "early_stopping", "max_time", "penalty_alpha"),
                "min_p",
            )
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, line) -> None:
    with pytest.raises(UserError, match=line):
        read(**{"max_new_tokens": 16, **settings})


def test_a_text_to_fill_sets_its_length_and_is_not_cut() -> None:
    how = read(infill="a <mask:3> b <mask>", max_new_tokens=128, block_length=2)
    assert (how.block, how.steps, how.stop) == (4, 4, "none")
    # Four masked of ten.
    whole = how.starting_from([5, 92, 92, 92, 5, 5, 5, 92, 5, 5], DiffusionFacts(92, (2,)))
    assert (whole.length, whole.block, whole.reveals) == (10, 10, (1,) * 4)
    assert whole.scored == (4, 3, 2, 1)
    assert read(infill="<mask:4>", stop="cut", steps=2).reveals == (2, 2)


def test_timesteps_of_dream_unmask_what_times_leave() -> None:
    """Its first steps round down to nothing and are not run; the last unmasks the rest."""
    assert [counts("timesteps", *sizes) for sizes in ((16, 16), (15, 16), (16, 4))] == [
        (1,) * 14 + (2,),
        (1,) * 13 + (2,),
        (3, 4, 4, 5),
    ]
    assert counts("timesteps", 16, 4, eps=0.5) == (2, 1, 2, 11)


def test_places_with_chances_of_their_own_are_unmasked_at_their_times() -> None:
    """20,000 places in 5 steps: 1 - s / t of those left, by shares within four standard deviations."""
    n, steps, eps = 20_000, 5, 0.1
    uniform = torch.rand(n, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    unmasked, left = drawn_counts(uniform, steps, eps), n
    times = torch.linspace(1, eps, steps + 1).tolist()
    assert len(unmasked) == steps
    for count, (t, s) in zip(unmasked[:-1], pairwise(times), strict=False):
        share = 1 - s / t
        assert abs(count - share * left) < 4 * (share * (1 - share) * left) ** 0.5
        left -= count
    assert unmasked[-1] == left
    assert drawn_counts(torch.tensor([0.95, 0.92, 0.05]), 10, 0.1) == (2, 1)


#: No word is silent.
NONE = torch.zeros(0, dtype=torch.long)


def drawn(logits, silent=(), seed=3, **how):
    """Words and confidences of the places (1, M) of one row."""
    settings = read(max_new_tokens=16, **how)
    generators = [torch.Generator().manual_seed(seed)]
    return candidates(logits, torch.tensor(silent).long(), settings, generators, [logits.shape[1]])


def test_a_word_that_is_forbidden_is_never_said() -> None:
    logits = torch.tensor([[[5.0, 4.0, 1.0], [0.0, 0.0, 9.0]]])
    for temperature in (0.0, 2.0):
        words, confidence = drawn(logits, (0,), temperature=temperature)
        assert 0 not in words
        allowed = logits[..., 1:].double().softmax(-1)
        expected = allowed.gather(-1, (words - 1).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(confidence, expected)


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        ({"temperature": 1.0}, range(8)),
        ({"temperature": 0.7}, range(8)),
        ({"temperature": 1.5, "top_k": 3}, [2, 4, 7]),
        ({"do_sample": True, "top_p": 0.8}, [2, 4, 7]),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.5}, [4, 7]),
    ],
)
def test_words_are_drawn_from_what_the_settings_leave_of_the_softmax(how, allowed) -> None:
    """Chi-square with 200,000 draws of a fixed seed, below the value that one seed in 1,000 exceeds."""
    logits = torch.tensor([0.1, -1.0, 1.2, -0.5, 2.0, 0.0, -2.0, 1.7])
    draws = 200_000
    words, _ = drawn(logits.expand(1, draws, 8), **how)
    shares = torch.zeros(8, dtype=torch.double)
    kept = torch.tensor(list(allowed))
    shares[kept] = (logits[kept].double() / how.get("temperature", 1.0)).softmax(-1)
    seen = torch.bincount(words[0], minlength=8).double()
    assert not seen[shares == 0].any()
    expected = shares[kept] * draws
    statistic = float(((seen[kept] - expected) ** 2 / expected).sum())
    assert statistic < CHI_SQUARE[len(kept) - 1]
    greedy = logits.argmax()
    assert (words == greedy).double().mean() < 0.9


#: Degrees of freedom: the value that a chi-square variable exceeds with a probability of 0.001.
CHI_SQUARE = {1: 10.83, 2: 13.82, 7: 24.32}


def test_a_row_draws_the_same_whatever_its_batch() -> None:
    logits = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    settings = read(max_new_tokens=16, temperature=1.0)
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    together, _ = candidates(logits, NONE, settings, seeds, [5, 3])
    alone, _ = candidates(logits[1:, :3], NONE, settings, [torch.Generator().manual_seed(2)], [3])
    assert torch.equal(together[1, :3], alone[0])
    # The next step goes on from here.
    next_alone = torch.Generator().manual_seed(2)
    torch.empty(3, dtype=torch.double).uniform_(generator=next_alone)
    assert torch.equal(seeds[1].get_state(), next_alone.get_state())


@pytest.mark.parametrize("remasking", REMASKING)
def test_places_are_ranked_by_the_rule(remasking) -> None:
    logits = torch.tensor([[[2.0, 1.9, -9.0], [1.0, 0.2, 0.2], [0.5, 0.4, 0.3]]])
    words, confidence = drawn(logits, remasking=remasking)
    p = logits.double().softmax(-1)[0]
    expected = {
        "low_confidence": p.max(-1).values,
        "entropy": (p * (p + 1e-10).log()).sum(-1),
        "margin": p[:, 0] - p[:, 1],
        "random": torch.rand(3, dtype=torch.double, generator=torch.Generator().manual_seed(3)),
    }
    assert words.tolist() == [[0, 0, 0]]
    torch.testing.assert_close(confidence[0], expected[remasking])
    orders = {tuple(rule.argsort().tolist()) for rule in expected.values()}
    assert len(orders) > 2  # The rules differ here.


def test_places_are_drawn_in_proportion_to_the_softmax_of_their_confidence() -> None:
    """Chi-square of the first of three places in 4,000 rows; and of the second, given the first."""
    logits = torch.tensor([[2.0, 0.5, -1.0], [1.0, 0.2, 0.2], [0.5, 0.4, 0.3]])
    rows = 4_000
    generators = [torch.Generator().manual_seed(seed) for seed in range(rows)]
    settings = read(max_new_tokens=16, alg_temp=0.3)
    words, confidence = candidates(
        logits.expand(rows, 3, 3), NONE, settings, generators, [3] * rows
    )
    assert not words.any()
    weights = (logits.double().softmax(-1)[:, 0] / 0.3).softmax(-1)
    order = confidence.argsort(1, descending=True)
    for chosen, shares in (
        (order[:, 0], weights),
        (order[order[:, 0] == 0, 1], torch.cat([weights[:1] * 0, weights[1:] / weights[1:].sum()])),
    ):
        expected = shares * len(chosen)
        seen = torch.bincount(chosen, minlength=3).double()
        kept = shares > 0
        statistic = float(((seen - expected)[kept] ** 2 / expected[kept]).sum())
        assert statistic < CHI_SQUARE[int(kept.sum()) - 1]
        assert seen[~kept].sum() == 0
