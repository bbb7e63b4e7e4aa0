"""Get verdicts from one judge: stored verdicts are reused, failed requests repeated, new verdicts stored at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.harness.errors import JudgeLost
from espalier.harness.evaluation.judging.client import (
    JudgeClient,
    JudgeReply,
    RequestError,
    request_of,
)
from espalier.harness.evaluation.judging.judge_prompt import JudgeQuestion, JudgeResults
from espalier.harness.evaluation.judging.verdicts import StoredVerdict, VerdictStore, key_of
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.specs.secrets import without_keys

#: Seconds before the first repetition of a request, doubled each time, and the longest pause.
PAUSE, LONGEST = 1.0, 30.0

#: If this many questions get no verdict before any gets one, the judge is given up.
HOPELESS = 16


def collect_verdicts(
    spec: JudgeSpec, store: Path, questions: Sequence[JudgeQuestion], pause: float = PAUSE
) -> JudgeResults:
    """Get the verdicts that the store lacks, store each at once, and return all.

    Args:
        spec: the judge, with timeout and retries.
        store: the run store; verdicts are in its folder `judge`.
        questions: about samples; equal questions are sent once.
        pause: seconds before the first repetition.

    Raises:
        JudgeLost: the server does not answer, or refuses every question; verdicts so far are kept.
        StoreLost: a verdict cannot be stored.
    """
    judge_round = _JudgeRound(spec, VerdictStore(store / "judge"), pause)
    try:
        asyncio.run(judge_round.all(questions))
    except BaseExceptionGroup as group:
        problem = _first(group)
        if not isinstance(problem, RequestError):
            raise problem from None
        open_count = len(questions) - len(judge_round.results.verdicts)
        raise JudgeLost(
            f"judge {spec.model!r} at {without_keys(str(spec.base_url))}: {problem}; {open_count} of "
            f"{len(questions)} answers are not judged. Answers and verdicts are kept, the same command "
            "goes on from them"
        ) from None
    return judge_round.results


class _JudgeRound:
    """One round of questions."""

    def __init__(self, spec: JudgeSpec, store: VerdictStore, pause: float) -> None:
        self._spec, self._store, self._pause = spec, store, pause
        self._turns = asyncio.Semaphore(spec.concurrency)
        self._resume = 0.0
        self.results = JudgeResults()

    async def all(self, questions: Sequence[JudgeQuestion]) -> None:
        """Get verdicts for all questions; the first failure of the server itself ends the round."""
        waiting: dict[str, tuple[dict[str, Any], list[JudgeQuestion]]] = {}
        for question in questions:
            request = request_of(self._spec, question.prompt.messages(question.parts))
            key = key_of(request, question.prompt.name)
            verdict = self._store.get(key)
            if verdict is not None and question.holds(verdict.text):
                self.results.cached += 1
                self._settle([question], verdict)
            else:
                waiting.setdefault(key, (request, []))[1].append(question)
        async with JudgeClient(self._spec) as client, asyncio.TaskGroup() as group:
            for key, (request, equal_questions) in waiting.items():
                group.create_task(self._ask_one(client, key, request, equal_questions))

    async def _ask_one(
        self, client: JudgeClient, key: str, request: dict[str, Any], questions: list[JudgeQuestion]
    ) -> None:
        async with self._turns:
            try:
                reply, tries = await self._verdict(client, request, questions[0].holds)
            except RequestError as trouble:
                if not trouble.single:
                    raise
                self.results.unjudged |= {question.sample: str(trouble) for question in questions}
                if not self.results.verdicts and len(self.results.unjudged) >= HOPELESS:
                    raise
                return
        verdict = StoredVerdict(reply.text, reply.served, tries)
        self._settle(questions, self._store.put(key, request, verdict, questions[0].holds))

    async def _verdict(
        self, client: JudgeClient, request: Mapping[str, Any], holds: Callable[[str], bool]
    ) -> tuple[JudgeReply, int]:
        """Return a verdict that can be scored, and the number of requests it took.

        Raises:
            RequestError: the last failure, when retries are used up or useless.
        """
        number = 0
        while True:
            number += 1
            while (remaining := self._resume - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(remaining)
            try:
                reply = await client.ask(request)
                if holds(reply.text):
                    return reply, number
                cut = " (cut at judge.max_tokens)" if reply.ended == "length" else ""
                excerpt = " ".join(reply.text.split())[:80]
                raise RequestError(
                    f"no score in {number} answers of the judge{cut}, the last: {excerpt!r}",
                    single=True,
                )
            except RequestError as trouble:
                self.results.failed += 1
                if not trouble.passing or number > self._spec.retries:
                    raise
                self._delay(trouble, number)

    def _delay(self, trouble: RequestError, number: int) -> None:
        """Set the time of the next request, for all questions: they go to the same server.

        Raises:
            RequestError: the server requests a longer wait than `judge.timeout`.
        """
        wait = min(self._pause * 2 ** (number - 1), LONGEST)
        if trouble.wait is not None:
            if trouble.wait > self._spec.timeout:
                raise RequestError(
                    f"{trouble}; it asks for {trouble.wait:.0f} s of patience, more than judge.timeout="
                    f"{self._spec.timeout:g}"
                )
            wait = trouble.wait
        if not trouble.single:
            now = asyncio.get_running_loop().time()
            self._resume = max(self._resume, now + wait)

    def _settle(self, questions: Sequence[JudgeQuestion], verdict: StoredVerdict) -> None:
        self.results.verdicts |= {question.sample: verdict.text for question in questions}
        if verdict.served is not None:
            self.results.served.add(verdict.served)


def _first(group: BaseExceptionGroup) -> BaseException:
    """Return the first exception in nested groups that is not a group, RequestErrors last: a full disk counts first."""
    single = [
        _first(error) if isinstance(error, BaseExceptionGroup) else error
        for error in group.exceptions
    ]
    return next((error for error in single if not isinstance(error, RequestError)), single[0])
