"""The second question of a conversation: `python -m lab.bench.second_question method=fastv,divprune ratio=0.9`.

Tokens are chosen while the first question is read, and the second one, about something else in the same picture, is
answered from them, as when a conversation goes on with its cache. Prints the score of the first question, of the second
with tokens chosen for it, of the second with those of the first, and the paired difference of the last two, in percent.

Scenes of the embedded models: both questions ask for the box of an object, of two different ones. The line `oracle` has
the tokens of the question's object, then an even sample: before the decoder, the best that a choice by question could
be. `--pairs FILE.csv` runs other models, with the columns picture, first, first_answer, second and second_answer; an
answer is right if it is the stated one but for case. Everything else is a config override as for run.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.engine.priors import prior_for
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.lookup import label_of
from espalier.harness.seedling.scene_benchmarks import (
    rec_metrics,
    sample_objects,
    sample_scene,
    samples,
)
from espalier.harness.seedling.scene_questions import grounding_question, question_streams
from espalier.harness.stats import Interval, difference_interval, mean_interval
from espalier.harness.store.files.digests import Digests
from espalier.harness.tools.calibration.calibration_images import question
from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.select.topk import top
from lab.bench.bench_page import bench_command, parser
from lab.bench.object_patches import covered_patches

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.runs.admission import Job

SCENES, BATCH, TRIES = 200, 50, 64

#: Patches along an edge of a scene.
SIDE = 12

#: Methods without an override, and the columns that a file of pairs needs.
USUAL = "method=random,uniform,divprune,fastv,d2pruner"
COLUMNS = ("picture", "first", "first_answer", "second", "second_answer")

#: Consecutive golden fractions are spread evenly whatever their number.
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Turns:
    """Two questions about one picture, and what scores their answers; `boxes` are the places of their objects."""

    picture: Image.Image
    questions: tuple[str, str]
    right: tuple[Callable[[str], float], Callable[[str], float]]
    boxes: tuple[Sequence[int], Sequence[int]] | None = None


@dataclass(frozen=True)
class Oracle(TokenReducer):
    """Keeps the tokens at known places, then an even sample of the others.

    Attributes:
        places: (B, N) whether each token shows the question's object.
    """

    places: Tensor

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the places first. Cost: O(N log N)."""
        count = view.tokens.shape[1]
        even = (torch.arange(1, count + 1) * GOLDEN) % 1
        return Plan(top(2 * self.places.float() + even, keep))


def scene_turns(count: int) -> list[Turns]:
    """Return pairs of questions about the boxes of two objects of a held-out scene."""
    turns = []
    for sample in samples("seedling_rec", "test", 0, 0, count):
        objects = sample_objects(sample)
        stream = question_streams("test", 1, [sample["index"]])[0]
        drawn = (grounding_question(objects, stream) for _ in range(TRIES))
        second = next(q for q in drawn if q.target and list(q.target.box) != sample["box"])
        assert second.target is not None  # by the line above
        boxes = (sample["box"], list(second.target.box))
        turns.append(
            Turns(
                sample_scene(sample).to_pil(),
                (sample["question"], second.text),
                (_box_scorer(sample, boxes[0]), _box_scorer(sample, boxes[1])),
                boxes,
            )
        )
    return turns


def file_turns(path: Path) -> list[Turns]:
    """Return the pairs of a file.

    Raises:
        UserError: it lacks a column.
    """
    table = pd.read_csv(path, dtype=str)
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise UserError(
            f"--pairs={str(path)!r} lacks {', '.join(missing)}; valid: {', '.join(COLUMNS)}"
        )
    return [
        Turns(
            Image.open(path.parent / row["picture"]).convert("RGB"),
            (row["first"], row["second"]),
            (_text_scorer(row["first_answer"]), _text_scorer(row["second_answer"])),
        )
        for row in table.to_dict("records")
    ]


def scores(job: Job, adapter: Adapter, turns: Sequence[Turns], oracle: bool) -> list[list[float]]:
    """Return the scores of the first question, of the second by itself, and of the second with the first's tokens."""
    assert isinstance(job.method, TokenReducer)  # checked by the caller
    columns: list[list[float]] = [[], [], []]
    # Plans are replayed by batch, so pictures of several sizes go one at a time.
    size = 1 if turns[0].boxes is None else BATCH
    for start in range(0, len(turns), size):
        part = turns[start : start + size]
        first, second = (_oracle(part, place) if oracle else job.method for place in (0, 1))
        plans: list[Plan] = []
        columns[0] += _answered(job, adapter, _noting(first, plans), part, 0)
        columns[1] += _answered(job, adapter, second, part, 1)
        columns[2] += _answered(job, adapter, _replaying(first, plans), part, 1)
    return columns


