"""The settings of a row, as JSON values: every field of a spec, unless its declaration marks it as `OMITTED`.

A row of earlier code lacks newer fields, so a field at its default is left out, except those that every row has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from espalier.harness.settings import COST, OMITTED, OPEN, STATED, default, marked
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.specs.records.record import RecordSettings
from espalier.harness.specs.run_spec import BackendSpec, EngineSpec, ModelSpec

#: The spec of each block.
SECTIONS: Mapping[str, type] = {
    "model": ModelSpec,
    "draft": ModelSpec,
    "benchmark": BenchmarkSpec,
    "engine": EngineSpec,
    "judge": JudgeSpec,
    "backend": BackendSpec,
}

#: Settings that change costs or records of a run, and no answer.
COSTS = frozenset(f"engine.{name}" for name in marked(EngineSpec, COST))

#: Settings that published tables leave open unless a cell sets them: fields, and digests of files.
LEFT_OPEN = COSTS.union(
    (f"{part}.{name}" for part, section in SECTIONS.items() for name in marked(section, OPEN)),
    ("benchmark.files", "artifacts"),
)

#: Settings that every row of a block has, by dotted key: a row without one is of an earlier version. Some are not
#: fields of their block: they are written below.
IN_ROWS = frozenset(
    (
        *(
            f"{part}.{field.name}"
            for part, section in SECTIONS.items()
            for field in fields(section)
            if field.name in marked(section, STATED)
            or (default(field) is MISSING and field.name not in marked(section, OMITTED))
        ),
        *("draft.name", "benchmark.boxes", "benchmark.dataset", "judge.prompt"),
    )
)


def model_settings(
    model: ModelSpec, revision: str | None, quantisation: str | None
) -> dict[str, Any]:
    """Return the settings of a model.

    Args:
        model: the model.
        revision: digest of the checkpoint's files, or hub id and commit.
        quantisation: of the weights; None: they are not quantised.
    """
    stated = asdict(model.facts)
    # The signals and sites of a model decide which methods run on it and do not change numbers: a new one changes no
    # row. The work on a nominal picture enters estimates alone.
    del stated["signals"], stated["unproved"], stated["nominal_work"]
    if not model.facts.deepstack:
        # Older rows do not have this fact.
        del stated["deepstack"]
    # Pixels, videos and generation settings of the prompt set are in the fields of the model, its text and its limits
    # in those of the benchmark.
    values = _fields(model.prompt)
    name = values.pop("name", None)
    return {
        **_fields(model),
        # Of a user's class without its folder.
        "adapter": model.adapter.rpartition("/")[2],
        "revision": revision,
        # A checkpoint brings its own configuration, which its revision covers.
        "architecture": model.architecture if model.weights == "random" else None,
        "facts": stated,
        **(values if name is None else {"prompt": name, **values}),
        **({} if quantisation is None else {"quantisation": quantisation}),
    }


def benchmark_settings(
    benchmark: BenchmarkSpec, model: ModelSpec, files: Sequence[str], data: str | None
) -> dict[str, Any]:
    """Return the settings of a benchmark.

    Args:
        benchmark: the benchmark.
        model: the model that answers.
        files: digests of the files that make its samples and scores.
        data: digest of its data set in a folder of the user; None: the data set of the hub.
    """
    source = benchmark.dataset
    dataset = {"path": source.path, "revision": source.revision}
    further = {
        "dataset": dataset if any(dataset.values()) else None,
        "data": data,
        "score": _score(benchmark.records),
        # A nested table, since 0 is a setting and only None is absent.
        "intervals": None if benchmark.blocks is None else {"blocks": benchmark.blocks},
        # The format of boxes only changes rows of benchmarks that request boxes.
        "boxes": model.boxes if benchmark.kind == "localization" else None,
    }
    return {
        **_fields(benchmark),
        "files": files,
        **{key: value for key, value in further.items() if value is not None},
    }


def engine_settings(engine: EngineSpec, concerning: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the engine; `concerning` are those marked `BY_METHOD` as they stand for the method."""
    return {**_fields(engine), **concerning}


def judge_settings(judge: JudgeSpec, words: str | None) -> dict[str, Any]:
    """Return the settings of a judge; `words` is the digest of a prompt that replaces the benchmark's."""
    return {**_fields(judge), "prompt": words}


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _fields(section: Any) -> dict[str, Any]:
    """Return the fields that are not `OMITTED`: those off their default, and those that are `STATED`."""
    present, omitted = marked(type(section), STATED), marked(type(section), OMITTED)
    return {
        field.name: value
        for field in fields(section)
        if field.name not in omitted
        and ((value := getattr(section, field.name)) != default(field) or field.name in present)
    }


def _score(records: RecordSettings | None) -> dict[str, Any] | None:
    if records is None:
        return None
    tolerance = asdict(records.tolerance) if records.score == "number" else {}
    return {"name": records.score, **tolerance}
