"""What methods keep of example pictures on the embedded model: a mask for each method, ratio and picture."""

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
from espalier.harness.reports.html.page_content import CodeOf, PageResults, kind_of
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.comparable import Row, name

#: Validation scenes, each with a question about a position; the model that answers.
FIRST, EXAMPLES = 9_000_000, 3
MODEL = "seedling"

#: Kinds of methods that prune tokens, and the largest number of ratios per method.
PRUNING = ("control", "before the LLM", "inside the LLM")
RATIOS = 6


def overlays(results: PageResults, code_of: CodeOf) -> dict[str, Any]:
    """Return pictures, questions, and for each pruning curve the kept tokens by ratio.

    A mask is a text of 0 and 1, one character for each token in row order. A method that the embedded model cannot run
    is excluded with the reason.

    Args:
        results: of the page.
        code_of: finds the code of a user's method.

    Cost: an answer for each curve, ratio and picture.
    """
    pruning_curves = _pruning_curves(results)
    if not pruning_curves:
        return {"pictures": [], "curves": {}}
    model, questions = load(MODEL), samples("seedling_rec", "val", 0, FIRST, EXAMPLES)
    scenes = [Image.fromarray(sample_scene(question).image) for question in questions]
    curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for curve, (row, ratios) in pruning_curves.items():
        try:
            code = code_of(row, row["method"])
        except UserError as error:
            results.drop("no picture of kept tokens", f"{curve}: {error}")
            continue
        for ratio in ratios:
            try:
                masks = _masks(model, row, code, ratio, scenes, questions)
            except UserError as error:
                results.drop("no picture of kept tokens", f"{curve} at {ratio:g}: {error}")
                continue
            curves.setdefault(curve, {})[f"{ratio:g}"] = masks
    pictures = [
        {"source": _data_uri(scene), "question": question["question"].replace(" ?", "?")}
        for scene, question in zip(scenes, questions, strict=True)
    ]
    return {"pictures": pictures, "curves": curves, "model": MODEL}


def _pruning_curves(results: PageResults) -> dict[str, tuple[Row, list[float]]]:
    """Return a row and the ratios of each pruning curve."""
    pruning_curves: dict[str, tuple[Row, list[float]]] = {}
    for result in results.rows:
        row = result.row
        if kind_of(row) in PRUNING and not row["extra"].get("cache") and 0 < row["ratio"] < 1:
            ratios = pruning_curves.setdefault(name(row), (row, []))[1]
            if row["ratio"] not in ratios:
                ratios.append(row["ratio"])
    for _, ratios in pruning_curves.values():
        ratios[:] = sorted(ratios)[:RATIOS]
    return pruning_curves


def _masks(
    model: Model,
    row: Row,
    code: str | None,
    ratio: float,
    scenes: Sequence[Image.Image],
    questions: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    masks = []
    # An instance, because some hyper-parameters have the name of an argument of `apply`.
    method = build_method(row["method"], row["settings"]["method"]["params"], code)
    with apply(model, method, ratio) as pruned:
        for scene, question in zip(scenes, questions, strict=True):
            answer = pruned.ask(scene, question["question"], max_new_tokens=1)
            kept = set(answer.kept_indices)
            mask = "".join("01"[index in kept] for index in range(answer.visual))
            masks.append({"mask": mask, "side": isqrt(answer.visual)})
    return masks


def _data_uri(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
