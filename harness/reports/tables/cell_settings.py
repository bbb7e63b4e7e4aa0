"""What a row must say under `settings` to fill a cell: the overrides of the cell's run, and its files where none is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any

from espalier.harness.config.group_lists import CONF, merged
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.config.prompt_section import apply_prompt_set
from espalier.harness.reports.tables.cell_runs import Wanted, choice, method_of
from espalier.harness.reports.tables.published_tables import FIRST
from espalier.harness.specs.run_spec import PromptSpec, VideoSpec

#: Settings of a model that change what it is asked or answers. Precision, kernels and devices count where a run states
#: them.
OF_MODELS = ("weights", "prompt", "join", "conversation", "generation", "processor", "video")

#: Settings of a benchmark that change its samples, questions or answers.
OF_BENCHMARKS = ("generation", "text", "prompt", "prompt_tokens", "new_tokens")

#: Settings of the engine that may change answers and are the same on every machine; `positions` is asked of all rows.
OF_ENGINES = ("backend", "decode", "graphs", "separators")

#: Settings of a judge that are no name of a server's.
OF_JUDGES = ("temperature", "seed", "max_tokens", "options", "prompt")

#: Settings that a row leaves out where they are as ever, each with what that is.
LEFT_OUT: Mapping[str, Any] = {
    "model.prompt": "original",
    "draft.prompt": "original",
    **dict.fromkeys(("model.join", "draft.join")),
    **dict.fromkeys(f"benchmark.{name}" for name in OF_BENCHMARKS if name != "generation"),
}

#: Settings of rows that no table compares, most of them long: what they are is said by the model or the benchmark.
UNTOLD = frozenset({"facts", "architecture", "files", "metrics"})

#: Whether a model that denoises keeps its prompt; nothing there is the same as false.
CACHED = "prefix_cache"


@dataclass(frozen=True)
class Compared:
    """What is compared of a row.

    Attributes:
        values: settings by dotted key, tables of a section in one.
        stated: keys among these that the run states itself: a row that does not have them is another's.
    """

    values: Mapping[str, Any]
    stated: frozenset[str]

    def difference(self, told: Mapping[str, Any]) -> str:
        """Return the first setting in which a row is another run's, with both values; nothing where it is this one's.

        Args:
            told: what the row says (`told_of`).
        """
        for key, value in self.values.items():
            found = told.get(key, LEFT_OUT.get(key))
            if key not in told and key not in LEFT_OUT and key not in self.stated:
                # A row of a version without it, or of a method that it does not concern.
                continue
            if not _same(found, value):
                return f"{key}={found}, not {value}"
        return ""


def told_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a row as `Compared` has them."""
    found = {
        f"{part}.{name}": _plain(name, value)
        for part in ("model", "draft", "benchmark", "engine", "judge")
        for name, value in (settings.get(part) or {}).items()
        if name not in UNTOLD
    }
    # A setting of the engine that does not concern the method is null.
    found = {k: v for k, v in found.items() if v is not None or not k.startswith("engine.")}
    params = settings["method"]["params"]
    return {**found, **{f"method.params.{name}": value for name, value in params.items()}}


def compared(run: Wanted) -> Compared:
    """Return what is compared of rows with a run.

    Cost: a millisecond for each run, once.
    """
    return _compared(tuple(run.overrides.items()))


@lru_cache(maxsize=8192)
def _compared(overrides: tuple[tuple[str, Any], ...]) -> Compared:
    run = Wanted(dict(overrides), "", 1.0)
    parts, stated = _sections(run)
    section = merged(choice("benchmark", run.overrides["benchmark"]), parts["benchmark"])
    tasks = (section["kind"], section["name"])
    model, prompt = _model(run.overrides["model"], parts["model"], tasks)
    values = {f"model.{name}": model[name] for name in model}
    if "draft.name" in stated:
        adapter = choice("model", run.overrides["model"])["adapter"]
        draft = _draft(parts["draft"], model, adapter, tasks)
        values |= {f"draft.{name}": draft[name] for name in draft}
    asked = {**section, **_asked(section, prompt)}
    values |= {f"benchmark.{name}": asked[name] for name in (*OF_BENCHMARKS, *parts["benchmark"])}
    engine, judge = choice("engine", "default"), _usual_judge()
    engine = {**{name: engine[name] for name in OF_ENGINES}, **parts["engine"]}
    values |= {f"engine.{name}": value for name, value in engine.items()}
    judge = {**{name: judge[name] for name in OF_JUDGES}, **parts["judge"]}
    values |= {f"judge.{name}": value for name, value in judge.items()}
    params = {f"method.params.{name}": value for name, value in method_of(run)[2].items()}
    return Compared({**values, **params}, stated.union(params))


def _sections(run: Wanted) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
    """Return a run's overrides as tables by section, and the keys of settings that these state."""
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
    """Return the settings of a model that are compared, under its prompt set, and the set."""
    # A prompt set may be laid over the tables of a file that others read as well.
    part, prompt = apply_prompt_set(deepcopy(merged(choice("model", name), overrides)), tasks)
    part |= {"prompt": prompt.name, "join": prompt.join}
    part["video"] = asdict(VideoSpec()) | part["video"]
    found = {key: _plain(key, part[key]) for key in (*OF_MODELS, *overrides)}
    return found, prompt


def _draft(
    asked: Mapping[str, Any], target: Mapping[str, Any], adapter: str, tasks: Iterable[str]
) -> dict[str, Any]:
    """Return the settings of a draft that are compared: it sees what its target sees (harness/config/build_spec.py)."""
    name = asked["name"]
    own = choice("model", name)
    shared = {"video": target["video"]}
    if own["adapter"] == adapter:
        shared["processor"] = target["processor"]
    if own["prompts"].get(target["prompt"]) is not None:
        shared["prompt"] = target["prompt"]
    options = {key: value for key, value in asked.items() if key != "name"}
    return {"name": name, **_model(name, merged(shared, options), tasks)[0]}


def _asked(section: Mapping[str, Any], prompt: PromptSpec) -> dict[str, Any]:
    """Return text and generation of a benchmark as it is asked (harness/config/prompt_section.py and benchmark.py)."""
    length = section["new_tokens"]
    exactly = {} if length is None else {"min_new_tokens": length, "max_new_tokens": length}
    named = [section["texts"][word] for word in prompt.words if word in section["texts"]]
    return {
        "text": section["text"] or next(iter(named), prompt.text),
        "prompt": section["prompt"] or None,
        "generation": {**prompt.generation, **exactly, **section["generation"]},
    }


@cache
def _usual_judge() -> Mapping[str, Any]:
    path = CONF / "config.yaml"
    usual: Mapping[str, Any] = read_yaml(path.read_text(encoding="utf-8"), path)["judge"]
    return usual


def _plain(name: str, value: Any) -> Any:
    """Return a value without what is the same as nothing there."""
    if name == "generation":
        return {k: v for k, v in value.items() if v is not None and (k != CACHED or v)}
    return value


def _same(found: Any, asked: Any) -> bool:
    if isinstance(asked, Mapping):
        keys = {*asked, *(found if isinstance(found, Mapping) else ())}
        return isinstance(found, Mapping) and all(
            _same(found.get(key), asked.get(key)) for key in keys
        )
    if isinstance(asked, float | int) and isinstance(found, float | int):
        return abs(found - asked) <= 1e-9
    return bool(found == (list(asked) if isinstance(asked, tuple) else asked))
