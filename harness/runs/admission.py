"""Admission: every check of a run before its model is loaded, in one ordered list.

All runs of a command are admitted before the first one starts. Kinds of method add their own checks
(`Kind.normalise`, `Kind.resolve`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.harness.config.lmms_task_files import index_of, library
from espalier.harness.decoding.diffusion.denoising_settings import refuse_denoising_settings
from espalier.harness.engine.artifacts.priors import require_prior
from espalier.harness.engine.engine_guards import check_generation
from espalier.harness.errors import Refused, UserError, tell_once, unknown_name
from espalier.harness.evaluation.judging.judge_prompt import check_judge
from espalier.harness.evaluation.metered import check_meters, open_meters
from espalier.harness.kinds.checks.benchmark_check import (
    check_needs,
    check_template,
    note_unknown_words,
)
from espalier.harness.kinds.checks.checkpoint_check import check_model
from espalier.harness.kinds.checks.generation_check import check_budget_of_reasoning, check_settings
from espalier.harness.kinds.checks.length_check import check_lengths
from espalier.harness.kinds.checks.pair_check import check_vocabulary
from espalier.harness.kinds.checks.signal_check import check_scope
from espalier.harness.kinds.kind import Kind
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.method_stack import method_of
from espalier.harness.ranks import Ranks
from espalier.harness.runs import wandb_log
from espalier.harness.runs.network import go_offline
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.runs.served.backend_check import check_backend
from espalier.harness.specs.comparable import USUAL, check_comparable
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store.files.dataset_copies import Copies, check_place
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.files.folder_checks import below, check_files, check_folder
from espalier.methods.base import Method, MethodError

#: Suffixes of the files that `curves` names.
CURVES = ("png", "svg", "md")


@dataclass(frozen=True)
class Job:
    """An admitted run: its normalised spec, the method, the run key and its parts, and the label of its row."""

    spec: RunSpec
    method: Method
    key: str
    parts: dict[str, Any]
    label: str

    def outline(self) -> dict[str, Any]:
        """Return the part of the row that is known before the run: cell, requested samples, settings and label.

        If `keep` is set, the ratio is that of a picture of nominal size.
        """
        return {
            **self.parts["cell"],
            "ratio": self.spec.budget.ratio,
            "n_samples": self.spec.benchmark.limit,
            "settings": self.parts["settings"],
            "extra": {"label": self.label},
        }


@dataclass
class Candidate:
    """A run while it is checked; checks of the list fill in what later ones need.

    Attributes:
        spec: the run, normalised by its kind.
        method: the method, with its calibrations filled in.
        digests: remembers file hashes over a sweep.
        kind: the kind of the method.
        label: of the row.
        artifacts: calibration files that the method reads.
    """

    spec: RunSpec
    method: Method
    digests: Digests
    kind: Kind[Any] = field(init=False)
    label: str = ""
    artifacts: tuple[Path, ...] = ()


def admit(
    spec: RunSpec, digests: Digests, places: bool = True, method: Method | None = None
) -> Job:
    """Return the job of a run.

    A method that acts nowhere removes nothing, so its ratio is taken as 0: all its ratios in a sweep are one run. A
    speculative decoder answers sample by sample, and may determine the ratio of its draft.

    Args:
        spec: the run.
        digests: remembers file hashes over a sweep.
        places: whether to check that the row can be written, which writes.
        method: a built method in place of the spec's.

    Raises:
        Refused: the method does not fit this model, or cannot reach the ratio on it.
        UserError: anything else; always one line with the config key, the value and what is valid.
    """
    try:
        run = Candidate(spec, method_of(spec.method) if method is None else method, digests)
        for _, check in CHECKS:
            check(run)
        parts = key_parts(run.spec, run.method, digests, run.artifacts)
    except MethodError as error:
        # A hyper-parameter that does not fit this model, `method.params.<key>`.
        raise Refused(str(error)) from error
    key = run_key(parts)
    if places:
        check_places(run.spec, key)
    _name_unused(spec, run)
    return Job(run.spec, run.method, key, parts, run.label)


def _name_unused(spec: RunSpec, run: Candidate) -> None:
    """Print the engine's settings that a method does not use: a sweep over one can include such methods."""
    for name, value in run.kind.identity(run.spec, run.method).engine.items():
        typed = getattr(spec.engine, name)
        if value is None and typed != getattr(USUAL, name):
            tell_once(f"engine.{name}={typed}: method={run.spec.method.title} does not use it")


