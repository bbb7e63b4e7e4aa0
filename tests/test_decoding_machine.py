"""The state machine against slow specifications of each way of decoding, and against expected speeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.decoding.chance import Chance
from harness.decoding.drafts import Draft, walk
from harness.decoding.machine import DrafterLost, Machine
from harness.decoding.plan import main as plan
from harness.decoding.plan import played
from harness.decoding.renewal import (
    acceptance_of_run,
    parallel_speedup,
    parallel_tokens,
    sequential_speedup,
    sequential_tokens,
)
from harness.decoding.rules import Greedy, Sampling
from harness.decoding.trace import Trace
from harness.decoding.transports import Sequential, Virtual

Next = Callable[[Sequence[int]], int]
END = 0


def language(seed: int, words: int) -> Next:
    """A target: the next token is a hash of the last three."""

    def following(tokens: Sequence[int]) -> int:
        return random.Random(f"{seed}{tuple(tokens[-3:])}{len(tokens) // 7}").randrange(words)

    return following


@dataclass
class Table:
    """Target and drafter in one: what follows is `target`; drafted tokens are wrong where `wrong` says so."""

    target: Next
    wrong: Callable[[Sequence[int]], bool] = lambda tokens: False
    drafts: int = 0
    forwards: int = 0

    def guess(self, tokens: Sequence[int]) -> int:
        right = self.target(tokens)
        return right + 1 if self.wrong(tokens) else right

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        self.drafts += count
        found = list(tokens)
        for _ in range(count):
            found.append(self.guess(found))
        return Draft(tuple(found[len(tokens) :]))

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[torch.Tensor]:
        self.forwards += 1
        ends = range(len(draft.tokens) + 1)
        return [torch.tensor(self.target([*tokens, *draft.tokens[:end]])) for end in ends]


def plain(target: Next, limit: int, ends: Sequence[int] = ()) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit and not (tokens and tokens[-1] in ends):
        tokens.append(target(tokens))
    return tokens


def two_modes(table: Table, gamma: int, enough: int) -> list[list[int]]:
    """Parallel decoding written out with its two modes; returns the verified answer after each round."""
    x: list[int] = []
    mode, rounds = "pre", []
    while len(rounds) < enough:
        start = len(x)
        ahead = list(x)
        for _ in range(gamma):
            ahead.append(table.guess(ahead))
        if mode == "pre":
            true = table.target(x)
            if ahead[start] == true:
                x, mode = ahead, "post"
            else:
                x = [*x, true]
        else:
            first = start - gamma + 1
            for place in range(first, start + 1):
                true = table.target(ahead[:place])
                if ahead[place] != true:
                    x, mode = [*ahead[:place], true], "pre"
                    break
            else:
                x = ahead
        rounds.append(x if mode == "pre" else x[: len(x) - gamma + 1])
    return rounds


def in_turn(table: Table, gamma: int, enough: int) -> list[list[int]]:
    """Speculative decoding written out: draft, judge, one token of the target's own."""
    x: list[int] = []
    rounds = []
    while len(rounds) < enough:
        ahead = list(x)
        for _ in range(gamma):
            ahead.append(table.guess(ahead))
        place = len(x)
        while place < len(ahead) and ahead[place] == table.target(ahead[:place]):
            place += 1
        x = [*ahead[:place], table.target(ahead[:place])]
        rounds.append(x)
    return rounds


