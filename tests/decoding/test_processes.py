"""A drafter in its own process: the same answers, real overlap, and nothing lost or left when it dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from harness.decoding.drafts import Draft
from harness.decoding.machine import READING, DrafterLost, Machine
from harness.decoding.processes import Factory, Processes
from harness.decoding.rules import Greedy
from tests.decoding import drafters as drafters

LIMIT = 40


class Target:
    def __init__(self, step: float = 0.0) -> None:
        self._step = step

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[torch.Tensor]:
        drafters.work(self._step)
        ends = range(len(draft.tokens) + 1)
        return [torch.tensor(drafters.following([*tokens, *draft.tokens[:end]])) for end in ends]


def plain() -> list[int]:
    tokens: list[int] = []
    while len(tokens) < LIMIT:
        tokens.append(drafters.following(tokens))
    return tokens


def decode(
    factory: Factory, gamma: int, overlap: bool, step: float = 0.0, limit: int = LIMIT, **settings
):
    with Processes(factory, **settings) as transport:
        process = transport.process_id
        machine = Machine(transport.drafter, Target(step), Greedy(), transport, gamma, overlap)
        trace = machine.run(limit)
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


def overlap(core: int, other: int) -> float:
    """How far two equally busy sides work at the same time on these cores."""
    gamma = 2
    target = Target(gamma * drafters.STEP)
    with Processes(drafters.slow, cores=((core,), (other,))) as transport:
        trace = Machine(transport.drafter, target, Greedy(), transport, gamma, True).run(8)
    assert trace.tokens == plain()[:8]
    assert trace.overlap is not None
    return trace.overlap


def share_of(core: int) -> float:
    """What part of a core's time one busy process gets just now."""
    os.sched_setaffinity(0, (core,))
    start = time.perf_counter()
    drafters.work(0.2)
    return 0.2 / (time.perf_counter() - start)


def possible(core: int, other: int) -> float:
    """What two busy processes that know nothing of each other get of these cores at once.

    Asked of one core at a time, a third process would always stand on the one that is not looked at.
    """
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        list(pool.map(abs, range(2)))  # both have started
        return min(pool.map(share_of, (core, other)))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_sides_overlap_on_two_cores_and_not_on_one() -> None:
    """However long each side takes; on one core only one works at a time."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert overlap(first, first) < 0.3
    found: list[tuple[float, float]] = []
    for _ in range(3):
        share = overlap(first, second)
        if share > 0.6:
            return
        found.append((share, possible(first, second)))
    free = [share for share, at_once in found if at_once > 0.9]
    assert len(free) < len(found), f"both cores were free each time, and the sides shared {free}"
    pytest.skip(f"other work keeps the cores busy (overlap, possible): {found}")


def test_sides_in_turn_do_not_overlap() -> None:
    trace = decode(drafters.slow, 2, False, 2 * drafters.STEP, limit=6)
    assert trace.overlap is not None
    assert trace.overlap < 0.2


def test_reading_a_chat_and_its_prompt_does_not_count_against_the_patience_of_a_round() -> None:
    """Both take longer than a round may; a draft behind that takes no longer than one."""
    patience = 0.4
    with Processes(drafters.hanging, patience=patience) as transport:
        transport.drafter.begin(1.5 * patience)
        machine = Machine(transport.drafter, Target(), Greedy(), transport, 3, True)
        start = time.perf_counter()
        trace = machine.run(LIMIT)
    assert trace.tokens == plain()
    assert trace.degraded == "the drafter did not answer within 0.4 s"
    assert len(trace.rounds) > 3  # some were drafted for before it hung
    assert time.perf_counter() - start < patience * READING  # that much a prompt alone may take


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


@pytest.mark.parametrize("number", [signal.SIGINT, None], ids=["Ctrl-C", "closed"])
def test_a_drafter_at_work_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], number: int | None
) -> None:
    with Processes(drafters.slow) as transport:
        assert transport.process_id is not None
        transport.drafter.draft([1, 2, 3], 20)
        time.sleep(2 * drafters.STEP)
        if number is not None:
            os.kill(transport.process_id, number)  # a terminal sends it to both sides
    assert capfd.readouterr().err == ""
