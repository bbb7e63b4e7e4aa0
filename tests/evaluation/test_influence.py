"""Contributions of samples against the bootstrap of the aggregate itself, and where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from lmms_eval.tasks.mme.utils import mme_aggregate_results
from lmms_eval.tasks.pope.utils import pope_aggregate_accuracy, pope_aggregate_f1_score
from pycocoevalcap.cider.cider import Cider

from espalier.harness.evaluation.lmms_tasks import quiet
from espalier.harness.evaluation.sample_contributions import (
    ALONE,
    BLOCKS,
    VISITS,
    NoContributions,
    assign_blocks,
    influence,
    is_mean,
    unit_aggregates,
)
from espalier.harness.specs.comparable import grouped
from espalier.harness.stats import by_unit, difference_interval, mean_interval

Raw = list[Any]


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """MME's function logs every category of every resample."""
    with quiet():
        yield


def yes_no(rng: np.random.Generator, n: int, right: float = 0.8) -> Raw:
    """Values as POPE's scoring gives them."""
    truths = rng.choice(["yes", "no"], n)
    other = {"yes": "no", "no": "yes"}
    answers = [str(t) if rng.random() < right else other[t] for t in truths]
    return [
        {"prediction": a, "ground_truth": str(t), "score": float(a == t)}
        for a, t in zip(answers, truths, strict=True)
    ]


def pairs(rng: np.random.Generator, images: int) -> Raw:
    """Values as MME's scoring gives them: two questions an image, right together more often than by chance."""
    values = []
    for image in range(images):
        ease = rng.beta(2, 1)
        values += [
            {
                "question_id": image,
                "category": ("count", "color", "OCR")[image % 3],
                "score": float(rng.random() < ease),
            }
            for _ in range(2)
        ]
    return values


def captions(rng: np.random.Generator, n: int) -> Raw:
    """A caption and three references each, of words as rare as words are."""
    words, chances = [f"w{i}" for i in range(50)], 1 / np.arange(1, 51)
    chances /= chances.sum()
    values = []
    for _ in range(n):
        references = [list(rng.choice(words, 8, p=chances)) for _ in range(3)]
        cut = rng.integers(2, 8)
        caption = references[0][:cut] + list(rng.choice(words, 8 - cut, p=chances))
        texts = [" ".join(reference) for reference in references]
        values.append({"caption": " ".join(caption), "references": texts})
    return values


def cider(values: Sequence[Any]) -> float:
    references = {i: value["references"] for i, value in enumerate(values)}
    captions = {i: [value["caption"]] for i, value in enumerate(values)}
    return float(Cider().compute_score(references, captions)[0])


def group_sum(values: Sequence[Any]) -> float:
    return float(sum(np.mean(scores) for scores in grouped(values).values()))


def renamed(value: Any, draw: int) -> Any:
    """An image that is drawn twice is two images."""
    if isinstance(value, dict) and "question_id" in value:
        return {**value, "question_id": draw}
    return value


def bootstrapped(
    aggregate: Callable[[Raw], float], raw: Raw, units: Sequence[int], resamples: int
) -> np.ndarray[Any, Any]:
    """Aggregates of resampled units: the task's own function, on what it would see."""
    rng = np.random.default_rng(1)
    members = [[i for i, u in enumerate(units) if u == unit] for unit in dict.fromkeys(units)]
    return np.array(
        [
            aggregate([renamed(raw[i], k) for k, unit in enumerate(draw) for i in members[unit]])
            for draw in rng.integers(len(members), size=(resamples, len(members)))
        ]
    )


