"""Everything that can be known to fail before a model is loaded, checked for every cell before the first one runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.adapters.base import ADAPTERS
from harness.budget import Budget
from harness.calibration.priors import require_prior
from harness.calibration.schemes import with_scheme
from harness.config.spec import ModelSpec, RunSpec
from harness.engine.guards import check_generation, require_one_beam
from harness.errors import Refused, UserError, unknown_name
from harness.evaluation.generation import check_names
from harness.facts import ModelFacts
from harness.running.keys import Digests, cached_commit, key_parts, run_key
from harness.store import Store
from methods.base import MethodError, TokenReducer
from methods.registry import METHODS, build_method

#: A line of an lmms-eval task file that gives a task, group or tag its name.
DECLARED = re.compile(r"^(?:task|group|tag):[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A run that has passed every check: what to do, with which method, under which key."""

    spec: RunSpec
    method: TokenReducer
    key: str
    parts: dict[str, Any]


def check(spec: RunSpec, digests: Digests) -> Job:
    """Return the job of `spec`.

    A method that acts nowhere removes nothing, so its ratio is taken as 0: all its cells in a sweep are one run.

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
    if not isinstance(method, TokenReducer):
        raise UserError(
            f"method={spec.method.name!r} does not reduce tokens; valid: {', '.join(METHODS.names())}"
        )
    facts = spec.model.facts
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    if not sites:
        spec = replace(spec, budget=Budget(rule="kept", ratio=0.0))
    _check_signals(spec, method)
    axes = spec.model.facts.rotary_axes
    if spec.engine.positions == "renumbered" and axes > 1:
        raise UserError(
            f"engine.positions='renumbered' needs positions on one axis, and model={spec.model.name!r} has {axes}; "
            "valid: original, method"
        )
    if spec.engine.positions == "renumbered" and any(site.where == "layer" for site in sites):
        raise UserError(
            f"engine.positions='renumbered' works before layer 0 only, and method={spec.method.name!r} acts between "
            "layers; valid: original, method"
        )
    check_names("model.generation", spec.model.generation)
    check_names("benchmark.generation", spec.benchmark.generation)
    generation = {**spec.model.generation, **spec.benchmark.generation}
    check_generation(generation)
    if method.decode_site(facts.text.layers) is not None:
        require_one_beam(generation.get("num_beams") or 1)
    _check_model(spec, digests)
    method = with_scheme(spec.model, method, spec.method.name, digests)
    spec.budget.check(method, spec.model.facts)
    _check_frames(spec, method)
    _check_benchmark(spec)
    Store(spec.store).check_writable()
    artifacts = require_prior(spec.model, method, spec.method.name, digests)
    parts = key_parts(spec, method, digests, artifacts)
    return Job(spec, method, run_key(parts), parts)


def signals_of(method: TokenReducer, facts: ModelFacts) -> set[str]:
    """Return the names of all signals that a method reads in a model."""
    step = method.decode_site(facts.text.layers)
    sites = method.all_sites(facts.tower.layers, facts.text.layers) + ((step,) if step else ())
    return {need.signal for site in sites for need in method.needs(site)}


def _carries(name: str, spec: RunSpec) -> bool:
    """Say whether the model has the layers and the signals of a method with its default hyper-parameters."""
    facts = spec.model.facts
    try:
        method = build_method(name, {})
        assert isinstance(method, TokenReducer)  # the only base that runs
        inside = bool(method.tower_sites(facts.tower.layers))
        return signals_of(method, facts) <= facts.signals and (facts.patch_tokens or not inside)
    except MethodError:
        return False


def _check_signals(spec: RunSpec, method: TokenReducer) -> None:
    facts = spec.model.facts
    if method.tower_sites(facts.tower.layers) and not facts.patch_tokens:
        raise Refused(
            f"method={spec.method.name!r} acts inside the vision tower, and the visual tokens of "
            f"model={spec.model.name!r} are not its patches one to one (model.facts.patch_tokens=false)"
        )
    missing = sorted(signals_of(method, facts) - facts.signals)
    if not missing:
        return
    able = [name for name in METHODS.names() if _carries(name, spec)]
    raise Refused(
        f"method={spec.method.name!r} needs {', '.join(missing)}, which model={spec.model.name!r} does not have; "
        f"valid: {', '.join(able)}"
    )


def _check_frames(spec: RunSpec, method: TokenReducer) -> None:
    # Imports the family's code only for methods that compare frames.
    if method.needs_frames() and not ADAPTERS.load(spec.model.adapter).takes_video:
        raise Refused(
            f"method={spec.method.name!r} compares the frames of videos, and model={spec.model.name!r} takes images "
            "only"
        )


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


def _check_model(spec: RunSpec, digests: Digests) -> None:
    model = spec.model
    if model.adapter not in ADAPTERS:
        raise unknown_name("model.adapter", model.adapter, ADAPTERS.names())
    _check_precision(model)
    if model.processor:
        # Imports the family's code, which takes seconds; most models state settings, and a run needs it anyway.
        ADAPTERS.load(model.adapter).check_settings(model)
    if model.weights == "random":
        if not model.architecture:
            raise UserError(
                f"model.weights='random': model={model.name!r} states no model.architecture to build; valid: trained"
            )
        return
    if model.path is None:
        if spec.offline and cached_commit(model) is None:
            raise UserError(
                f"model.hub={model.hub!r} is not in the local Hugging Face cache; valid: model.path=<directory>, "
                "or offline=false to download it"
            )
        return
    check_checkpoint(model.path, digests)


def _check_precision(model: ModelSpec) -> None:
    """Refuse what the device cannot compute, or only in emulation."""
    on_cpu = model.device == "cpu" and model.device_map is None
    if on_cpu and model.dtype == "float16":
        raise UserError(
            "model.dtype='float16' on the CPU: half precision is slow and overflows there; valid: float32, bfloat16"
        )
    if model.attention == "flash_attention_2" and (on_cpu or model.dtype == "float32"):
        raise UserError(
            f"model.attention='flash_attention_2' needs a GPU and half precision, not {model.dtype} on "
            f"{model.device}; valid: sdpa, eager"
        )
    if model.dtype == "bfloat16" and not on_cpu:
        import torch

        if not torch.cuda.is_bf16_supported():
            raise UserError(
                f"model.dtype='bfloat16': {torch.cuda.get_device_name()} has no bfloat16; valid: float16, float32"
            )


def check_checkpoint(path: Path, digests: Digests) -> None:
    """Raise UserError unless `path` holds a model config and whole weight files.

    A weight file is whole if its header parses and promises exactly the bytes that follow, and if it has the SHA-256
    of a `<file>.sha256` beside it, where there is one. Cost: one read of files that have a checksum, headers otherwise.
    """
    weights = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file() or not weights:
        raise UserError(
            f"model.path={str(path)!r} holds no model; valid: a directory with config.json and *.safetensors"
        )
    for file in weights:
        problem = _damage(file)
        recorded = file.with_name(f"{file.name}.sha256")
        if problem is None and recorded.is_file():
            expected = recorded.read_text().split()[:1]
            if expected != [digests.file(file)]:
                problem = f"its SHA-256 differs from {recorded.name}"
        if problem is not None:
            raise UserError(
                f"model.path: weight file {str(file)!r} is damaged: {problem}; valid: the original file"
            )


def _damage(file: Path) -> str | None:
    """Return what is wrong with a safetensors file: 8 bytes of header length, a JSON header, then the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return f"{size} bytes are too few for its header"
        try:
            header = json.loads(stream.read(length))
            ends = [
                entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
            ]
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            return "its header does not parse"
    promised = 8 + length + max(ends, default=0)
    return None if promised == size else f"{size} bytes, its header promises {promised}"
