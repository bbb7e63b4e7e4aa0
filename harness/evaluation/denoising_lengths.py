"""Check, before weights are read, that a task's answers can be denoised in whole blocks and steps."""

from __future__ import annotations

from collections.abc import Iterable

from lmms_eval.api.task import Task

from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.errors import UserError
from espalier.harness.kinds.checks.length_check import check_places
from espalier.harness.specs.generation import settings
from espalier.harness.specs.run_spec import RunSpec


def check_denoised(tasks: Iterable[Task], spec: RunSpec) -> None:
    """Check each task's generation settings for a model that denoises; for other models do nothing.

    Raises:
        UserError: a setting cannot be honoured; the line names the task, because its file may have set it.
    """
    if spec.model.facts.diffusion is None:
        return
    for task in tasks:
        task_settings = task.config.generation_kwargs or {}
        requested = settings(task_settings, spec.model.generation, spec.benchmark.generation)
        try:
            check_places(spec, Denoising.of(requested.generate).length)
        except UserError as error:
            raise UserError(
                f"{error}; these are the settings of benchmark.task={task.config.task!r}, over which "
                "benchmark.generation goes"
            ) from error
