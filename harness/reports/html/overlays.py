"""What methods keep of example pictures on the embedded model: a mask for each method, ratio and picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from math import isqrt
from typing import Any

from PIL import Image

from espalier.harness.api.apply import apply
from espalier.harness.api.loaded_models import Model, load
from espalier.harness.errors import UserError
from espalier.harness.reports.html.page import PageResults, kind_of
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.comparable import Row, name

#: Validation scenes, each with a question about a position; the model that answers.
FIRST, EXAMPLES = 9_000_000, 3
MODEL = "seedling"

#: Kinds of methods that prune tokens, and the largest number of ratios per method.
PRUNING = ("control", "before the LLM", "inside the LLM")
RATIOS = 6


#: Returns the place of the user's class that a row names for a method, None for a name of conf/; raises UserError for
#: code that is not the row's.
CodeOf = Callable[[Row, str], str | None]


def overlays(results: PageResults, code_of: CodeOf) -> dict[str, Any]:
    """Return pictures, questions, and for each pruning curve the kept tokens by ratio.

    A mask is a text of 0 and 1, one character for each token in row order. A method that the embedded model cannot run
    is excluded with the reason.

    Args:
        results: of the page.
        code_of: finds the code of a user's method.

    Cost: an answer for each curve, ratio and picture.
    """
    pruning = _pruning_curves(results)
    if not pruning:
        return {"pictures": [], "curves": {}}
    model, questions = load(MODEL), samples("seedling_rec", "val", 0, FIRST, EXAMPLES)
    scenes = [
        (Image.fromarray(sample_scene(sample).image), sample["question"]) for sample in questions
    ]
    curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for curve, (row, ratios) in pruning.items():
        try:
            code = code_of(row, row["method"])
        except UserError as error:
            results.drop("no picture of kept tokens", f"{curve}: {error}")
            continue
        for ratio in sorted(ratios)[:RATIOS]:
            try:
                curves.setdefault(curve, {})[f"{ratio:g}"] = _masks(model, row, code, ratio, scenes)
            except UserError as error:
                results.drop("no picture of kept tokens", f"{curve} at {ratio:g}: {error}")
    pictures = [
        {"source": _data_uri(scene), "question": question.replace(" ?", "?")}
        for scene, question in scenes
    ]
    return {"pictures": pictures, "curves": curves, "model": MODEL}


def _pruning_curves(results: PageResults) -> dict[str, tuple[Row, set[float]]]:
    """Return a row and the ratios of each pruning curve."""
    pruning: dict[str, tuple[Row, set[float]]] = {}
    for result in results.rows:
        row = result.row
        if kind_of(row) in PRUNING and not row["extra"].get("cache") and 0 < row["ratio"] < 1:
            pruning.setdefault(name(row), (row, set()))[1].add(row["ratio"])
    return pruning


def _masks(
    model: Model,
    row: Row,
    code: str | None,
    ratio: float,
    scenes: Sequence[tuple[Image.Image, str]],
) -> list[dict[str, Any]]:
    # An instance, because some hyper-parameters have the name of an argument of `apply`.
    method = build_method(row["method"], row["settings"]["method"]["params"], code)
    with apply(model, method, ratio) as pruned:
        answers = [pruned.ask(scene, question, max_new_tokens=1) for scene, question in scenes]
    return [
        {
            "mask": "".join("01"[index in answer.kept_indices] for index in range(answer.visual)),
            "side": isqrt(answer.visual),
        }
        for answer in answers
    ]


def _data_uri(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
