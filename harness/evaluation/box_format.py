"""Pass the model's box format to tasks, which request boxes in it and parse them.

A task lists the settings it needs under `of_model` of its prompt settings (lmms_eval_specific_kwargs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import ModelSpec


def fill_box_settings(tasks: Iterable[Task], model: ModelSpec, benchmark: BenchmarkSpec) -> None:
    """Fill in `boxes`, the format, and `resized`, the size bounds of the model's pictures, for tasks that list them.

    Settings of the user (benchmark.prompt) stay.

    Raises:
        UserError: boxes are written in pixels of a resized picture, and the model's file does not state the resizing.
    """
    for task in tasks:
        settings = task.lmms_eval_specific_kwargs
        if not isinstance(settings, Mapping) or "of_model" not in settings:
            continue
        # A new table: tasks of a group may share one.
        filled = {**settings, "boxes": model.boxes, **benchmark.prompt}
        if filled["boxes"] == "pixels" and "resized" not in benchmark.prompt:
            filled["resized"] = resizing(model)
        task.lmms_eval_specific_kwargs = filled


def resizing(model: ModelSpec) -> tuple[int, int, int]:
    """Return the side of a visual token, and the smallest and largest area of a resized picture, in pixels.

    Raises:
        UserError: the model's file does not state them.
    """
    vision = model.architecture.get("vision", {})
    side = vision.get("patch_size", 0) * vision.get("spatial_merge_size", 0)
    smallest, largest = (model.processor.get(f"{end}_pixels") for end in ("min", "max"))
    if not (side and smallest and largest):
        raise UserError(
            f"model.boxes='pixels' needs model.processor.min_pixels and max_pixels, which model={model.name} does not "
            "state; valid: both, or boxes of another format"
        )
    return int(side), int(smallest), int(largest)