def admit_here(
    spec: RunSpec,
    ranks: Ranks,
    digests: Digests,
    places: bool = True,
    method: Method | None = None,
) -> Job:
    """Return the job of a run that this process can compute, by PROCESS_CHECKS and `admit`."""
    for _, check in PROCESS_CHECKS:
        check(spec, ranks)
    return admit(spec, digests, places, method)


def check_drawn(jobs: Sequence[Job]) -> None:
    """Raise UserError if `curves` or `report` would mix rows of different settings."""
    drawn = [job for job in jobs if job.spec.curves or job.spec.report]
    try:
        check_comparable(job.outline() for job in drawn)
    except UserError as error:
        key = "curves" if drawn[0].spec.curves else "report"
        raise UserError(
            f"{key}={str(getattr(drawn[0].spec, key))!r}: {error}; or {key}=null"
        ) from error


# ------------------------------------------------------------------ of the process


def _use_no_network(spec: RunSpec, ranks: Ranks) -> None:
    if spec.offline:
        go_offline()


def _check_log(spec: RunSpec, ranks: Ranks) -> None:
    if spec.log == "wandb":
        wandb_log.check(spec.log_options)
        below(spec.store, "wandb")


def _check_device_map(spec: RunSpec, ranks: Ranks) -> None:
    if spec.model.device_map is not None and ranks.world > 1:
        raise UserError(
            f"model.device_map={spec.model.device_map!r} lets one process use all devices; "
            f"valid for {ranks.world} processes: null"
        )


def _check_draft_device(spec: RunSpec, ranks: Ranks) -> None:
    if spec.method.draft is not None and ranks.world > 1:
        raise UserError(
            f"method={spec.method.name!r} has a device for its draft, which {ranks.world} processes would "
            "share; valid: one process"
        )


def _check_parallel(spec: RunSpec, ranks: Ranks) -> None:
    """Refuse tensor parallelism where one process alone would run the model, or where it is not proved."""
    if spec.model.parallel != "tensor":
        return
    key, heads = "model.parallel='tensor'", spec.model.facts.text.kv_heads
    if ranks.world == 1:
        raise UserError(
            f"{key} needs several processes; valid: torchrun --nproc_per_node <processes> run.py ..."
        )
    if heads % ranks.world:
        problem = (
            "more tensor ranks than heads" if ranks.world > heads else "heads that do not divide"
        )
        counts = [count for count in range(2, heads + 1) if heads % count == 0]
        raise UserError(
            f"{key} with {ranks.world} processes: {problem}, model={spec.model.name} has {heads} key heads; "
            f"valid: {', '.join([*map(str, counts), 'or model.parallel=data'])}"
        )
    refused = {
        f"method={spec.method.name!r}, which has two models": spec.method.draft is not None,
        f"model={spec.model.name!r}, which denoises": spec.model.facts.denoises,
        "model.weights='random'": spec.model.weights == "random",
        f"model.device_map={spec.model.device_map!r}": spec.model.device_map is not None,
        f"backend={spec.backend.name!r}": spec.backend.served,
        f"engine.share={spec.engine.share!r}": spec.engine.share != "none",
        f"benchmark={spec.benchmark.name!r}, which measures times": spec.benchmark.prompt_tokens
        is not None,
        "log.pictures": bool(spec.log_pictures),
    }
    for name, is_set in refused.items():
        if is_set:
            raise UserError(f"{key} does not take {name}; valid: model.parallel=data")


def _use_device(spec: RunSpec, ranks: Ranks) -> None:
    ranks.use_device(spec.model.device)


def _open_meters(spec: RunSpec, ranks: Ranks) -> None:
    open_meters(spec)


# ------------------------------------------------------------------ of the run


def _check_generation(run: Candidate) -> None:
    check_settings("model.generation", run.spec.model.generation)
    check_settings("benchmark.generation", run.spec.benchmark.generation)
    check_generation(run.spec.generation)


def _find_kind(run: Candidate) -> None:
    check_budget_of_reasoning(run.spec, run.method)
    run.kind = kind_of(run.method, run.spec)
    if not run.spec.model.facts.denoises:
        refuse_denoising_settings(run.spec.generation, run.spec.model.name)


def _check_vocabulary(run: Candidate) -> None:
    model, benchmark = run.spec.model, run.spec.benchmark
    published = benchmark.dataset.path is not None
    check_vocabulary(model.name, model.closed_vocabulary, benchmark.name, published)


def _normalise(run: Candidate) -> None:
    run.spec = run.kind.normalise(run.spec, run.method)


