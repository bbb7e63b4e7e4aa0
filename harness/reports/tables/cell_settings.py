"""Settings that a row must have to fill a cell: the overrides of the cell's run, and defaults from config files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any

from espalier.harness.config.group_lists import merged
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.config.prompt_section import apply_prompt_set
from espalier.harness.paths import CONF
from espalier.harness.reports.tables.cell_runs import CellRun, choice, method_of
from espalier.harness.reports.tables.published_tables import FIRST
from espalier.harness.specs.run_spec import PromptSpec, VideoSpec

#: Settings of a model that change its prompts or answers. Precision, kernels and devices count only if a run sets them.
MODEL_SETTINGS = ("weights", "prompt", "join", "conversation", "generation", "processor", "video")

#: Settings of a benchmark that change its samples, questions or answers.
BENCHMARK_SETTINGS = ("generation", "text", "prompt", "prompt_tokens", "new_tokens")

#: Settings of the engine that may change answers and do not depend on the machine; `positions` is checked for all rows.
ENGINE_SETTINGS = ("backend", "decode", "graphs", "separators")

#: Settings of a judge, except its server's names.
JUDGE_SETTINGS = ("temperature", "seed", "max_tokens", "options", "prompt")

#: Settings that a row omits if they have the default, with the default.
OMITTED_DEFAULTS: Mapping[str, Any] = {
    "model.prompt": "original",
    "draft.prompt": "original",
    **dict.fromkeys(("model.join", "draft.join")),
    **dict.fromkeys(f"benchmark.{name}" for name in BENCHMARK_SETTINGS if name != "generation"),
}

#: Settings that no table compares, most of them long: the model or the benchmark determines them.
IGNORED = frozenset({"facts", "architecture", "files", "metrics"})

#: Whether a denoising model caches its prompt; absent means false.
CACHED = "prefix_cache"


@dataclass(frozen=True)
class ComparedSettings:
    """The settings of a run that are compared with those of a row.

    Attributes:
        values: settings by dotted key; a table of a section is one value.
        stated: keys that the run sets itself: a row without them belongs to another run.
    """

    values: Mapping[str, Any]
    stated: frozenset[str]

    def difference(self, row_values: Mapping[str, Any]) -> str:
        """Return the first setting in which a row differs from the run, with both values; empty if there is none.

        Args:
            row_values: the row's settings (`row_settings`).
        """
        for key, value in self.values.items():
            actual = row_values.get(key, OMITTED_DEFAULTS.get(key))
            if key not in row_values and key not in OMITTED_DEFAULTS and key not in self.stated:
                # The row is of a version without the setting, or the setting does not apply to its method.
                continue
            if not _equal(actual, value):
                return f"{key}={actual}, not {value}"
        return ""


def row_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's settings in the form of `ComparedSettings.values`."""
    values = {
        f"{part}.{name}": _plain(name, value)
        for part in ("model", "draft", "benchmark", "engine", "judge")
        for name, value in (settings.get(part) or {}).items()
        if name not in IGNORED
    }
    # Engine settings that do not apply to the method are null.
    values = {key: v for key, v in values.items() if v is not None or not key.startswith("engine.")}
    params = settings["method"]["params"]
    return {**values, **{f"method.params.{name}": value for name, value in params.items()}}


def compared_settings(run: CellRun) -> ComparedSettings:
    """Return the settings of a run that rows must match.

    Cost: a millisecond for each run, once.
    """
    return _compared(tuple(run.overrides.items()))


@lru_cache(maxsize=8192)
def _compared(overrides: tuple[tuple[str, Any], ...]) -> ComparedSettings:
    run = CellRun(dict(overrides), "", 1.0)
    parts, stated = _sections(run)
    section = merged(choice("benchmark", run.overrides["benchmark"]), parts["benchmark"])
    tasks = (section["kind"], section["name"])
    model, prompt = _model(run.overrides["model"], parts["model"], tasks)
    values = {f"model.{name}": model[name] for name in model}
    if "draft.name" in stated:
        adapter = choice("model", run.overrides["model"])["adapter"]
        draft = _draft(parts["draft"], model, adapter, tasks)
        values |= {f"draft.{name}": draft[name] for name in draft}
    benchmark = {**section, **_prompt_settings(section, prompt)}
    values |= {
        f"benchmark.{name}": benchmark[name] for name in (*BENCHMARK_SETTINGS, *parts["benchmark"])
    }
    engine, judge = choice("engine", "default"), _default_judge()
    engine = {**{name: engine[name] for name in ENGINE_SETTINGS}, **parts["engine"]}
    values |= {f"engine.{name}": value for name, value in engine.items()}
    judge = {**{name: judge[name] for name in JUDGE_SETTINGS}, **parts["judge"]}
    values |= {f"judge.{name}": value for name, value in judge.items()}
    params = {f"method.params.{name}": value for name, value in method_of(run)[2].items()}
    return ComparedSettings({**values, **params}, stated.union(params))


