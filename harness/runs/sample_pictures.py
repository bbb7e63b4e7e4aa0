"""Pictures of samples with the kept tokens drawn; no run stores these, so the samples are answered once more."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from espalier.harness.api.visible_tokens import grid_rows, visible_chat
from espalier.harness.engine.priors import prior_for
from espalier.harness.errors import UserError
from espalier.harness.evaluation.evaluate import Evaluation, open_benchmark
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.stored_answers import best_score
from espalier.methods.base import Method

if TYPE_CHECKING:
    from espalier.harness.api.notebook_figure import Drawing
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.answer_digest import Key

#: Signs of a task's name that stay in a file name.
_UNSAFE = re.compile(r"[^\w.-]+")
#: Marks of media in a question of a journal.
_PLACEHOLDER = re.compile(r"<(image|video)>")


@dataclass(frozen=True)
class SamplePicture:
    """A sample's pictures with the kept tokens drawn.

    Attributes:
        key: of the sample.
        answer: its answer of now.
        drawing: None if the sample has no picture.
    """

    key: Key
    answer: str
    drawing: Drawing | None

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{_UNSAFE.sub('_', self.key[0])}-{self.key[1]}.png"


def draw_samples(
    spec: RunSpec,
    method: Method,
    adapter: Adapter,
    keys: Collection[Key],
    shelf: TaskCache | None = None,
) -> Iterator[SamplePicture]:
    """Answer samples of a run once more, each as its own batch, and draw them.

    Args:
        spec: admitted.
        method: its method, with its calibrations.
        adapter: its model.
        keys: the samples.
        shelf: data of the open benchmark.

    Raises:
        UserError: the harness composes the benchmark's prompts, or its data are missing.
        SampleErrors: a sample failed.
    """
    # Both take seconds to import.
    from espalier.harness.api.overlay import captioned, draw
    from espalier.harness.evaluation.chat_model import answer_again

    if spec.benchmark.prompt_tokens is not None:
        raise UserError(
            f"benchmark={spec.benchmark.name}: its prompts are composed and hold no pictures; valid: another benchmark"
        )
    loaded = open_benchmark(spec, None, shelf)
    prior = prior_for(spec.model, method, spec.store)
    with kind_of(method, spec).open(spec, adapter, method, prior) as opened:
        for repeated in answer_again(spec, opened, loaded, keys):
            sample, origin = repeated.sample, repeated.sample.record.origin
            assert origin is not None  # it was answered by this process
            inputs = opened.encode([repeated.chat])
            (grid,) = grid_rows(adapter, inputs)
            visible = visible_chat(adapter, repeated.chat, grid)
            title = f"{sample.task} {sample.doc_id}: {len(origin)} of {sample.record.visual} visual tokens kept"
            question = _PLACEHOLDER.sub("", str((sample.context or {}).get("question", "")))
            title = captioned(title, f"{question} → {sample.answer}")
            drawing = draw(visible, origin.tolist(), title) if len(grid) else None
            yield SamplePicture(sample.key, sample.answer, drawing)


def worst_samples(evaluation: Evaluation, benchmark: BenchmarkSpec) -> list[Key]:
    """Return the samples without full marks in the headline, the worst first, and in the order of the benchmark."""
    sign = 1 if benchmark.higher_is_better else -1
    scores = {
        sample.key: evaluation.scores.get(sample.key, {}).get(benchmark.headline, 0.0)
        for sample in evaluation.samples
    }
    best = best_score([*scores.values()], benchmark.higher_is_better) if scores else None
    wrong_keys = (key for key, score in scores.items() if score != best)
    return sorted(wrong_keys, key=lambda key: (sign * scores[key], key))