def verified_after(trace: Trace) -> list[int]:
    lengths, total = [], 0
    for one in trace.rounds:
        total += one.accepted + one.own
        lengths.append(total)
    return lengths


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    gamma=st.integers(1, 9),
    share=st.floats(0, 1),
    overlap=st.booleans(),
    limit=st.integers(1, 40),
)
def test_rounds_are_those_of_the_written_out_decoders(seed, gamma, share, overlap, limit) -> None:
    def wrong(tokens: Sequence[int]) -> bool:
        return random.Random(f"{seed}/{tuple(tokens)}").random() < share

    table = Table(language(seed, 50), wrong)
    trace = Machine(table, table, Greedy(), Sequential(), gamma, overlap).run(limit)
    assert trace.tokens == plain(table.target, limit)
    slow = two_modes if overlap else in_turn
    expected = slow(Table(table.target, wrong), gamma, len(trace.rounds))
    assert verified_after(trace) == [len(x) for x in expected]
    longest = plain(table.target, len(expected[-1]))
    assert all(x == longest[: len(x)] for x in expected)
    assert table.forwards == len(trace.rounds)
    assert table.drafts == gamma * len(trace.rounds)
    before = verified_after(trace)[-2] if len(trace.rounds) > 1 else 0
    assert before < limit  # no round too many


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    gamma=st.integers(1, 9),
    overlap=st.booleans(),
    always=st.sampled_from([True, False, None]),
)
def test_the_end_of_sequence_inside_a_window_ends_the_answer(seed, gamma, overlap, always) -> None:
    def wrong(tokens: Sequence[int]) -> bool:
        return len(tokens) % 3 == 1 if always is None else not always

    table = Table(language(seed, 6), wrong)
    trace = Machine(table, table, Greedy(), Sequential(), gamma, overlap, ends=(END,)).run(40)
    assert trace.tokens == plain(table.target, 40, (END,))


def test_a_drafter_that_is_always_right_and_one_that_is_always_wrong() -> None:
    target = language(3, 1000)
    for overlap, clean in ((True, 4), (False, 5)):
        right = Machine(Table(target), Table(target), Greedy(), Sequential(), 4, overlap).run(41)
        assert [one.accepted + one.own for one in right.rounds[1:]] == [clean] * len(
            right.rounds[1:]
        )
        assert right.rollbacks == 0
        assert right.mean_run is None
        assert right.runs[1] == sum(one.accepted for one in right.rounds)
        lost = Table(target, lambda tokens: True)
        wrong = Machine(lost, lost, Greedy(), Sequential(), 4, overlap).run(41)
        assert [one.accepted + one.own for one in wrong.rounds] == [1] * 41
        assert wrong.mean_run == 0
        assert wrong.acceptance == 0


def test_without_a_drafter_the_machine_decodes_plainly() -> None:
    table = Table(language(1, 50))
    trace = Machine(None, table, Greedy(), Sequential()).run(17)
    assert trace.tokens == plain(table.target, 17)
    assert [(one.checked, one.own) for one in trace.rounds] == [(0, True)] * 17
    assert trace.tokens_per_target_forward == 1
    assert trace.acceptance is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_drafter_loses_nothing(overlap: bool) -> None:
    class Dying(Table):
        def draft(self, tokens: Sequence[int], count: int) -> Draft:
            if self.drafts > 12:
                raise DrafterLost("killed by signal 9")
            return super().draft(tokens, count)

    table = Dying(language(5, 50), lambda tokens: len(tokens) % 5 == 2)
    trace = Machine(table, table, Greedy(), Sequential(), 3, overlap).run(50)
    assert trace.tokens == plain(table.target, 50)
    assert trace.degraded == "killed by signal 9"
    assert [one.drafted for one in trace.rounds].count(0) > 10


def test_bad_settings_are_refused() -> None:
    table = Table(language(0, 5))
    with pytest.raises(ValueError, match="gamma=0"):
        Machine(table, table, Greedy(), Sequential(), 0)
    with pytest.raises(ValueError, match="limit=0"):
        Machine(table, table, Greedy(), Sequential(), 1).run(0)
    with pytest.raises(ValueError, match="parents"):
        Draft((1, 2), parents=(1, -1))
    with pytest.raises(ValueError, match="rows"):
        Draft((1, 2), rows=(None,))
    for acceptance, gamma in ((1.1, 2), (-0.1, 2), (0.5, 0)):
        with pytest.raises(ValueError, match=r"acceptance|gamma"):
            parallel_tokens(acceptance, gamma)


def lucky(seed: int, share: float) -> Callable[[Sequence[int]], bool]:
    """Wrong at a share of all places, each by its own number and whatever stands before."""
    numbers = torch.rand(60_000, generator=torch.Generator().manual_seed(seed)).tolist()
    return lambda tokens: numbers[len(tokens)] >= share


