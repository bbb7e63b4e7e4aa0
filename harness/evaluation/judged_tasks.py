"""Tasks whose answers a language model judges: every answer is in the journal before the first one is judged.

Such a task says under `metadata.judge` of its file what the judge is asked, `name`, `system` and `user`; which `parts`
of a sample stand in it (a function of document and answer), and what a verdict `holds` (a function of its text; None:
nothing). Its `process_results` gets two results, the answer and the verdict's text: scoring stays a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError, tell_once
from espalier.harness.evaluation.judging.judge import JudgeQuestion, JudgeResults, judged
from espalier.harness.evaluation.judging.judge_prompt import JudgePrompt, prompt_of, read_prompt
from espalier.harness.evaluation.samples import Key, Sample
from espalier.harness.specs.run_spec import RunSpec

#: What a task's file must say beside the words.
FUNCTIONS = ("parts", "holds")


class Unjudged(ValueError):
    """The judge was asked about a sample and gave no verdict that can be scored."""


@dataclass(frozen=True)
class Rubric:
    """How a task is judged: the words, the parts of a sample in them, and whether a text holds a score."""

    words: JudgePrompt
    parts: Callable[[Mapping[str, Any], str], Mapping[str, str]]
    holds: Callable[[str], bool]


@dataclass
class JudgedRun:
    """The judged tasks of one run.

    Args:
        spec: the run.
        rubrics: by name of the task.
        docs: the documents of each task, without media.
        results: what the judge said; None before it was asked.
    """

    spec: RunSpec
    rubrics: Mapping[str, Rubric]
    docs: Mapping[str, Any]
    results: JudgeResults | None = field(default=None)

    def ask(self, samples: Mapping[Key, Sample]) -> None:
        """Have all answers to judged tasks judged.

        Raises:
            JudgeLost: the judge does not answer; what it said so far is kept.
        """
        questions = [
            self._question(sample) for sample in samples.values() if sample.task in self.rubrics
        ]
        if not questions:
            return
        name = self.spec.judge.model
        tell_once(f"judge: {name!r} is asked about {len(questions)} answers")
        self.results = judged(self.spec.judge, self.spec.store, questions)

    def verdict(self, key: Key) -> list[str]:
        """Return what a scorer gets beside the answer: the verdict of a judged task, else nothing.

        Raises:
            Unjudged: the judge gave none.
        """
        if key[0] not in self.rubrics or self.results is None:
            return []
        if key not in self.results.verdicts:
            raise Unjudged(self.results.unjudged[key])
        return [self.results.verdicts[key]]

    def entries(self) -> list[dict[str, Any]]:
        """Return the verdicts as the journal has them."""
        verdicts = {} if self.results is None else self.results.verdicts
        return [
            {"task": task, "doc_id": doc_id, "verdict": text}
            for (task, doc_id), text in sorted(verdicts.items())
        ]

    def summary(self) -> dict[str, Any] | None:
        """Return what a row says of the judge, None where none was asked."""
        if self.results is None:
            return None
        results, prompt = self.results, next(iter(self.rubrics.values())).words
        total = len(results.verdicts) + len(results.unjudged)
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
        return JudgeQuestion(sample.key, rubric.words, parts, rubric.holds)


def judged_run(spec: RunSpec, tasks: Sequence[Task]) -> JudgedRun:
    """Return how the judged ones among the tasks are judged.

    Raises:
        UserError: a task's file lacks something, or a task needs a judge and its benchmark does not say so.
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
    table = metadata.get("judge") if isinstance(metadata, Mapping) else None
    return table or {}


def _rubric(spec: RunSpec, name: str, table: Mapping[str, Any]) -> Rubric:
    key = f"benchmark.task={name!r}: metadata.judge"
    for function in FUNCTIONS:
        if not callable(table.get(function)):
            raise UserError(f"{key}.{function} must be a function of the task's own files")
    task_prompt = prompt_of(key, {part: table[part] for part in table if part not in FUNCTIONS})
    prompt = task_prompt if spec.judge.prompt is None else read_prompt(spec.judge.prompt)
    verdict_value = table["holds"]
    # A score of 0 is one.
    return Rubric(prompt, table["parts"], lambda text: verdict_value(text) is not None)
