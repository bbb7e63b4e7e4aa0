"""Everything that can be known to fail before a model is loaded, checked for every cell before the first one runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.admission import speculative
from harness.admission.checkpoints import check_model
from harness.admission.generation import check_settings
from harness.admission.signals import check_frames, check_signals
from harness.admission.templates import check_template
from harness.artifacts.priors import require_prior
from harness.artifacts.schemes import with_scheme
from harness.budget import Budget
from harness.catalogue import METHODS, build_method
from harness.digests import Digests
from harness.engine.guards import check_generation, require_one_beam
from harness.engine.positions import closes_gaps
from harness.errors import Refused, UserError, unknown_name
from harness.folders import check_files, check_folder
from harness.running.keys import key_parts, run_key
from harness.specs import RunSpec
from harness.store import Store
from methods.base import Decoder, MethodError, TokenReducer
from methods.none import NoReduction

#: Suffixes of the files that `curves` names.
CURVES = ("png", "svg", "md")

#: A line of an lmms-eval task file that gives a task, group or tag its name.
DECLARED = re.compile(r"^(?:task|group|tag):[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A run that has passed every check: what to do, with which method, under which key."""

    spec: RunSpec
    method: TokenReducer | Decoder
    key: str
    parts: dict[str, Any]

    @property
    def reducer(self) -> TokenReducer:
        """What acts on the model's tokens: the method itself, and nothing where it decodes speculatively."""
        return self.method if isinstance(self.method, TokenReducer) else NoReduction()


def check(spec: RunSpec, digests: Digests) -> Job:
    """Return the job of `spec`.

    A method that acts nowhere removes nothing, so its ratio is taken as 0: all its cells in a sweep are one run. A
    method that decodes speculatively answers sample by sample, and may settle the ratio of its draft.

    Raises:
        Refused: the method does not fit this model, or cannot reach the ratio on it.
        UserError: anything else; always one line with the config key, the value and what is valid.
    """
    try:
        return _check(spec, digests)
    except MethodError as error:
        # A hyper-parameter that does not fit this model, `method.params.<key>`.
        raise Refused(str(error)) from error


def _check(spec: RunSpec, digests: Digests) -> Job:
    method = build_method(spec.method.name, spec.method.params)
    name = spec.method.name
    if not isinstance(method, TokenReducer | Decoder):
        raise UserError(
            f"method={name!r} neither reduces tokens nor decodes; valid: {', '.join(METHODS.names())}"
        )
    check_signals(spec.model, method, name)
    _check_generation(spec, method)
    artifacts: tuple[Path, ...] = ()
    if isinstance(method, Decoder):
        spec = speculative.settled(spec, method)
        speculative.check_graphs(spec, method)
        check_model(spec.model, spec.offline, digests)
        artifacts = speculative.check_draft(spec, method, digests)
    else:
        spec = _settled(spec, method)
        check_model(spec.model, spec.offline, digests)
        method = with_scheme(spec.model, method, name, digests, spec.store)
        spec.budget.check(method, spec.model.facts)
        check_frames(spec.model, method, name)
    _check_benchmark(spec)
    check_template(spec.model.template, spec.benchmark.include_path)
    _check_places(spec)
    artifacts += require_prior(spec.model, method, name, digests, spec.store)
    parts = key_parts(spec, method, digests, artifacts)
    return Job(spec, method, run_key(parts), parts)


def _settled(spec: RunSpec, method: TokenReducer) -> RunSpec:
    """Return the run with the ratio 0 where the method acts nowhere, its positions checked."""
    facts = spec.model.facts
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    closes_gaps(spec.engine.positions, method, facts)  # raises what is refused
    return spec if sites else replace(spec, budget=Budget(rule="kept", ratio=0.0))


def _check_generation(spec: RunSpec, method: TokenReducer | Decoder) -> None:
    check_settings("model.generation", spec.model.generation)
    check_settings("benchmark.generation", spec.benchmark.generation)
    generation = {**spec.model.generation, **spec.benchmark.generation}
    check_generation(generation)
    if isinstance(method, Decoder):
        speculative.check_one_beam(spec.method.name, generation)
    elif method.decode_site(spec.model.facts.text.layers) is not None:
        require_one_beam(generation.get("num_beams") or 1)


def _check_places(spec: RunSpec) -> None:
    """Refuse what could not be written at the end, or at all."""
    Store(spec.store).check_writable()
    if spec.curves is not None:
        check_files("curves", spec.curves, CURVES)
    if spec.report is not None:
        check_folder("report", spec.report)


def _check_benchmark(spec: RunSpec) -> None:
    benchmark = spec.benchmark
    path = benchmark.include_path
    if path is not None and not path.is_dir():
        raise UserError(f"benchmark.include_path={str(path)!r} is not a directory of task files")
    for source in benchmark.sources:
        if not source.exists():
            raise UserError(f"benchmark.sources={str(source)!r} does not exist")
    ours = task_names(path) if path is not None else set()
    if benchmark.task not in ours and benchmark.task not in _library_tasks():
        # All names of lmms-eval would fill a page.
        valid = sorted(ours) or ["the tasks of lmms-eval"]
        raise unknown_name("benchmark.task", benchmark.task, valid)


def task_names(folder: Path) -> set[str]:
    """Return the tasks, groups and tags that the task files below a folder declare. Cost: one read of each file."""
    texts = (path.read_text(errors="replace") for path in folder.rglob("*.yaml"))
    return {name for text in texts for name in DECLARED.findall(text)}


def _library_tasks() -> set[str]:
    # The package is found, not imported: its import takes seconds.
    found = find_spec("lmms_eval")
    return task_names(Path(found.origin).parent / "tasks") if found and found.origin else set()
