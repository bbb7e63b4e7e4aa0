"""The state machine under a virtual clock compared with the expected speeds, and the simulation command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from espalier.harness.decoding.speculative.decoding_record import DecodingTrace
from espalier.harness.decoding.speculative.drafts import Draft, Greedy
from espalier.harness.decoding.speculative.speculative_summary import (
    best_window,
    parallel_speedup,
    parallel_tokens,
    sequential_speedup,
    sequential_tokens,
)
from espalier.harness.decoding.speculative.state_machine import Machine
from lab.analytic.parallelvlm_formulas import acceptance_of_run
from lab.analytic.speculative_simulation import Virtual, played
from lab.analytic.speculative_simulation import main as plan


@dataclass
class Counting:
    """Target and drafter in one: the target counts, and a share of the drafted numbers are one too high."""

    wrong: Sequence[bool]

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        start = len(tokens)
        return Draft(tuple(n + self.wrong[n] for n in range(start, start + count)))

    def rows(self, tokens: Sequence[int], draft: Draft) -> range:
        start = len(tokens)
        return range(start, start + len(draft.tokens) + 1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("acceptance", "gamma", "target", "draft"),
    [(0.8, 5, 5.0, 1.0), (0.9, 9, 9.0, 1.0), (0.5, 3, 1.7, 1.0), (0.95, 2, 1.68, 1.0)],
)
def test_the_virtual_clock_reproduces_the_expected_speed(acceptance, gamma, target, draft) -> None:
    length = 30_000
    numbers = torch.rand(2 * length, generator=torch.Generator().manual_seed(7))
    pair = Counting((numbers >= acceptance).tolist())

    def traced(overlap: bool) -> DecodingTrace:
        return Machine(pair, pair, Greedy(), Virtual(target, draft), gamma, overlap).run(length)

    at_once, in_turn = traced(overlap=True), traced(overlap=False)
    for trace, speedup, tokens in (
        (at_once, parallel_speedup, parallel_tokens),
        (in_turn, sequential_speedup, sequential_tokens),
    ):
        assert trace.tokens == list(range(length))
        measured = length * target / trace.seconds
        assert measured == pytest.approx(speedup(acceptance, gamma, target, draft), rel=0.01)
        assert trace.tokens_per_target_forward == pytest.approx(tokens(acceptance, gamma), rel=0.01)
    # A run of parallel decoding crosses windows, so its mean gives the acceptance back.
    assert acceptance_of_run(at_once.mean_run) == pytest.approx(acceptance, rel=0.01)


@pytest.mark.parametrize(
    ("acceptance", "gamma", "tokens"),
    [(0.8, 5, 2.283199), (0.9, 9, 4.049900), (0.5, 3, 1.272727), (1.0, 9, 9), (0.0, 4, 1)],
)
def test_worked_examples_of_the_expected_speed(acceptance, gamma, tokens) -> None:
    assert parallel_tokens(acceptance, gamma) == pytest.approx(tokens, abs=1e-6)
    assert sequential_tokens(1.0, gamma) == gamma + 1


def test_what_is_no_acceptance_and_no_window_is_refused() -> None:
    for acceptance, gamma in ((1.1, 2), (-0.1, 2), (0.5, 0)):
        with pytest.raises(ValueError, match=r"acceptance|gamma"):
            parallel_tokens(acceptance, gamma)


@pytest.mark.slow
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


@pytest.mark.parametrize(("acceptance", "window"), [(0.0, 1), (0.33, 2), (0.98, 3), (1.0, 3)])
def test_a_draft_that_is_seldom_right_gets_a_smaller_window(acceptance: float, window: int) -> None:
    assert best_window(acceptance, 2.6, 1.0) == window


def test_no_window_promises_more_than_the_best() -> None:
    for acceptance in (0.1, 0.5, 0.9, 0.99):
        for c in (0.4, 1.0, 1.5, 3.7, 9.2):
            window = best_window(acceptance, c, 1.0)
            gains = [parallel_speedup(acceptance, gamma, c, 1.0) for gamma in range(1, 40)]
            assert gains[window - 1] == pytest.approx(max(gains))
