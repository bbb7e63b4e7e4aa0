"""Quality against time of denoised answers: `--store results --write lab/measured/diffusion`.

Scores are those of a store of `python run.py +experiment=diffusion_time`. Times are measured here, as processor time of
one thread, so that other work on the machine counts little. Writes `time.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.prompt import Prompt
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.reports.curves.stored_rows import read_results
from espalier.harness.seedling.scene_questions import questions_for
from espalier.harness.seedling.scenes import Scenes
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import command
from espalier.harness.store.files.folder_checks import check_folder
from espalier.harness.tools.calibration.calibration_images import question
from espalier.methods.base import TokenReducer
from lab.bench.bench_page import one_thread
from lab.bench.diffusion_sides import DiffusionSide

MODEL = "seedling_diffusion"
#: Questions that are timed: kinds and numbers of each benchmark, about this many held-out scenes.
QUESTIONS: Mapping[str, Mapping[str, int]] = {
    "seedling_vqa": {"attr": 1, "exist": 1},
    "seedling_ocr": {"ocr": 1},
}
SCENES = 2


#: Columns of a cell: where it lies in the sweep, its score, and the mean cost of an answer. `steps` are fixed or None,
#: `threshold` is a confidence or None, `cached` whether the prompt was cached; `score` is of the headline metric,
#: `gflop` of decoder and head, `ms` of processor time.
POINT = (
    *("benchmark", "ratio", "steps", "threshold", "cached"),
    *("samples", "score", "gflop", "ms"),
)


def stored_points(store: Path) -> list[tuple[dict[str, Any], TokenReducer]]:
    """Return the cells of a store without their times, and their methods."""
    points = []
    for result in read_results(store):
        row, settings = result.row, result.row["settings"]
        generation = settings["benchmark"]["generation"]
        method = build_method(row["method"], settings["method"]["params"])
        assert isinstance(method, TokenReducer)  # the preset has none and d3tom
        values = (
            *(row["benchmark"], row["ratio"]),
            *(generation.get("steps"), generation.get("threshold")),
            bool(settings["model"]["generation"]["prefix_cache"]),
            row["n_samples"],
            row["metrics"][settings["benchmark"]["headline"]]["value"],
            row["flops"]["prefill_exact"] / 1e9,
            0.0,
        )
        points.append((dict(zip(POINT, values, strict=True)), method))
    return points


def timed(
    cells: Sequence[tuple[dict[str, Any], TokenReducer]], adapter: Adapter, rounds: int
) -> pd.DataFrame:
    """Return the cells with their times: of each question the least of the rounds, mean over questions.

    Cells take turns, so that other work on the machine meets all of them.
    """
    prompts = {name: _prompts(adapter, kinds) for name, kinds in QUESTIONS.items()}
    spent: list[list[list[float]]] = [[] for _ in cells]
    for _ in range(rounds):
        for number, (point, method) in enumerate(cells):
            side = DiffusionSide(MODEL, adapter, method, Budget("kept", point["ratio"]))
            schedule = {key: point[key] for key in ("steps", "threshold") if point[key]}
            runs = [
                side.run(prompt, **schedule, prefix_cache=point["cached"])
                for prompt in prompts[point["benchmark"]]
            ]
            spent[number].append([1e3 * run.spent for run in runs])
    means = [fmean(map(min, zip(*times, strict=True))) for times in spent]
    frame = pd.DataFrame([point for point, _ in cells], columns=POINT, dtype=object)
    return frame.assign(ms=means)


def _prompts(adapter: Adapter, kinds: Mapping[str, int]) -> list[Prompt]:
    side = DiffusionSide(MODEL, adapter, build_method("none", {}), Budget("kept", 0.0))  # type: ignore[arg-type]
    prompts = []
    for number in range(SCENES):
        scene = Scenes().scene("test", 0, number)
        for drawn in questions_for(scene, dict(kinds)):
            prompts.append(side.prompt(adapter.encode([question(scene.to_pil(), drawn.text)])))
    return prompts


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write the numbers; exit code 2 and one line on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.pages.denoising_time_page", description=__doc__
    )
    parser.add_argument("--store", type=Path, required=True, help="store of the preset's results")
    parser.add_argument("--write", type=Path, required=True, help="folder for the numbers")
    parser.add_argument("--rounds", type=int, default=2, help="timed answers of each question")
    options = parser.parse_args(argv)
    check_folder("--write", options.write)
    spec = read_command([f"model={MODEL}", "model.device=cpu"])
    assert spec is not None  # None only for --help
    with one_thread():
        adapter = load_adapter(build_spec(spec.cells[0]).model)
        points = timed(stored_points(options.store), adapter, options.rounds)
    options.write.mkdir(parents=True, exist_ok=True)
    numbers = options.write / "time.json"
    numbers.write_text(json.dumps(points.to_dict("records"), indent=0) + "\n")
    print(numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
