"""The model's attention and the tokens kept: `python -m lab.pages.gaze_pictures`.

Draws, for a few grounding questions of the embedded model, the last prompt token's attention in each decoder layer
and the tokens that each method keeps; prints how much of that attention lies on the object of the question, on other
objects and on background. Validation scenes only, so that nothing here is tuned on the benchmarks.

    --out docs/figures/attention      file name without suffix
    --scenes 3                        scenes in the picture
    --questions 200                   questions in the printed means
    --ratio 0.9                       share of visual tokens removed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.priors import Prior, prior_for
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import PlainParser, command
from espalier.harness.store.files.folder_checks import check_files
from espalier.harness.tools.calibration.calibration_images import question
from espalier.harness.tools.calibration.prior_maps import Recorder
from espalier.methods.base import TokenReducer
from lab.bench.bench_setup import spec_of

#: Config overrides of the methods shown, in this order.
SHOWN = (
    "fastv",
    "fastv method.params.K=3",
    "visionzip_paper",
    "divprune",
    "d2pruner",
    "d2pruner_localization",
)
GRID = 12


@dataclass
class Gaze:
    """One question: its sample, picture, patch owner (target 2, other object 1, background 0) and attention."""

    sample: dict[str, Any]
    picture: np.ndarray
    owner: np.ndarray
    attention: dict[int, np.ndarray] = field(default_factory=dict)
    kept: dict[str, np.ndarray] = field(default_factory=dict)


def cases(count: int) -> list[Gaze]:
    """Return grounding questions about validation scenes."""
    gazes = []
    for sample in samples("seedling_rec", "val", 0, 9_000_000, count):
        scene = sample_scene(sample)
        owner = np.zeros((GRID, GRID), dtype=np.int64)
        for item in scene.objects:
            is_target = list(item.box) == sample["box"]
            left, top, right, bottom = (
                edge // 8 for edge in (*item.box[:2], *(e - 1 for e in item.box[2:]))
            )
            area = owner[top : bottom + 1, left : right + 1]
            area[:] = np.maximum(area, 2 if is_target else 1)
        gazes.append(Gaze(sample, scene.image, owner))
    return gazes


def look(adapter: Adapter, questions: Sequence[Gaze]) -> None:
    """Record the last token's attention of every decoder layer but the last."""
    layers = tuple(range(adapter.facts.text.layers - 1))
    for case in questions:

        def collect(layer: int, grid: Tensor, rows: Tensor, case: Gaze = case) -> None:
            case.attention[layer] = rows[0].view(GRID, GRID).numpy()

        generate(adapter, Recorder(layers, collect), 0.0, None, case)


def choose(adapter: Adapter, questions: Sequence[Gaze], ratio: float) -> None:
    """Record the tokens that each plotted method keeps."""
    for overrides in SHOWN:
        spec = spec_of(*f"method={overrides}".split())
        method = build_method(spec.method.name, spec.method.params, spec.method.code)
        assert isinstance(method, TokenReducer)  # by SHOWN
        prior = prior_for(spec.model, method, spec.store)
        for case in questions:
            origin = generate(adapter, method, ratio, prior, case)
            mask = np.zeros(GRID * GRID, dtype=bool)
            mask[origin.numpy()] = True
            case.kept[overrides] = mask.reshape(GRID, GRID)


def generate(
    adapter: Adapter, method: TokenReducer, ratio: float, prior: Prior | None, case: Gaze
) -> Tensor:
    """Run one prefill and return the original indices of the tokens alive at the end."""
    inputs = adapter.encode([question(Image.fromarray(case.picture), case.sample["question"])])
    with Session(adapter, method, Budget("kept", ratio), prior=prior, timed=False) as session:
        record = session.generate(inputs, max_new_tokens=1, do_sample=False).records[0]
    assert record.origin is not None
    return record.origin


def shares(questions: Sequence[Gaze]) -> dict[int, dict[str, float]]:
    """Return, for each layer, the mean share of visual attention on target, other objects and background."""
    names = {2: "target", 1: "other objects", 0: "background"}
    return {
        layer: {
            name: float(
                np.mean(
                    [
                        c.attention[layer][c.owner == kind].sum() / c.attention[layer].sum()
                        for c in questions
                    ]
                )
            )
            for kind, name in names.items()
        }
        for layer in questions[0].attention
    }


