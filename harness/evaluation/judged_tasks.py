"""Tasks with answers that a language model judges: all answers are journalled before the first one is judged.

`metadata.judge` of such a task's file has the prompt (`name`, `system`, `user`), the function `parts` of document and
answer, which returns the texts for its placeholders, and the function `holds` of a verdict's text, which returns None
for a text without a score. `process_results` gets two results, the answer and the verdict's text, so that scoring stays
a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError, tell_once
from espalier.harness.evaluation.judging.judge_prompt import (
    JudgePrompt,
    JudgeQuestion,
    JudgeResults,
    prompt_of,
    read_prompt,
)
from espalier.harness.evaluation.samples import Sample
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.answer_digest import Key

#: Functions that a task's file must name besides the prompt.
FUNCTIONS = ("parts", "holds")


class Unjudged(ValueError):
    """The judge gave no verdict on a sample that can be scored."""


@dataclass(frozen=True)
class Rubric:
    """How a task is judged: the prompt, its parts of a sample, and whether a text holds a score."""

    prompt: JudgePrompt
    parts: Callable[[Mapping[str, Any], str], Mapping[str, str]]
    holds: Callable[[str], bool]


@dataclass
class JudgedRun:
    """The judged tasks of one run.

    Args:
        spec: the run.
        rubrics: by task name.
        docs: the documents of each task, without media.
        results: the judge's results; empty before `ask`.
    """

    spec: RunSpec
    rubrics: Mapping[str, Rubric]
    docs: Mapping[str, Any]
    results: JudgeResults = field(default_factory=JudgeResults)

    def ask(self, samples: Mapping[Key, Sample]) -> None:
        """Get verdicts on all answers of judged tasks.

        Raises:
            JudgeLost: the judge does not answer; verdicts so far are kept.
        """
        questions = [
            self._question(sample) for sample in samples.values() if sample.task in self.rubrics
        ]
        if not questions:
            return
        # Imports httpx, a quarter of a second that runs without a judge need not wait for.
        from espalier.harness.evaluation.judging.judge import collect_verdicts

        tell_once(f"judge: {self.spec.judge.model!r} is asked about {len(questions)} answers")
        self.results = collect_verdicts(self.spec.judge, self.spec.store, questions)

    def verdict(self, key: Key) -> list[str]:
        """Return the scorer's second result: the verdict of a judged task, else nothing.

        Raises:
            Unjudged: the judge gave no verdict.
        """
        if key[0] not in self.rubrics:
            return []
        if key not in self.results.verdicts:
            raise Unjudged(self.results.unjudged[key])
        return [self.results.verdicts[key]]

    def entries(self) -> list[dict[str, Any]]:
        """Return the journal entries of the verdicts."""
        return [
            {"task": task, "doc_id": doc_id, "verdict": text}
            for (task, doc_id), text in sorted(self.results.verdicts.items())
        ]

    def summary(self) -> dict[str, Any] | None:
        """Return the row's entry about the judge, None without a judge."""
        results = self.results
        total = len(results.verdicts) + len(results.unjudged)
        if not total:
            return None
        prompt = next(iter(self.rubrics.values())).prompt
        return {
            "model": self.spec.judge.model,
            "served": sorted(results.served),
            "prompt": prompt.name,
            "prompt_hash": prompt.digest,
            "verdicts": len(results.verdicts),
            "cached_share": results.cached / total,
            "failed_requests": results.failed,
            "unjudged": len(results.unjudged),
        }

    def _question(self, sample: Sample) -> JudgeQuestion:
        rubric = self.rubrics[sample.task]
        # lmms-eval strips answers before it scores them.
        parts = rubric.parts(self.docs[sample.task][sample.doc_id], sample.scored.strip())
        return JudgeQuestion(sample.key, rubric.prompt, parts, rubric.holds)


def judged_tasks_of(spec: RunSpec, tasks: Sequence[Task]) -> JudgedRun:
    """Return the judged tasks of a run with their rubrics.

    Raises:
        UserError: a task's file is incomplete, or a task needs a judge and its benchmark does not list it.
    """
    judged_tasks = {task.config.task: task for task in tasks if _table(task)}
    if judged_tasks and "judge" not in spec.benchmark.needs:
        raise UserError(
            f"benchmark.needs={list(spec.benchmark.needs)!r}: task {next(iter(judged_tasks))!r} is scored by a judge; "
            "valid: a list with judge"
        )
    return JudgedRun(
        spec=spec,
        rubrics={name: _rubric(spec, name, _table(task)) for name, task in judged_tasks.items()},
        docs={name: task.eval_docs_no_media for name, task in judged_tasks.items()},
    )


def _table(task: Task) -> Mapping[str, Any]:
    metadata = task.config.metadata
    return (metadata.get("judge") if isinstance(metadata, Mapping) else None) or {}


def _rubric(spec: RunSpec, name: str, table: Mapping[str, Any]) -> Rubric:
    key = f"benchmark.task={name!r}: metadata.judge"
    for function in FUNCTIONS:
        if not callable(table.get(function)):
            raise UserError(f"{key}.{function} must be a function of the task's own files")
    task_prompt = prompt_of(key, {part: table[part] for part in table if part not in FUNCTIONS})
    prompt = task_prompt if spec.judge.prompt is None else read_prompt(spec.judge.prompt)
    # A score of 0 counts.
    return Rubric(prompt, table["parts"], lambda text: table["holds"](text) is not None)
