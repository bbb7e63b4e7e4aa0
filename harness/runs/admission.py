"""Admission: every check of a run before its model is loaded, in one ordered list.

All runs of a command are admitted before the first one starts. Kinds of method add their own checks
(`Kind.normalise`, `Kind.resolve`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.catalogue import own_choices
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import Cell
from espalier.harness.config.lmms_task_files import (
    Index,
    index_of,
    library,
    library_folder,
)
from espalier.harness.config.overrides import override_of
from espalier.harness.engine.priors import require_prior
from espalier.harness.errors import Refused, UserError, tell_once, unknown_name
from espalier.harness.evaluation.judging.judge_prompt import read_prompt
from espalier.harness.evaluation.metered import check_meters, open_meters
from espalier.harness.kinds.checkpoint_check import check_lengths, check_model
from espalier.harness.kinds.lookup import kind_of, method_of
from espalier.harness.ranks import Ranks
from espalier.harness.runs import wandb_log
from espalier.harness.runs.early_checks import check_vocabulary
from espalier.harness.runs.idle_seed import without_idle_seed
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.comparable import USUAL, check_comparable
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.generation import (
    TOKENS,
    Thinking,
    check_answers,
    check_generation,
    check_settings,
)
from espalier.harness.specs.hub_cache import go_offline
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import RunDir, Store
from espalier.harness.store.files.dataset_copies import Copies
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.files.folder_checks import below, check_files, check_folder
from espalier.methods.base import Method, MethodError

#: Suffixes of the files that `curves` names.
CURVES = ("png", "svg", "md")


#: The table of a task file that holds prompts by family, up to the next key at the margin.
_TABLE = re.compile(
    r"^lmms_eval_specific_kwargs:[ \t]*\n((?:[ \t]+.*\n?|[ \t]*\n|#.*\n?)*)", re.MULTILINE
)
#: A key in it that opens a table: a family's name. Deeper ones are filtered by their indent.
_FAMILY = re.compile(r"^([ \t]+)[\"']?([\w.-]+)[\"']?[ \t]*:[ \t]*(?:#.*)?$", re.MULTILINE)


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
        job = _checked(spec, method_of(spec.method) if method is None else method, digests)
    except MethodError as error:
        # A hyper-parameter that does not fit this model, `method.params.<key>`.
        raise Refused(str(error)) from error
    if places:
        check_places(job.spec, job.key)
    # A sweep over a setting of the engine can include methods that do not use it.
    for name, value in kind_of(job.method, job.spec).identity(job.spec, job.method).engine.items():
        typed = getattr(spec.engine, name)
        if value is None and typed != getattr(USUAL, name):
            tell_once(f"engine.{name}={typed}: method={job.spec.method.title} does not use it")
    return job


def _checked(spec: RunSpec, method: Method, digests: Digests) -> Job:
    """Return the job of a run after all checks that do not depend on the process, in the order of refusals."""
    check_settings("model.generation", spec.model.generation)
    check_settings("benchmark.generation", spec.benchmark.generation)
    check_generation(spec.generation)
    thinking = Thinking.of(spec.model.generation.get("thinking"))
    if thinking is not None and thinking.budget is not None:
        refuse("a budget of reasoning", spec, method)
    kind = kind_of(method, spec)
    if not spec.model.facts.denoises:
        check_answers(spec.generation, TOKENS, f"model={spec.model.name!r}")
    check_vocabulary(spec)
    spec = kind.normalise(spec, method)
    refuse("scope", spec, method)
    # What is fitted to a model below, such as a schedule, is not part of the label.
    identity = kind.identity(spec, method)
    check_meters(identity.engine, spec.engine.meters)
    tasks = spec.benchmark.kind, spec.benchmark.name
    check_model(spec.model, spec.offline, digests, tasks)
    check_lengths(spec)
    resolved = kind.resolve(spec, method, digests)
    method = resolved.method
    if spec.backend.served:
        # Most runs do not need it.
        from espalier.harness.runs.served.backend_check import check_backend

        check_backend(spec, method)
    refuse("tools of a benchmark", spec)
    spec = without_idle_seed(spec, method, _checked_tasks(spec.benchmark, digests), digests)
    if spec.model.closed_vocabulary and spec.benchmark.records is not None:
        tell_once(
            f"model={spec.model.name} knows the words of its own scenes alone: those of {spec.benchmark.name} may be "
            "unknown to it (+benchmark.prompt.post_prompt='' leaves out the instruction)"
        )
    _check_judge(spec)
    check_template(spec.model.template, spec.benchmark.include_path)
    priors = require_prior(spec.model, method, spec.method.name, digests, spec.store)
    parts = key_parts(spec, method, digests, (*resolved.artifacts, *priors))
    return Job(spec, method, run_key(parts), parts, identity.label)


def admit_here(
    spec: RunSpec,
    ranks: Ranks,
    digests: Digests,
    places: bool = True,
    method: Method | None = None,
) -> Job:
    """Return the job of a run that this process can compute, by checks of the process and `admit`."""
    go_offline()
    if spec.log == "wandb":
        wandb_log.check(spec.log_options)
        below(spec.store, "wandb")
    heads = spec.model.facts.text.kv_heads
    counts = "".join(f"{count}, " for count in range(2, heads + 1) if heads % count == 0)
    if spec.model.parallel == "tensor":
        refuse("tensor parallelism", spec, processes=ranks.world, heads=heads, counts=counts)
    if ranks.world > 1:
        refuse("several processes", spec, processes=ranks.world, heads=heads, counts=counts)
    ranks.use_device(spec.model.device)
    open_meters(spec)
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


def _checked_tasks(benchmark: BenchmarkSpec, digests: Digests) -> Index | None:
    """Return the tasks of the benchmark's own folder, if it has one.

    Raises:
        UserError: task files, sources or data are not there, or no file declares the task.
    """
    path = benchmark.include_path
    # Not Path.is_dir and Path.exists, which raise for names that are too long.
    if path is not None and not os.path.isdir(path):
        raise UserError(f"benchmark.include_path={str(path)!r} is not a directory of task files")
    for source in benchmark.sources:
        if not os.path.exists(source):
            raise UserError(f"benchmark.sources={str(source)!r} does not exist")
    if benchmark.records is not None:
        benchmark.own_data()
    elif benchmark.path is not None:
        Copies(benchmark.path, benchmark.dataset.path).check()
    index: Index | None = None
    if path is not None:
        index = digests.once(("tasks", path), lambda: index_of(path))
    names = frozenset() if index is None else index.names
    if benchmark.task not in names and benchmark.task not in library().names:
        # All names of lmms-eval would fill a page.
        valid = sorted(names) or ["the tasks of lmms-eval"]
        raise unknown_name("benchmark.task", benchmark.task, valid)
    return index


def _check_judge(spec: RunSpec) -> None:
    """Refuse a judged benchmark without a judge; the server is not contacted yet."""
    judge = spec.judge
    if "judge" not in spec.benchmark.needs:
        return
    refuse("judge", spec)
    # Imports httpx, a quarter of a second that runs without a judge need not wait for.
    from espalier.harness.evaluation.judging.client import read_key

    read_key(judge.key_env)
    if judge.prompt is not None:
        read_prompt(judge.prompt)


def check_template(name: str | None, include_path: Path | None) -> None:
    """Raise UserError unless some task has prompts for the family `name`; other tasks use their `default`.

    Cost: a quarter of a second, once a process, for a name that only tasks of lmms-eval have.
    """
    if name is None or name == "default":
        return
    ours = families(include_path) if include_path is not None else frozenset()
    if name not in ours and name not in (library := _of_the_library()):
        raise unknown_name("model.template", name, sorted({"default"} | ours | library))


def families(folder: Path) -> frozenset[str]:
    """Return the families that task files below a folder have prompts for. Cost: one read of each file."""
    texts = (path.read_text(errors="replace", encoding="utf-8") for path in folder.rglob("*.yaml"))
    names: set[str] = set()
    for text in texts:
        keys = [key for table in _TABLE.findall(text) for key in _FAMILY.findall(table)]
        margin = min((len(indent) for indent, _ in keys), default=0)
        names.update(name for indent, name in keys if len(indent) == margin)
    return frozenset(names)


@cache  # lmms-eval's task files do not change while a process runs
def _of_the_library() -> frozenset[str]:
    folder = library_folder()
    return frozenset() if folder is None else families(folder)


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


def refused_methods(model: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Return the methods, those of plug-ins included, that do not run on a model, each with the reason.

    Args:
        model: as after `model=`.
        folders: further folders of configs.

    Raises:
        UserError: there is no such model.

    Cost: imports torch and all methods, three seconds.
    """
    names = own_choices("method", folders).all_names
    line = ["-m", f"model={model}", f"method={','.join(names)}"]
    command = read_command([*line, *override_of(folders)])
    reasons = ((name, _reason(cell)) for name, cell in zip(names, command.cells, strict=True))
    return {name: reason for name, reason in reasons if reason is not None}


def _reason(cell: Cell) -> str | None:
    try:
        spec = build_spec(cell)
        method = method_of(spec.method)
        kind_of(method, spec).normalise(spec, method)
    except (UserError, MethodError) as error:
        return str(error)
    return None