@pytest.mark.parametrize(
    ("acceptance", "gamma", "target", "draft"),
    [(0.8, 5, 5.0, 1.0), (0.9, 9, 9.0, 1.0), (0.5, 3, 1.7, 1.0), (0.95, 2, 1.68, 1.0)],
)
def test_the_virtual_clock_reproduces_the_expected_speed(acceptance, gamma, target, draft) -> None:
    length = 30_000
    for overlap, speedup, tokens in (
        (True, parallel_speedup, parallel_tokens),
        (False, sequential_speedup, sequential_tokens),
    ):
        table = Table(len, lucky(7, acceptance))  # the target counts
        clock = Virtual(target, draft)
        trace = Machine(Fast(table), Fast(table), Greedy(), clock, gamma, overlap).run(length)
        measured = length * target / trace.seconds
        assert measured == pytest.approx(speedup(acceptance, gamma, target, draft), rel=0.01)
        assert trace.tokens_per_target_forward == pytest.approx(tokens(acceptance, gamma), rel=0.01)
    # A run of parallel decoding crosses windows, so its mean gives the acceptance back.
    trace = Machine(Fast(table), Fast(table), Greedy(), clock, gamma, True).run(length)
    assert trace.mean_run is not None
    assert acceptance_of_run(trace.mean_run) == pytest.approx(acceptance, rel=0.01)


@dataclass
class Fast:
    """The counting target of `Table`, without building every prefix."""

    table: Table

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        start = len(tokens)
        places = [range(place) for place in range(start, start + count)]
        return Draft(tuple(self.table.guess(place) for place in places))

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[torch.Tensor]:
        start = len(tokens)
        return list(torch.arange(start, start + len(draft.tokens) + 1))


def test_worked_examples_of_the_expected_speed() -> None:
    assert parallel_tokens(0.8, 5) == pytest.approx(2.283199, abs=1e-6)
    assert parallel_tokens(0.9, 9) == pytest.approx(4.049900, abs=1e-6)
    assert parallel_tokens(0.5, 3) == pytest.approx(1.272727, abs=1e-6)
    assert parallel_tokens(1.0, 9) == 9
    assert sequential_tokens(1.0, 4) == 5
    assert parallel_tokens(0.0, 4) == 1


# ---------------------------------------------------------------------- sampling


def rows_of(seed: int, words: int) -> Callable[[Sequence[int]], torch.Tensor]:
    """Distributions over a few words, by a hash of the answer so far."""

    def row(tokens: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *tokens)) % 2**31)
        return torch.randn(words, generator=generator, dtype=torch.float64).mul(1.5).softmax(0)

    return row


@dataclass
class Dice:
    """A sampling pair: the target's rows, and a drafter that draws from its own."""

    p: Callable[[Sequence[int]], torch.Tensor]
    q: Callable[[Sequence[int]], torch.Tensor]
    rule: Sampling
    outright: bool = False

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        found, rows = list(tokens), []
        for _ in range(count):
            row = self.q(found)
            token = int(row.argmax()) if self.outright else self.rule.draw(row, len(found), "draft")
            rows.append(None if self.outright else row)
            found.append(token)
        return Draft(tuple(found[len(tokens) :]), tuple(rows))

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[torch.Tensor]:
        ends = range(len(draft.tokens) + 1)
        return [self.p([*tokens, *draft.tokens[:end]]) for end in ends]