def kept_shares(questions: Sequence[Gaze]) -> dict[str, dict[str, float]]:
    """Return, for each method, the mean share of the target's patches kept, and of kept tokens on any object."""
    return {
        name: {
            "target patches kept": float(
                np.mean([c.kept[name][c.owner == 2].mean() for c in questions])
            ),
            "kept on objects": float(
                np.mean([(c.owner[c.kept[name]] > 0).mean() for c in questions])
            ),
        }
        for name in questions[0].kept
    }


def draw(questions: Sequence[Gaze], out: Path, ratio: float) -> None:
    """Write the figure as PNG: above, the last token's attention; below, the tokens kept by each method."""
    # matplotlib takes a third of a second to import, and the figures printed need none of it.
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    from espalier.harness.reports.curves.figures import STYLE

    layers, methods = list(questions[0].attention), list(questions[0].kept)
    # One scale for all maps; a quarter of all attention on one token is rare, and would leave the others dark.
    shades = Normalize(0, 10)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 1.42 * 2 * len(questions) + 1.3), layout="constrained")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.16, 1))[:, 0]
        above.suptitle("Where the last prompt token looks", x=0.01, ha="left", weight="bold")
        grid = above.subplots(len(questions), 1 + len(layers), squeeze=False)
        for case, row in zip(questions, grid, strict=True):
            _picture(row[0], case, case.picture, "picture, object asked about")
            row[0].set_xlabel(
                case.sample["question"].replace(" the ", " the\n").replace(" ?", "?"), fontsize=8
            )
            for axes, layer in zip(row[1:], layers, strict=True):
                share = 100 * case.attention[layer] / case.attention[layer].sum()
                _picture(axes, case, case.picture.mean(-1), f"layer {layer}", cmap="gray", vmax=420)
                axes.imshow(
                    share, cmap="inferno", norm=shades, alpha=0.8, extent=(-0.5, 95.5, 95.5, -0.5)
                )
        above.colorbar(
            ScalarMappable(shades, "inferno"),
            ax=list(grid.flat),
            location="bottom",
            extend="max",
            aspect=50,
            shrink=0.6,
            label="share of its attention to visual tokens (% a token)",
        )
        tokens = round(GRID * GRID * (1 - ratio))
        below.suptitle(
            f"What methods keep at ratio {ratio:g}: {tokens} of {GRID * GRID} tokens",
            x=0.01,
            ha="left",
            weight="bold",
        )
        grid = below.subplots(len(questions), len(methods), squeeze=False)
        for case, row in zip(questions, grid, strict=True):
            for axes, name in zip(row, methods, strict=True):
                mask = np.kron(case.kept[name], np.ones((8, 8)))[..., None]
                faded = case.picture * 0.22 + 255 * 0.78
                image = (case.picture * mask + faded * (1 - mask)).astype(np.uint8)
                title = name.replace(" method.params.", " ").replace(
                    "_localization", ", localization"
                )
                _picture(axes, case, image, title)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out.with_suffix(".png"), dpi=150)


def _picture(axes: Any, case: Gaze, image: np.ndarray, title: str, **look: Any) -> None:
    """Draw one picture with a frame around the object of the question, its title above the first row."""
    # Half a second for matplotlib, which measuring alone does without.
    from matplotlib.patches import Rectangle

    axes.imshow(image, **({"vmin": -60, **look} if look else {}))
    axes.set_xticks([])
    axes.set_yticks([])
    x0, y0, x1, y1 = case.sample["box"]
    frame: dict[str, Any] = {"fill": False, "color": "#56B4E9", "linewidth": 1.4}
    axes.add_patch(Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, **frame))
    if axes.get_subplotspec().is_first_row():
        axes.set_title(title.replace(", ", ",\n"), fontsize=8.5)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figure, print the means as JSON; return 0."""
    parser = PlainParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/attention"))
    parser.add_argument("--scenes", type=int, default=3)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--ratio", type=float, default=0.9)
    options = parser.parse_args(argv)
    check_files("--out", options.out, ("png", "svg"))
    torch.set_grad_enabled(False)
    adapter = load_adapter(spec_of("model=seedling").model)
    questions = cases(options.questions)
    look(adapter, questions)
    choose(adapter, questions, options.ratio)
    draw(questions[: options.scenes], options.out, options.ratio)
    print(json.dumps({"attention": shares(questions), "methods": kept_shares(questions)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
