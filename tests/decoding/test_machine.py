"""The state machine compared with slow specifications of each way of decoding; greedy walks along trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.harness.decoding.speculative.decoding_record import DecodingTrace
from espalier.harness.decoding.speculative.drafts import Draft, Greedy, walk
from espalier.harness.decoding.speculative.state_machine import DrafterLost, Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport

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
        return Draft(tuple(self.ahead(tokens, count)[len(tokens) :]))

    def ahead(self, tokens: Sequence[int], count: int) -> list[int]:
        answer = list(tokens)
        for _ in range(count):
            answer.append(self.guess(answer))
        return answer

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
        ahead = table.ahead(x, gamma)
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
        ahead = table.ahead(x, gamma)
        place = len(x)
        while place < len(ahead) and ahead[place] == table.target(ahead[:place]):
            place += 1
        x = [*ahead[:place], table.target(ahead[:place])]
        rounds.append(x)
    return rounds


def verified_after(trace: DecodingTrace) -> list[int]:
    lengths, total = [], 0
    for step in trace.rounds:
        total += step.accepted + step.target_added
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
    trace = Machine(table, table, Greedy(), SequentialTransport(), gamma, overlap).run(limit)
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
    trace = Machine(table, table, Greedy(), SequentialTransport(), gamma, overlap, ends=(END,)).run(
        40
    )
    assert trace.tokens == plain(table.target, 40, (END,))


def test_a_drafter_that_is_always_right_and_one_that_is_always_wrong() -> None:
    target = language(3, 1000)
    for overlap, clean in ((True, 4), (False, 5)):
        right = Machine(
            Table(target), Table(target), Greedy(), SequentialTransport(), 4, overlap
        ).run(41)
        assert [step.accepted + step.target_added for step in right.rounds[1:]] == [clean] * len(
            right.rounds[1:]
        )
        assert right.rollbacks == 0
        assert right.mean_run is None
        assert right.runs[1] == sum(step.accepted for step in right.rounds)
        lost = Table(target, lambda tokens: True)
        wrong = Machine(lost, lost, Greedy(), SequentialTransport(), 4, overlap).run(41)
        assert [step.accepted + step.target_added for step in wrong.rounds] == [1] * 41
        assert wrong.mean_run == 0
        assert wrong.acceptance == 0


def test_without_a_drafter_the_machine_decodes_plainly() -> None:
    table = Table(language(1, 50))
    trace = Machine(None, table, Greedy(), SequentialTransport()).run(17)
    assert trace.tokens == plain(table.target, 17)
    assert [(step.checked, step.target_added) for step in trace.rounds] == [(0, True)] * 17
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
    trace = Machine(table, table, Greedy(), SequentialTransport(), 3, overlap).run(50)
    assert trace.tokens == plain(table.target, 50)
    assert trace.degraded == "killed by signal 9"
    assert [step.drafted for step in trace.rounds].count(0) > 10


def test_bad_settings_are_refused() -> None:
    table = Table(language(0, 5))
    with pytest.raises(ValueError, match="gamma=0"):
        Machine(table, table, Greedy(), SequentialTransport(), 0)
    with pytest.raises(ValueError, match="limit=0"):
        Machine(table, table, Greedy(), SequentialTransport(), 1).run(0)
    with pytest.raises(ValueError, match="parents"):
        Draft((1, 2), parents=(1, -1))
    with pytest.raises(ValueError, match="rows"):
        Draft((1, 2), rows=(None,))


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
        """Rows: after the start, then after each node."""
        verdict = walk(draft, list(torch.tensor(says)), Greedy(), 0)
        return verdict.path, verdict.target_token, verdict.refused

    unused = [99] * 8
    assert judged(10, 21, *unused[1:]) == ((0, 3), 99, False)
    assert judged(11, 99, 22, *unused[2:]) == ((1, 4), 99, False)
    assert judged(12, *unused) == ((), 12, True)
    says = [10, 20, 99, 31, 99, 99, 99, 77, 99]
    assert judged(*says) == ((0, 2, 6), 77, False)
