"""Sampled answers of the state machine, from chains and trees, compared with the target's own distribution."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from espalier.harness.decoding.speculative.drafts import Draft, RandomNumbers, Sampling, walk
from espalier.harness.decoding.speculative.state_machine import Machine
from lab.analytic.speculative_simulation import Virtual


@dataclass(frozen=True)
class Said:
    """What follows an answer: probabilities, and their sums as plain numbers, which are quicker to draw from."""

    row: Tensor
    sums: list[float]

    def drawn(self, level: float) -> int:
        return min(bisect_right(self.sums, level), len(self.sums) - 1)


def language(seed: int, words: int) -> Callable[[Sequence[int]], Said]:
    """Distributions over a few words, by a hash of the answer so far."""

    @cache
    def distribution(tokens: tuple[int, ...]) -> Said:
        generator = torch.Generator().manual_seed(hash((seed, *tokens)) % 2**31)
        row = torch.randn(words, generator=generator, dtype=torch.float64).mul(1.5).softmax(0)
        return Said(row, list(accumulate(row.tolist())))

    return lambda tokens: distribution(tuple(tokens))


@dataclass
class Dice:
    """A sampling pair: the target's rows, and a drafter that draws from its own."""

    p: Callable[[Sequence[int]], Said]
    q: Callable[[Sequence[int]], Said]
    numbers: RandomNumbers
    outright: bool = False

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        ids, rows = list(tokens), []
        for _ in range(count):
            distribution = self.q(ids)
            drawn = distribution.drawn(self.numbers.uniform(len(ids), "draft"))
            ids.append(int(distribution.row.argmax()) if self.outright else drawn)
            rows.append(None if self.outright else distribution.row)
        return Draft(tuple(ids[len(tokens) :]), tuple(rows))

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[Tensor]:
        ends = range(len(draft.tokens) + 1)
        return [self.p([*tokens, *draft.tokens[:end]]).row for end in ends]


def answer(dice: Dice, gamma: int, overlap: bool, length: int) -> list[int]:
    rule, clock = Sampling(dice.numbers), Virtual(1, 1)
    return Machine(dice, dice, rule, clock, gamma, overlap).run(length).tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "gamma", "outright"),
    [(False, 3, False), (True, 1, False), (True, 3, False), (True, 2, True)],
)
def test_sampled_answers_are_distributed_as_the_targets(overlap, gamma, outright) -> None:
    """Chi-square of 20,000 answers of three words out of four, 64 cells; the limit is the 99.9 % quantile."""
    words, length, draws = 4, 3, 20_000
    p, q = language(1, words), language(2, words)
    counts = torch.zeros(words**length)
    for seed in range(draws):
        tokens = answer(Dice(p, q, RandomNumbers(seed), outright), gamma, overlap, length)
        code = 0
        for token in tokens:
            code = code * words + token
        counts[code] += 1
    expected = torch.ones(1, dtype=torch.float64)
    for depth in range(length):
        parts = []
        for code, share in enumerate(expected):
            tokens = [(code // words**k) % words for k in range(depth - 1, -1, -1)]
            parts.append(share * p(tokens).row)
        expected = torch.cat(parts)
    statistic = float(((counts - draws * expected) ** 2 / (draws * expected)).sum())
    assert statistic < chi2.ppf(0.999, words**length - 1)


def test_a_sampled_run_is_reproducible_and_sees_one_number_for_each_position() -> None:
    p, q = language(1, 8), language(2, 8)
    dice = Dice(p, q, RandomNumbers(11))
    first, second = (answer(dice, 3, True, 20) for _ in range(2))
    assert first == second
    numbers = RandomNumbers(11)
    assert numbers.uniform(4, "accept") == numbers.uniform(4, "accept")
    different = {
        numbers.uniform(4, "accept"),
        numbers.uniform(5, "accept"),
        numbers.uniform(4, "draft"),
    }
    assert len(different) == 3
    # The drafter's plain sums draw what the rule draws.
    (drawn,) = dice.draft([5], 1).tokens
    assert drawn == Sampling(numbers).draw(q([5]).row, 1, "draft")


def test_a_sampled_tree_leaves_the_targets_distribution_alone() -> None:
    words, draws = 5, 20_000
    p = language(4, words)([]).row
    draft = Draft((3, 1), parents=(-1, -1))
    counts = torch.zeros(words, dtype=torch.float64)
    for seed in range(draws):
        verdict = walk(draft, [p], Sampling(RandomNumbers(seed)), 0)
        token = draft.tokens[verdict.path[0]] if verdict.path else verdict.target_token
        assert token is not None
        counts[token] += 1
    assert float(((counts - draws * p) ** 2 / (draws * p)).sum()) < chi2.ppf(0.999, words - 1)


def test_what_is_left_of_a_row_is_what_the_draft_left_of_it() -> None:
    rule = Sampling(RandomNumbers(0))
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.8])
    left = rule.residual(1, p, q)  # the draft knows two ids; what it overrates counts as nothing
    torch.testing.assert_close(left, torch.tensor([0.3, 0.0, 0.2]) / 0.5)
    torch.testing.assert_close(rule.residual(1, p, None), torch.tensor([0.5, 0.0, 0.2]) / 0.7)
    # Only rounding refuses a token of two equal rows: then nothing is left, and the row itself counts.
    assert rule.residual(1, p, p) is p
    assert p.tolist() == pytest.approx([0.5, 0.3, 0.2])
