"""A drafter in its own process: the same answers, real overlap, and no loss when it dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from espalier.harness.decoding.speculative.drafts import Draft, Greedy
from espalier.harness.decoding.speculative.state_machine import DrafterLost, Machine
from espalier.harness.decoding.speculative.transports import Factory, ProcessTransport
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
    with ProcessTransport(factory, **settings) as transport:
        process = transport._process.pid
        machine = Machine(transport, Target(step), Greedy(), transport, gamma, overlap)
        trace = machine.run(limit)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)  # it is gone, and has been waited for
    return trace


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_answer_is_the_targets(overlap: bool) -> None:
    trace = decode(drafters.quick, 3, overlap)
    assert trace.tokens == plain()
    assert trace.degraded is None
    assert trace.rollbacks > 3


class MeetingTarget(Target):
    """Its second verification waits until the drafter drafts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._verifications = folder, 0
        self.met: bool | None = None

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[torch.Tensor]:
        self._verifications += 1
        if self._verifications == 2:
            self.met = drafters.meet(self._folder, "verifying", "drafting")
        return super().rows(tokens, draft)


@pytest.mark.slow
def test_both_sides_work_at_once(tmp_path: Path) -> None:
    """Each waits for the other in the middle of its work: in turn, neither would go on."""
    target = MeetingTarget(tmp_path)
    with ProcessTransport(partial(drafters.Meeting, tmp_path)) as transport:
        trace = Machine(transport, target, Greedy(), transport, 2, True).run(8)
    assert trace.tokens == plain()[:8]
    assert target.met


@pytest.mark.exhaustive
def test_reading_a_chat_and_its_prompt_does_not_count_against_the_patience_of_a_round() -> None:
    """Both take longer than a round may; a later draft that hangs is given up after one round's patience."""
    patience = 2.0
    with ProcessTransport(drafters.hanging, patience=patience) as transport:
        transport.begin(1.5 * patience)
        machine = Machine(transport, Target(), Greedy(), transport, 3, True)
        trace = machine.run(LIMIT)
    assert trace.tokens == plain()
    # The patience with a prompt, READING times as long, is over with the first draft.
    assert trace.degraded == "the drafter did not answer within 2 s"
    assert len(trace.rounds) > 3  # some were drafted for before it hung


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "overlap", "settings", "reason"),
    [
        (drafters.dying, False, {}, "the drafter's process ended by signal 9"),
        (drafters.dying, True, {}, "the drafter's process ended by signal 9"),
        (drafters.hanging, True, {"patience": 2.0}, "the drafter did not answer within 2 s"),
    ],
)
def test_a_lost_drafter_loses_nothing(
    drafter: object, overlap: bool, settings: dict[str, float], reason: str
) -> None:
    trace = decode(drafter, 3, overlap, **settings)
    assert trace.tokens == plain()
    assert trace.degraded == reason


@pytest.mark.slow
def test_a_drafter_that_cannot_be_built_is_an_error_at_once() -> None:
    with pytest.raises(DrafterLost, match="exit status 1"), ProcessTransport(drafters.broken):
        pass


@pytest.mark.slow
def test_each_side_may_have_its_own_cores() -> None:
    before = os.sched_getaffinity(0)
    first, last = min(before), max(before)
    with ProcessTransport(drafters.quick, cores=((first,), (last,))) as transport:
        assert os.sched_getaffinity(0) == {first}
        assert os.sched_getaffinity(transport._process.pid) == {last}
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, None], ids=["Ctrl-C", "closed"])
def test_a_drafter_at_work_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], number: int | None
) -> None:
    with ProcessTransport(drafters.slow) as transport:
        transport.draft([1, 2, 3], 20)
        time.sleep(2 * drafters.STEP)
        if number is not None:
            os.kill(transport._process.pid, number)  # a terminal sends it to both sides
    assert capfd.readouterr().err == ""
