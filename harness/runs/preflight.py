"""Everything that can be known to fail before a model is loaded, checked for every cell before the first one runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from espalier.harness.config.lmms_task_files import index_of, library
from espalier.harness.engine.artifacts.priors import require_prior
from espalier.harness.engine.engine_guards import check_generation
from espalier.harness.errors import Refused, UserError, unknown_name
from espalier.harness.evaluation.judging.judge_check import check_judge
from espalier.harness.kinds.checks.checkpoint_check import check_model
from espalier.harness.kinds.checks.generation_check import check_settings
from espalier.harness.kinds.checks.length_check import check_lengths
from espalier.harness.kinds.checks.template_names import check_template
from espalier.harness.kinds.checks.tools_check import check_needs
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.method_stack import method_of
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store.files.dataset_copies import Copies, check_place
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.files.folder_checks import check_files, check_folder
from espalier.methods.base import Method, MethodError

#: Suffixes of the files that `curves` names.
CURVES = ("png", "svg", "md")


@dataclass(frozen=True)
class Job:
    """A run that has passed every check: what to do, with which method, under which key, and the label of its row."""

    spec: RunSpec
    method: Method
    key: str
    parts: dict[str, Any]
    label: str


def check(spec: RunSpec, digests: Digests, places: bool = True) -> Job:
    """Return the job of `spec`.

    A method that acts nowhere removes nothing, so its ratio is taken as 0: all its cells in a sweep are one run. A
    method that decodes speculatively answers sample by sample, and may settle the ratio of its draft. `places=False`
    asks no disk whether it takes rows.

    Raises:
        Refused: the method does not fit this model, or cannot reach the ratio on it.
        UserError: anything else; always one line with the config key, the value and what is valid.
    """
    try:
        return check_method(spec, method_of(spec.method), digests, places)
    except MethodError as error:
        # A hyper-parameter that does not fit this model, `method.params.<key>`.
        raise Refused(str(error)) from error


def check_method(spec: RunSpec, method: Method, digests: Digests, places: bool = True) -> Job:
    """Return the job of `spec` under a method that has been built, whatever the spec says of it.

    Raises:
        MethodError: a hyper-parameter does not fit this model.
        UserError: as `check`.
    """
    kind, name = kind_of(method), spec.method.name
    _check_generation(spec)
    spec = kind.settle(spec, method)
    check_model(spec.model, spec.offline, digests)
    check_lengths(spec)
    # What is fitted to a model, such as a schedule, is no part of the label.
    label = kind.identity(spec, method).label
    admitted = kind.admit(spec, method, digests)
    _check_benchmark(spec, digests)
    check_judge(spec)
    check_template(spec.model.template, spec.benchmark.include_path)
    priors = require_prior(spec.model, admitted.method, name, digests, spec.store)
    parts = key_parts(spec, admitted.method, digests, (*admitted.artifacts, *priors))
    key = run_key(parts)
    if places:
        _check_places(spec, key)
    return Job(spec, admitted.method, key, parts, label)


def _check_generation(spec: RunSpec) -> None:
    check_settings("model.generation", spec.model.generation)
    check_settings("benchmark.generation", spec.benchmark.generation)
    check_generation(spec.generation)


def _check_places(spec: RunSpec, key: str) -> None:
    """Refuse what could not be written at the end, or at all; a row that is there is read and takes nothing."""
    run = RunDir(spec.store / "runs" / key)
    if spec.force or not run.finished:
        Store(spec.store).check_writable()
        run.check_writable()
    if spec.curves is not None:
        check_files("curves", spec.curves, CURVES)
    if spec.report is not None:
        check_folder("report", spec.report)


def _check_benchmark(spec: RunSpec, digests: Digests) -> None:
    benchmark = spec.benchmark
    check_needs(benchmark)
    path = benchmark.include_path
    if path is not None and not path.is_dir():
        raise UserError(f"benchmark.include_path={str(path)!r} is not a directory of task files")
    for key, folder in (("include_path", path), *(("sources", one) for one in benchmark.sources)):
        if folder is not None:
            check_place(f"benchmark.{key}", folder)
    for source in benchmark.sources:
        if not source.exists():
            raise UserError(f"benchmark.sources={str(source)!r} does not exist")
    if benchmark.path is not None:
        Copies(benchmark.path, benchmark.dataset.path).check()
    ours: Collection[str] = ()
    if path is not None:
        ours = digests.once(("tasks", path), lambda: index_of(path).names)
    if benchmark.task not in ours and benchmark.task not in library().names:
        # All names of lmms-eval would fill a page.
        valid = sorted(ours) or ["the tasks of lmms-eval"]
        raise unknown_name("benchmark.task", benchmark.task, valid)
