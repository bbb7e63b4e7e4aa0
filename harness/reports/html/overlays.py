"""What methods keep of example pictures, on the embedded model: a mask for each method, ratio and picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from PIL import Image

from espalier.harness.api.apply import apply
from espalier.harness.api.loaded_models import Model, load
from espalier.harness.errors import UserError
from espalier.harness.reports.html.page_content import kind_of
from espalier.harness.reports.html.page_rows import Gathered
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.harness.specs.comparable import name

#: Validation scenes with a question about a place each; the model that answers.
FIRST, EXAMPLES = 9_000_000, 3
MODEL = "seedling"

#: Kinds that drop tokens, and ratios of a method at most.
PRUNING = ("control", "before the LLM", "inside the LLM")
RATIOS = 6


def overlays(found: Gathered) -> dict[str, Any]:
    """Return pictures, questions, and of each curve with pruned tokens what it keeps by ratio.

    A mask is a text of 0 and 1, a letter for each token in the order of rows. A method that the embedded model cannot
    run is left out with the reason.

    Cost: an answer for each curve, ratio and picture.
    """
    asked = _asked(found)
    if not asked:
        return {"pictures": [], "curves": {}}
    model, questions = load(MODEL), samples("seedling_rec", "val", 0, FIRST, EXAMPLES)
    scenes = [Image.fromarray(sample_scene(one).image) for one in questions]
    curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for curve, (method, params, ratios) in asked.items():
        for ratio in ratios:
            try:
                drawn = _answers(model, method, params, ratio, scenes, questions)
            except UserError as error:
                found.drop("no picture of kept tokens", f"{curve} at {ratio:g}: {error}")
                continue
            curves.setdefault(curve, {})[f"{ratio:g}"] = drawn
    pictures = [
        {"source": _embedded(scene), "question": one["question"].replace(" ?", "?")}
        for scene, one in zip(scenes, questions, strict=True)
    ]
    return {"pictures": pictures, "curves": curves, "model": MODEL}


def _asked(found: Gathered) -> dict[str, tuple[str, Mapping[str, Any], list[float]]]:
    """Return method, hyper-parameters and ratios of each curve that prunes."""
    asked: dict[str, tuple[str, Mapping[str, Any], list[float]]] = {}
    for one in found.rows:
        row = one.row
        if kind_of(row) in PRUNING and not row["extra"].get("cache") and 0 < row["ratio"] < 1:
            params = row["settings"]["method"]["params"]
            ratios = asked.setdefault(name(row), (row["method"], params, []))[2]
            if row["ratio"] not in ratios:
                ratios.append(row["ratio"])
    for _, _, ratios in asked.values():
        ratios[:] = sorted(ratios)[:RATIOS]
    return asked


def _answers(
    model: Model,
    method: str,
    params: Mapping[str, Any],
    ratio: float,
    scenes: Sequence[Image.Image],
    questions: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    drawn = []
    with apply(model, method, ratio, **params) as pruned:
        for scene, one in zip(scenes, questions, strict=True):
            answer = pruned.ask(scene, one["question"], max_new_tokens=1)
            kept = set(answer.kept_indices)
            mask = "".join("01"[place in kept] for place in range(answer.visual))
            drawn.append({"mask": mask, "side": isqrt(answer.visual)})
    return drawn


def _embedded(picture: Image.Image) -> str:
    held = io.BytesIO()
    picture.save(held, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
