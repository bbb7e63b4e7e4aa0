"""A drafter in its own process: the same answers, real overlap, and nothing lost or left when it dies or hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest
import torch

from harness.decoding.drafts import Draft
from harness.decoding.machine import DrafterLost, Machine
from harness.decoding.processes import Factory, Processes
from harness.decoding.rules import Greedy
from tests import decoding_drafters as drafters

LIMIT = 40


class Target:
    def __init__(self, step: float = 0.0) -> None:
        self._step = step

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[torch.Tensor]:
        time.sleep(self._step)
        ends = range(len(draft.tokens) + 1)
        return [torch.tensor(drafters.following([*tokens, *draft.tokens[:end]])) for end in ends]


def plain() -> list[int]:
    tokens: list[int] = []
    while len(tokens) < LIMIT:
        tokens.append(drafters.following(tokens))
    return tokens


def decode(factory: Factory, gamma: int, overlap: bool, step: float = 0.0, **settings):
    with Processes(factory, **settings) as transport:
        process = transport.process_id
        machine = Machine(transport.drafter, Target(step), Greedy(), transport, gamma, overlap)
        trace = machine.run(LIMIT)
    assert process is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)  # it is gone, and has been waited for
    return trace


@pytest.mark.parametrize("overlap", [False, True])
def test_the_answer_is_the_targets(overlap: bool) -> None:
    trace = decode(drafters.quick, 3, overlap)
    assert trace.tokens == plain()
    assert trace.degraded is None
    assert trace.rollbacks > 3


def test_both_sides_are_busy_at_the_same_time() -> None:
    gamma = 2
    trace = decode(drafters.slow, gamma, True, gamma * drafters.STEP)
    assert trace.tokens == plain()
    assert trace.overlap is not None
    assert trace.overlap > 0.6  # 1 but for what messages and a busy machine cost
    in_turn = decode(drafters.slow, gamma, False, gamma * drafters.STEP)
    assert in_turn.overlap is not None
    assert in_turn.overlap < 0.2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_killed_drafter_loses_nothing(overlap: bool) -> None:
    trace = decode(drafters.dying, 3, overlap)
    assert trace.tokens == plain()
    assert trace.degraded == "the drafter's process ended by signal 9"


def test_a_hung_drafter_is_given_up() -> None:
    start = time.perf_counter()
    trace = decode(drafters.hanging, 3, True, patience=0.5)
    assert trace.tokens == plain()
    assert trace.degraded == "the drafter did not answer within 0.5 s"
    assert time.perf_counter() - start < 50  # it would have slept a minute


def test_a_drafter_that_cannot_be_built_is_an_error_at_once() -> None:
    with pytest.raises(DrafterLost, match="exit status 1"), Processes(drafters.broken):
        pass


def test_each_side_may_have_its_own_cores() -> None:
    before = os.sched_getaffinity(0)
    first, last = min(before), max(before)
    with Processes(drafters.quick, cores=((first,), (last,))) as transport:
        assert os.sched_getaffinity(0) == {first}
        assert transport.process_id is not None
        assert os.sched_getaffinity(transport.process_id) == {last}
    assert os.sched_getaffinity(0) == before