CASES: dict[str, tuple[Callable[[Raw], float], Callable[[np.random.Generator], Raw], int]] = {
    "f1": (pope_aggregate_f1_score, lambda rng: yes_no(rng, 300), 1),
    "f1 of few": (pope_aggregate_f1_score, lambda rng: yes_no(rng, 40), 1),
    "paired accuracies": (mme_aggregate_results, lambda rng: pairs(rng, 150), 2),
    "cider": (cider, lambda rng: captions(rng, 60), 1),
    "group sum": (
        group_sum,
        lambda rng: [
            (str(g), float(rng.random() < 0.7))
            for g in rng.choice(list("abc"), 200, p=[0.5, 0.3, 0.2])
        ],
        1,
    ),
}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", CASES)
def test_intervals_of_contributions_are_the_bootstraps_of_the_aggregate(name: str) -> None:
    aggregate, make, size = CASES[name]
    raw = make(np.random.default_rng(0))
    units = [i // size for i in range(len(raw))]
    estimate = influence(aggregate, raw, units)
    value = aggregate(raw)
    assert estimate.values.mean() == pytest.approx(value)
    resampled = bootstrapped(aggregate, raw, units, resamples=300 if name == "cider" else 2000)
    assert estimate.stderr == pytest.approx(resampled.std(ddof=1), rel=0.15)
    interval = mean_interval(by_unit(estimate.values, units))
    spread = resampled.std(ddof=1)
    # Of CIDEr the bootstrap is shifted: a caption that is drawn twice makes its own words less rare.
    low, high = np.percentile(resampled, [2.5, 97.5]) - resampled.mean()
    assert interval.value == pytest.approx(value)
    assert interval.low - value == pytest.approx(low, abs=0.35 * spread)
    assert interval.high - value == pytest.approx(high, abs=0.35 * spread)


def test_of_a_mean_contributions_are_the_scores() -> None:
    scores = np.random.default_rng(0).random(50)
    estimate = influence(lambda values: float(np.mean(values)), scores.tolist(), range(50))
    assert estimate.values == pytest.approx(scores)
    assert estimate.stderr == pytest.approx(scores.std(ddof=1) / 50**0.5)


def test_questions_of_one_image_are_no_independent_samples() -> None:
    """Answers of a cluster agree, so the error by clusters is larger than by samples: by the square root of 2."""
    truth = np.random.default_rng(0).random(400) < 0.6
    raw = [float(right) for right in truth for _ in range(2)]
    units = [i // 2 for i in range(800)]
    mean = lambda values: float(np.mean(values))  # noqa: E731
    apart = influence(mean, raw, range(800)).stderr
    assert influence(mean, raw, units).stderr == pytest.approx(apart * 2**0.5, rel=0.01)


@pytest.mark.parametrize(
    ("aggregate", "n"),
    [(np.median, 11), (np.median, 30), (np.median, 200), (np.max, 11), (np.max, 1001)],
)
def test_what_is_not_smooth_has_no_contributions(aggregate: Any, n: int) -> None:
    raw = np.random.default_rng(n).normal(size=n).tolist()
    with pytest.raises(NoContributions, match="does not vary as single samples predict"):
        influence(aggregate, raw, range(n))


def test_nothing_is_concluded_from_a_handful() -> None:
    with pytest.raises(
        NoContributions, match="9 independent samples are too few; valid: at least 10"
    ):
        influence(pope_aggregate_f1_score, yes_no(np.random.default_rng(0), 9), range(9))


def test_an_aggregate_that_fails_on_a_part_has_no_contributions() -> None:
    """MME's function wants both questions of an image: units of single questions break it."""
    raw = pairs(np.random.default_rng(0), 20)
    with pytest.raises(
        NoContributions, match="fails on a part of the samples: AssertionError: MME only"
    ):
        influence(mme_aggregate_results, raw, range(40))
    with pytest.raises(NoContributions, match="of a part of the samples it is None"):
        influence(lambda values: 1.0 if len(values) == 20 else None, [0.0] * 20, range(20))


@pytest.mark.slow
def test_blocks_stand_for_many_units() -> None:
    raw = yes_no(np.random.default_rng(0), 3000)
    blocks = assign_blocks(range(3000), 3000, blocks=200)
    assert sorted(set(blocks)) == list(range(200))
    assert blocks == assign_blocks(range(3000), 3000, blocks=200)
    coarse, fine = (
        influence(pope_aggregate_f1_score, raw, u).stderr for u in (blocks, range(3000))
    )
    assert coarse == pytest.approx(fine, rel=0.15)


def test_how_many_blocks_depends_on_the_number_of_samples_alone() -> None:
    assert assign_blocks(range(ALONE), ALONE, None) == list(range(ALONE))
    assert len(set(assign_blocks(range(9000), 9000, None))) == VISITS // 9000
    assert len(set(assign_blocks(range(200_000), 200_000, None))) == BLOCKS


def test_an_aggregate_may_be_a_mean_of_units_in_the_end() -> None:
    """A question counts if all of its passes are right, and the aggregate is the share of such questions."""

    def circular(values: Sequence[tuple[int, bool]]) -> float:
        hits: dict[int, bool] = {}
        for question, right in values:
            hits[question] = hits.get(question, True) and right
        return 100 * sum(hits.values()) / len(hits)

    raw = [(q, bool((q + p) % 3)) for q in range(7) for p in range(2 if q % 2 else 4)]
    units = [q for q, _ in raw]
    assert dict(zip(units, unit_aggregates(circular, raw, units, circular(raw)), strict=True)) == {
        q: circular([answer for answer in raw if answer[0] == q]) for q in range(7)
    }
    answers = yes_no(np.random.default_rng(0), 50)
    assert (
        unit_aggregates(
            pope_aggregate_f1_score, answers, range(50), pope_aggregate_f1_score(answers)
        )
        is None
    )


def test_f1_that_equals_the_accuracy_by_chance_is_no_mean() -> None:
    """With as many true positives as true negatives F1 is the accuracy."""
    table = [("yes", "yes")] * 20 + [("no", "no")] * 20 + [("yes", "no")] * 6 + [("no", "yes")] * 4
    raw = [{"prediction": a, "ground_truth": t, "score": float(a == t)} for a, t in table]
    scores = [answer["score"] for answer in raw]
    assert pope_aggregate_f1_score(raw) == pytest.approx(pope_aggregate_accuracy(raw))
    assert is_mean(pope_aggregate_accuracy, raw, scores)
    assert not is_mean(pope_aggregate_f1_score, raw, scores)


@pytest.mark.slow
def test_a_paired_difference_covers_the_truth_as_often_as_its_level() -> None:
    """Two methods answer the same questions; their F1 are known from how the answers are drawn."""
    rng = np.random.default_rng(0)
    n, rounds, covered = 150, 120, 0

    def f1(hits: float) -> float:
        # Half of the truths are yes, and either answer is right with this chance.
        return 2 * hits * 0.5 / (2 * hits * 0.5 + 2 * (1 - hits) * 0.5)

    truth = f1(0.75) - f1(0.85)
    for _ in range(rounds):
        wants = rng.random(n) < 0.5
        ease = rng.random(n)  # shared: what is hard for one is hard for the other
        shares = []
        for hits in (0.75, 0.85):
            raw = [
                {"prediction": "yes" if a else "no", "ground_truth": "yes" if t else "no"}
                for a, t in zip(np.where(ease < hits, wants, ~wants), wants, strict=True)
            ]
            shares.append(influence(pope_aggregate_f1_score, raw, range(n)).values)
        gap = difference_interval(*shares)
        covered += gap.low <= truth <= gap.high
    # Binomial with 0.95: 0.02 is one standard error of the share; percentile intervals are a little narrow.
    assert 0.88 <= covered / rounds <= 1.0