def _answered(
    job: Job, adapter: Adapter, method: TokenReducer, turns: Sequence[Turns], place: int
) -> list[float]:
    """Return the scores of the first or second question of a batch."""
    # These import transformers, which takes seconds, after main has set it offline.
    from espalier.harness.engine.session import Session

    spec = job.spec
    prior = prior_for(spec.model, job.method, spec.store)
    chats = [question(turn.picture, turn.questions[place]) for turn in turns]
    names = list(map(str, range(len(turns))))
    with Session(adapter, method, spec.budget, seed=spec.seed, prior=prior) as session:
        ids = session.generate(adapter.encode(chats), names, max_new_tokens=16, do_sample=False).ids
    return [turn.right[place](text) for turn, text in zip(turns, adapter.decode(ids), strict=True)]


def _oracle(turns: Sequence[Turns], place: int) -> Oracle:
    """Return the oracle of the first or second question."""
    boxes = [turn.boxes[place] for turn in turns if turn.boxes is not None]
    return Oracle(
        torch.stack([covered_patches([box], SIDE, turns[0].picture.width) for box in boxes])
    )


def _noting(method: TokenReducer, plans: list[Plan]) -> TokenReducer:
    """Return the method; its plans are appended to a list."""

    def answer(self: TokenReducer, view: View, keep: int) -> Plan:
        plans.append(type(method).answer(self, view, keep))
        return plans[-1]

    return _answering(method, answer)


def _replaying(method: TokenReducer, plans: list[Plan]) -> TokenReducer:
    """Return a method with the same sites that takes its plans from a list."""

    def answer(self: TokenReducer, view: View, keep: int) -> Plan:
        del self, view, keep
        return plans.pop(0)

    return _answering(method, answer)


def _answering(method: TokenReducer, answer: Callable[..., Plan]) -> TokenReducer:
    kind: Any = type(type(method).__name__, (type(method),), {"answer": answer})
    copied: TokenReducer = kind(
        **{f.name: getattr(method, f.name) for f in fields(method) if f.init}
    )
    return copied


def _box_scorer(sample: dict[str, Any], box: Sequence[int]) -> Callable[[str], float]:
    return lambda answer: rec_metrics({**sample, "box": box}, answer)["acc_at_50"]


def _text_scorer(target: str) -> Callable[[str], float]:
    return lambda answer: float(answer.strip().lower() == target.strip().lower())


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each cell; return 0, or 2 after one line on standard error."""
    # Imports transformers, which reads the variables above at import time.
    from espalier.harness.models.build_adapter import load_adapter
    from espalier.harness.runs.admission import admit

    arguments = parser("second_question")
    arguments.add_argument("--pairs", type=Path, help="CSV file with pairs of questions")
    arguments.add_argument("--scenes", type=int, default=SCENES, help="number of generated scenes")
    arguments.add_argument("overrides", nargs="*")
    options = arguments.parse_args(sys.argv[1:] if argv is None else argv)
    specs = specs_of("-m", USUAL, "ratio=0.9", *options.overrides, "benchmark=seedling_rec")
    turns = scene_turns(options.scenes) if options.pairs is None else file_turns(options.pairs)
    adapter, digests = load_adapter(specs[0].model), Digests()
    print(f"{'':40}first  second  second with the first's tokens  difference")
    for place, spec in enumerate(specs):
        name = f"{spec.method.title} {label_of(spec)} {spec.budget.ratio:g}"
        try:
            job = admit(spec, digests)
        except Refused as error:
            print(f"{name:40}{error}")
            continue
        if not isinstance(job.method, TokenReducer):
            print(f"{name:40}drops no tokens")
            continue
        print(f"{name:40}{_text(scores(job, adapter, turns, oracle=False))}", flush=True)
        if place == len(specs) - 1 and turns[0].boxes:
            print(
                f"{f'oracle {spec.budget.ratio:g}':40}{_text(scores(job, adapter, turns, oracle=True))}"
            )
    return 0


def _text(scored: Sequence[Sequence[float]]) -> str:
    first, fresh, reused = scored
    change: Interval = difference_interval(reused, fresh)
    shares = "  ".join(mean_interval(part).percent for part in (first, fresh, reused))
    return f"{shares}  {change.points}"


if __name__ == "__main__":
    sys.exit(main())
