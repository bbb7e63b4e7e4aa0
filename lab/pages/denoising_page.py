"""Attention of decider tokens over the denoising steps: `--write lab/measured/diffusion`.

`seedling_diffusion` with D3ToM reads the digits of a held-out scene, one position per step. Each picture shows the
selection scores of a step, the tokens kept, and the answer so far. Writes `steps.png` and `.svg`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.diffusion.denoising_loop import DenoisingGenerator
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import SampleRecord
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.reports.curves.figures import RESOLUTION, STYLE
from espalier.harness.seedling.scene_questions import questions_for
from espalier.harness.seedling.scenes import Scene, Scenes
from espalier.harness.specs.commands import command
from espalier.harness.store.files.folder_checks import check_folder
from espalier.harness.tools.calibration.calibration_images import question
from espalier.methods.base import Plan, View
from espalier.methods.d3tom import D3ToM

MODEL = "seedling_diffusion"
#: Positions of the answer, one unmasked per step.
PLACES = 8
#: Size of one step in inches; steps per row.
PANEL, COLUMNS = (1.75, 2.25), 4
#: Text for masked positions, and for those after the answer's end.
MASKED, ENDED = "·", "∎"
TITLE = "Which tokens does D3ToM (paper) keep at each step? (one scene, embedded model)"
LEGEND = (
    "Outlined squares are kept. The paler a square, the less attention it gets from the words that decide (in boxes).\n"
    f"Below each picture: the answer so far to “{{question}}”; {MASKED} still masked, {ENDED} its end."
)


@dataclass(frozen=True)
class StepSelection:
    """Selection of one step: scores (N,) of the visual tokens, and kept tokens (K,)."""

    scores: Tensor
    kept: Tensor


@dataclass(frozen=True)
class RecordingD3ToM(D3ToM):
    """D3ToM that records the selection of each step, for a single row."""

    selections: dict[int, StepSelection] = field(default_factory=dict, compare=False)

    def plan(self, view: View, keep: int) -> Plan:
        """Plan as D3ToM does."""
        plan = super().plan(view, keep)
        self.selections[view.step] = StepSelection(
            view.signals["decider_attention"][0], plan.kept[0]
        )
        return plan


class RecordingSession(DenoisingSession):
    """A session that records the answer at the start of each step."""

    states: list[AnswerState]

    def denoise(
        self, prompt: Prompt, answer: AnswerState, samples: Sequence[str], budget: Budget
    ) -> tuple[Tensor, tuple[SampleRecord, ...]]:
        """Run one step."""
        self.states.append(answer)
        return super().denoise(prompt, answer, samples, budget)


@dataclass(frozen=True)
class PlottedStep:
    """One plotted step: the word at each position, the decider positions, and the selection.

    `selection` is None for the first step, which has no deciders.
    """

    words: tuple[str, ...]
    deciders: tuple[bool, ...]
    selection: StepSelection | None


def steps_of(adapter: Adapter, scene: Scene, ratio: float) -> tuple[list[PlottedStep], str]:
    """Read a scene's digits; return the steps, and the answer."""
    method, budget = RecordingD3ToM(), Budget("kept", ratio)
    (digits,) = questions_for(scene, {"ocr": 1})
    inputs = adapter.encode([question(scene.to_pil(), digits.text)])
    session = RecordingSession(adapter, method, budget)
    session.states = []
    with session:
        batch = DenoisingGenerator(session, adapter).generate(inputs, ["0"], max_new_tokens=PLACES)
    steps = [
        PlottedStep(
            tuple(_words(adapter, answer.ids[0].tolist())),
            tuple(answer.deciders[0].tolist()),
            method.selections.get(answer.step) if answer.deciders.any() else None,
        )
        for answer in session.states
    ]
    return steps, adapter.decode(batch.ids)[0]


def _words(adapter: Adapter, ids: Sequence[int]) -> list[str]:
    facts = adapter.facts.diffusion
    assert facts is not None  # the model denoises
    special = {facts.mask_id: MASKED, **dict.fromkeys(facts.end_ids, ENDED)}
    return [
        special.get(token) or adapter.processor.tokenizer.decode([token]).strip() for token in ids
    ]


def draw(scene: Scene, steps: Sequence[PlottedStep]) -> Figure:
    """Return the figure: patches fade with low scores; kept tokens are outlined.

    Drawing and saving both belong inside `matplotlib.rc_context(STYLE)`.
    """
    rows = math.ceil(len(steps) / COLUMNS)
    size = (PANEL[0] * COLUMNS, PANEL[1] * rows)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.04))
    figure.suptitle(TITLE, x=0.01, ha="left", fontsize=10, fontweight="bold")
    (digits,) = questions_for(scene, {"ocr": 1})
    figure.supxlabel(LEGEND.format(question=digits.text), x=0.01, ha="left", fontsize=8)
    pixels = np.asarray(scene.to_pil())
    for number, axes in enumerate(figure.subplots(rows, COLUMNS, squeeze=False).flat):
        axes.set_axis_off()
        if number < len(steps):
            _draw_step(axes, pixels, number, steps[number])
    return figure


def _draw_step(axes: Axes, pixels: np.ndarray, number: int, step: PlottedStep) -> None:
    edge = len(pixels)
    axes.imshow(pixels, extent=(0, edge, edge, 0))
    axes.set_title(f"step {number + 1}", loc="left", fontsize=9, pad=3)
    if step.selection is not None:
        scores = step.selection.scores.float().cpu()
        side = math.isqrt(len(scores))
        share = (scores / scores.max()).sqrt().view(side, side).numpy()
        fog = np.ones((side, side, 4))
        fog[..., 3] = 0.9 * (1 - share)
        axes.imshow(fog, extent=(0, edge, edge, 0), interpolation="nearest")
        patch = edge / side
        for token in step.selection.kept.tolist():
            row, column = divmod(token, side)
            corner = (column * patch + 0.6, row * patch + 0.6)
            size = patch - 1.2
            axes.add_patch(
                Rectangle(corner, size, size, fill=False, color="#000000", linewidth=0.9)
            )
    for place, (word, decides) in enumerate(zip(step.words, step.deciders, strict=True)):
        axes.text(
            edge * (place + 0.5) / len(step.words),
            edge * 1.04,
            word,
            ha="center",
            va="top",
            fontsize=9.5,
            bbox={"facecolor": "white", "edgecolor": "#000000", "pad": 1.6} if decides else None,
        )
    axes.set_ylim(edge * 1.16, 0)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write the figure; exit code 2 and one line on an error."""
    parser = argparse.ArgumentParser(prog="python -m lab.pages.denoising_page", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="folder for the figure")
    parser.add_argument("--scene", type=int, default=3, help="number of the held-out scene")
    parser.add_argument("--ratio", type=float, default=0.9, help="share of the tokens merged")
    options = parser.parse_args(argv)
    check_folder("--write", options.write)
    adapter = load_adapter(specs_of(f"model={MODEL}", "model.device=cpu")[0].model)
    scene = Scenes().scene("test", 0, options.scene)
    steps, answer = steps_of(adapter, scene, options.ratio)
    options.write.mkdir(parents=True, exist_ok=True)
    png, svg = options.write / "steps.png", options.write / "steps.svg"
    with rc_context(STYLE):
        figure = draw(scene, steps)
        figure.savefig(png, dpi=RESOLUTION)
        # Without a date, and with the fixed salt of the style, equal data gives equal bytes.
        figure.savefig(svg, metadata={"Date": None})
    print(f"scene {options.scene}: {answer}")
    print(f"{png}\n{svg}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
