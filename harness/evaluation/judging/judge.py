"""Many questions to one judge: what is known is not asked, what fails is asked again, what is said is kept at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.harness.errors import JudgeLost
from espalier.harness.evaluation.judging.client import Client, Reply, Trouble, request_of
from espalier.harness.evaluation.judging.judge_prompt import Words
from espalier.harness.evaluation.judging.verdicts import Verdict, Verdicts, key_of
from espalier.harness.specs.judge_spec import JudgeSpec

#: What names a sample: its task and its document.
Sample = tuple[str, int]

#: Seconds before a request is repeated for the first time; each time twice that, up to the longest pause.
PAUSE, LONGEST = 1.0, 30.0

#: After so many questions without a verdict, and not one with, the rest is not asked.
HOPELESS = 16


@dataclass(frozen=True)
class Question:
    """What a judge is asked about one sample.

    Attributes:
        sample: what names the sample.
        words: the prompt.
        parts: what stands in its places.
        holds: says whether a text is a verdict that can be scored.
    """

    sample: Sample
    words: Words
    parts: Mapping[str, str]
    holds: Callable[[str], bool]


@dataclass
class Judged:
    """What came of the questions.

    Attributes:
        verdicts: texts by sample.
        unjudged: samples without a verdict, each with the reason in one line.
        cached: how many verdicts were there before.
        failed: requests that came to nothing, repeated or not.
        served: the names that the server gave its model.
    """

    verdicts: dict[Sample, str] = field(default_factory=dict)
    unjudged: dict[Sample, str] = field(default_factory=dict)
    cached: int = 0
    failed: int = 0
    served: set[str] = field(default_factory=set)


def judged(
    spec: JudgeSpec, store: Path, questions: Sequence[Question], pause: float = PAUSE
) -> Judged:
    """Ask what the store does not know, keep each verdict at once, and return all.

    Args:
        spec: which judge, and how patient to be with it.
        store: the run store; verdicts are below its folder `judge`.
        questions: about samples; equal ones are asked once.
        pause: seconds before the first repetition.

    Raises:
        JudgeLost: the server does not answer, or refuses whatever it is asked; verdicts so far are kept.
        StoreLost: a verdict cannot be kept.
    """
    asking = _Asking(spec, Verdicts(store / "judge"), pause)
    try:
        asyncio.run(asking.all(questions))
    except BaseExceptionGroup as group:
        problem = _first(group)
        if not isinstance(problem, Trouble):
            raise problem from None
        left = len(questions) - len(asking.found.verdicts)
        raise JudgeLost(
            f"judge {spec.model!r} at {spec.base_url}: {problem}; {left} of {len(questions)} answers are not judged. "
            "Answers and verdicts are kept, the same command goes on from them"
        ) from None
    return asking.found


class _Asking:
    """One round of questions."""

    def __init__(self, spec: JudgeSpec, store: Verdicts, pause: float) -> None:
        self._spec, self._store, self._pause = spec, store, pause
        self._turns = asyncio.Semaphore(spec.concurrency)
        self._resume = 0.0
        self.found = Judged()

    async def all(self, questions: Sequence[Question]) -> None:
        """Settle all questions; the first trouble with the server ends the rest."""
        waiting: dict[str, tuple[dict[str, Any], list[Question]]] = {}
        for one in questions:
            request = request_of(self._spec, one.words.messages(one.parts))
            key = key_of(request, one.words.name)
            known = self._store.get(key)
            if known is not None and one.holds(known.text):
                self.found.cached += 1
                self._settle([one], known)
            else:
                waiting.setdefault(key, (request, []))[1].append(one)
        async with Client(self._spec) as client, asyncio.TaskGroup() as group:
            for key, (request, same) in waiting.items():
                group.create_task(self._one(client, key, request, same))

    async def _one(
        self, client: Client, key: str, request: dict[str, Any], same: list[Question]
    ) -> None:
        async with self._turns:
            try:
                reply, tries = await self._verdict(client, request, same[0].holds)
            except Trouble as trouble:
                if not trouble.single:
                    raise
                self.found.unjudged |= {one.sample: str(trouble) for one in same}
                if not self.found.verdicts and len(self.found.unjudged) >= HOPELESS:
                    raise
                return
        said = Verdict(reply.text, reply.served, tries)
        verdict = self._store.put(key, request, said, same[0].holds)
        self._settle(same, verdict)

    async def _verdict(
        self, client: Client, request: Mapping[str, Any], holds: Callable[[str], bool]
    ) -> tuple[Reply, int]:
        """Return a verdict that can be scored, and how often it was asked for.

        Raises:
            Trouble: the last of them, when patience is at its end or repetition useless.
        """
        tries = self._spec.retries + 1
        for number in range(1, tries + 1):
            await self._calm()
            try:
                reply = await client.ask(request)
                if holds(reply.text):
                    return reply, number
                raise _unreadable(reply, number)
            except Trouble as trouble:
                self.found.failed += 1
                if not trouble.passing or number == tries:
                    raise
                self._delay(trouble, number)
        raise AssertionError("unreachable: the last try returns or raises")

    def _delay(self, trouble: Trouble, number: int) -> None:
        """Note when the next request may go out, those of other questions included: they meet the same server.

        Raises:
            Trouble: the server asks for more patience than a request gets.
        """
        wait = min(self._pause * 2 ** (number - 1), LONGEST)
        if trouble.wait is not None:
            if trouble.wait > self._spec.timeout:
                raise Trouble(
                    f"{trouble}; it asks for {trouble.wait:.0f} s of patience, more than judge.timeout="
                    f"{self._spec.timeout:g}"
                )
            wait = trouble.wait
        if not trouble.single:
            now = asyncio.get_running_loop().time()
            self._resume = max(self._resume, now + wait)

    async def _calm(self) -> None:
        loop = asyncio.get_running_loop()
        while (left := self._resume - loop.time()) > 0:
            await asyncio.sleep(left)

    def _settle(self, same: Sequence[Question], verdict: Verdict) -> None:
        self.found.verdicts |= {one.sample: verdict.text for one in same}
        if verdict.served is not None:
            self.found.served.add(verdict.served)


def _unreadable(reply: Reply, number: int) -> Trouble:
    why = " (cut at judge.max_tokens)" if reply.ended == "length" else ""
    said = " ".join(reply.text.split())[:80]
    return Trouble(
        f"no score in {number} answers of the judge{why}, the last: {said!r}", single=True
    )


def _first(group: BaseExceptionGroup) -> BaseException:
    """Return the first exception of a group that is none itself; a full disk goes before a silent server."""
    single = [
        _first(one) if isinstance(one, BaseExceptionGroup) else one for one in group.exceptions
    ]
    return next((one for one in single if not isinstance(one, Trouble)), single[0])