def _check_scope(run: Candidate) -> None:
    check_scope(run.spec, run.method)


def _check_model(run: Candidate) -> None:
    check_model(run.spec.model, run.spec.offline, run.digests)


def _check_meters(run: Candidate) -> None:
    engine = run.kind.identity(run.spec, run.method).engine
    check_meters(engine, run.spec.engine.meters)


def _check_lengths(run: Candidate) -> None:
    check_lengths(run.spec)


def _resolve(run: Candidate) -> None:
    # What is fitted to a model, such as a schedule, is not part of the label.
    run.label = run.kind.identity(run.spec, run.method).label
    resolved = run.kind.resolve(run.spec, run.method, run.digests)
    run.method, run.artifacts = resolved.method, resolved.artifacts


def _check_backend(run: Candidate) -> None:
    check_backend(run.spec, run.method)


def _check_needs(run: Candidate) -> None:
    check_needs(run.spec.benchmark)


def _check_task_folders(run: Candidate) -> None:
    benchmark = run.spec.benchmark
    path = benchmark.include_path
    # Not Path.is_dir and Path.exists, which raise for names that are too long.
    if path is not None and not os.path.isdir(path):
        raise UserError(f"benchmark.include_path={str(path)!r} is not a directory of task files")
    for key, folder in (
        ("include_path", path),
        *(("sources", source) for source in benchmark.sources),
    ):
        if folder is not None:
            check_place(f"benchmark.{key}", folder)
    for source in benchmark.sources:
        if not os.path.exists(source):
            raise UserError(f"benchmark.sources={str(source)!r} does not exist")


def _check_data(run: Candidate) -> None:
    benchmark = run.spec.benchmark
    if benchmark.records is not None:
        benchmark.own_data()
    elif benchmark.path is not None:
        Copies(benchmark.path, benchmark.dataset.path).check()


def _check_task(run: Candidate) -> None:
    benchmark, path = run.spec.benchmark, run.spec.benchmark.include_path
    names: Collection[str] = ()
    if path is not None:
        names = run.digests.once(("tasks", path), lambda: index_of(path).names)
    if benchmark.task not in names and benchmark.task not in library().names:
        # All names of lmms-eval would fill a page.
        valid = sorted(names) or ["the tasks of lmms-eval"]
        raise unknown_name("benchmark.task", benchmark.task, valid)


def _note_words(run: Candidate) -> None:
    note_unknown_words(run.spec)


def _check_judge(run: Candidate) -> None:
    check_judge(run.spec)


def _check_template(run: Candidate) -> None:
    check_template(run.spec.model.template, run.spec.benchmark.include_path)


def _require_priors(run: Candidate) -> None:
    name, store = run.spec.method.name, run.spec.store
    run.artifacts += require_prior(run.spec.model, run.method, name, run.digests, store)


def check_places(spec: RunSpec, key: str) -> None:
    """Refuse a run if its row could not be written; a stored row is read and needs no space."""
    run = RunDir(spec.store / "runs" / key)
    if spec.force or not run.finished:
        Store(spec.store).check_writable()
        run.check_writable()
    if spec.curves is not None:
        check_files("curves", spec.curves, CURVES)
    if spec.report is not None:
        check_folder("report", spec.report)


#: The config key that each check reads first, and the check, in the order in which runs are refused.
PROCESS_CHECKS: tuple[tuple[str, Callable[[RunSpec, Ranks], None]], ...] = (
    ("offline", _use_no_network),
    ("log", _check_log),
    ("model.parallel", _check_parallel),
    ("model.device_map", _check_device_map),
    ("method.draft", _check_draft_device),
    ("model.device", _use_device),
    ("engine", _open_meters),
)

#: The same for what does not depend on the process.
CHECKS: tuple[tuple[str, Callable[[Candidate], None]], ...] = (
    ("generation", _check_generation),
    ("method", _find_kind),
    ("benchmark", _check_vocabulary),
    ("engine", _normalise),
    ("engine", _check_scope),
    ("engine", _check_meters),
    ("model", _check_model),
    ("benchmark.prompt_tokens", _check_lengths),
    ("ratio", _resolve),
    ("backend", _check_backend),
    ("benchmark.needs", _check_needs),
    ("benchmark.include_path", _check_task_folders),
    ("benchmark.path", _check_data),
    ("benchmark.task", _check_task),
    ("model.path", _note_words),
    ("judge", _check_judge),
    ("model.template", _check_template),
    ("store", _require_priors),
)