@pytest.mark.parametrize(
    ("overlap", "gamma", "outright"),
    [(False, 3, False), (True, 1, False), (True, 3, False), (True, 2, True)],
)
def test_sampled_answers_are_distributed_as_the_targets(overlap, gamma, outright) -> None:
    """Chi-square of 20,000 answers of three words out of four, 64 cells; the limit is the 99.9 % quantile."""
    from scipy.stats import chi2

    words, length, draws = 4, 3, 20_000
    p, q = _remembered(rows_of(1, words)), _remembered(rows_of(2, words))
    counts = torch.zeros(words**length)
    for seed in range(draws):
        rule = Sampling(Chance(seed))
        dice = Dice(p, q, rule, outright)
        trace = Machine(dice, dice, rule, Virtual(1, 1), gamma, overlap).run(length)
        code = 0
        for token in trace.tokens:
            code = code * words + token
        counts[code] += 1
    expected = torch.ones(1, dtype=torch.float64)
    for depth in range(length):
        parts = []
        for code, share in enumerate(expected):
            answer = [(code // words**k) % words for k in range(depth - 1, -1, -1)]
            parts.append(share * p(answer))
        expected = torch.cat(parts)
    statistic = float(((counts - draws * expected) ** 2 / (draws * expected)).sum())
    assert statistic < chi2.ppf(0.999, words**length - 1)


def _remembered(row: Callable[[Sequence[int]], torch.Tensor]) -> Callable:
    kept = cache(row)
    return lambda tokens: kept(tuple(tokens))


def test_a_sampled_run_is_reproducible_and_sees_one_number_for_each_position() -> None:
    p, q = rows_of(1, 8), rows_of(2, 8)
    answers = []
    for _ in range(2):
        rule = Sampling(Chance(11))
        dice = Dice(p, q, rule)
        answers.append(Machine(dice, dice, rule, Sequential(), 3, True).run(20).tokens)
    assert answers[0] == answers[1]
    chance = Chance(11)
    assert chance.uniform(4, "accept") == chance.uniform(4, "accept")
    different = {
        chance.uniform(4, "accept"),
        chance.uniform(5, "accept"),
        chance.uniform(4, "draft"),
    }
    assert len(different) == 3


# ---------------------------------------------------------------------- trees

TREE = (-1, -1, 0, 0, 1, 2, 2, 5)


def test_a_greedy_walk_takes_the_path_that_the_target_takes() -> None:
    #        0      1      (first tokens)
    #      2   3    4
    #    5   6
    #    7
    tokens = (10, 11, 20, 21, 22, 30, 31, 40)
    draft = Draft(tokens, parents=TREE)

    def judged(*says: int) -> tuple[tuple[int, ...], int | None, bool]:
        """Rows: behind the start, then behind each node."""
        verdict = walk(draft, list(torch.tensor(says)), Greedy(), 0)
        return verdict.path, verdict.own, verdict.refused

    rest = [99] * 8
    assert judged(10, 21, *rest[1:]) == ((0, 3), 99, False)
    assert judged(11, 99, 22, *rest[2:]) == ((1, 4), 99, False)
    assert judged(12, *rest) == ((), 12, True)
    says = [10, 20, 99, 31, 99, 99, 99, 77, 99]
    assert judged(*says) == ((0, 2, 6), 77, False)


def test_a_sampled_tree_leaves_the_targets_distribution_alone() -> None:
    from scipy.stats import chi2

    words, draws = 5, 20_000
    p = rows_of(4, words)([])
    draft = Draft((3, 1), parents=(-1, -1))
    counts = torch.zeros(words, dtype=torch.float64)
    for seed in range(draws):
        verdict = walk(draft, [p], Sampling(Chance(seed)), 0)
        token = draft.tokens[verdict.path[0]] if verdict.path else verdict.own
        assert token is not None
        counts[token] += 1
    statistic = float(((counts - draws * p) ** 2 / (draws * p)).sum())
    assert statistic < chi2.ppf(0.999, words - 1)


def test_a_plan_is_played_as_expected(capsys) -> None:
    """With the times of ParallelVLM's largest pair; a message of one forward of the draft costs a ninth."""
    assert played(0.872, 9, 420, 46.6, 0, True) == pytest.approx(
        parallel_speedup(0.872, 9, 420, 46.6), rel=0.02
    )
    slower = played(0.872, 9, 420, 46.6, 46.6, True)
    assert slower == pytest.approx(parallel_speedup(0.872, 9, 420, 46.6) / (1 + 1 / 9), rel=0.02)
    assert (
        plan(["--target", "420", "--draft", "46.6", "--acceptance", "0.9", "--windows", "2"]) == 0
    )
    assert "in turn" in capsys.readouterr().out
    for wrong in (["--acceptance", "1.5"], ["--acceptance", "0.5", "--windows", "0"]):
        assert plan(["--target", "4", "--draft", "1", *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")