def _sections(run: CellRun) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
    """Return a run's overrides as tables by section, and the keys of the settings that they set."""
    parts: dict[str, dict[str, Any]] = {
        name: {} for name in ("model", "draft", "benchmark", "engine", "judge")
    }
    stated = set()
    for key, value in run.overrides.items():
        names = key.lstrip("+").replace("method.draft_options.", "draft.").split(".")
        if key == "method.draft":
            names = ["draft", "name"]
        if key in FIRST or names[0] not in parts:
            continue
        table: Any = value
        for name in reversed(names[1:]):
            table = {name: table}
        parts[names[0]] = merged(parts[names[0]], table)
        stated.add(".".join(names[:2]))
    return parts, frozenset(stated)


def _model(
    name: str, overrides: Mapping[str, Any], tasks: Iterable[str]
) -> tuple[dict[str, Any], PromptSpec]:
    """Return the compared settings of a model under its prompt set, and the prompt set."""
    # Copy: a prompt set is merged into the tables of a cached config file.
    part, prompt = apply_prompt_set(deepcopy(merged(choice("model", name), overrides)), tasks)
    part |= {"prompt": prompt.name, "join": prompt.join}
    part["video"] = asdict(VideoSpec()) | part["video"]
    values = {key: _plain(key, part[key]) for key in (*MODEL_SETTINGS, *overrides)}
    return values, prompt


def _draft(
    overrides: Mapping[str, Any], target: Mapping[str, Any], adapter: str, tasks: Iterable[str]
) -> dict[str, Any]:
    """Return the compared settings of a draft; it shares its target's inputs (harness/config/build_spec.py)."""
    name = overrides["name"]
    draft_config = choice("model", name)
    shared = {"video": target["video"]}
    if draft_config["adapter"] == adapter:
        shared["processor"] = target["processor"]
    if draft_config["prompts"].get(target["prompt"]) is not None:
        shared["prompt"] = target["prompt"]
    options = {key: value for key, value in overrides.items() if key != "name"}
    return {"name": name, **_model(name, merged(shared, options), tasks)[0]}


def _prompt_settings(section: Mapping[str, Any], prompt: PromptSpec) -> dict[str, Any]:
    """Return the text and generation of a benchmark's requests (harness/config/prompt_section.py, benchmark.py)."""
    length = section["new_tokens"]
    limits = {} if length is None else {"min_new_tokens": length, "max_new_tokens": length}
    texts = [section["texts"][word] for word in prompt.words if word in section["texts"]]
    return {
        "text": section["text"] or next(iter(texts), prompt.text),
        "prompt": section["prompt"] or None,
        "generation": {**prompt.generation, **limits, **section["generation"]},
    }


@cache
def _default_judge() -> Mapping[str, Any]:
    path = CONF / "config.yaml"
    defaults: Mapping[str, Any] = read_yaml(path)["judge"]
    return defaults


def _plain(name: str, value: Any) -> Any:
    """Return a value without entries that equal their absence."""
    if name == "generation":
        return {
            key: entry
            for key, entry in value.items()
            if entry is not None and (key != CACHED or entry)
        }
    return value


def _equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Mapping):
        keys = {*expected, *(actual if isinstance(actual, Mapping) else ())}
        return isinstance(actual, Mapping) and all(
            _equal(actual.get(key), expected.get(key)) for key in keys
        )
    if isinstance(expected, float | int) and isinstance(actual, float | int):
        return abs(actual - expected) <= 1e-9
    return bool(actual == (list(expected) if isinstance(expected, tuple) else expected))
