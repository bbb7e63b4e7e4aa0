"""The section `model` of a composed config becomes a ModelSpec, completed by its prompt set; so does that of a draft.

`model.prompt` selects a set from the table `model.prompts`; the user's values override it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, cast

from espalier.harness.config.group_lists import choices, merged, read_choice
from espalier.harness.cost.facts import ModelFacts, read_facts
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.errors import UserError, unknown_name
from espalier.harness.settings import (
    Count,
    Names,
    OneOf,
    Text,
    choice,
    defaults,
    gather,
    key_mistakes,
    read_fields,
    read_section,
    read_value,
    setting_hints,
    table,
)
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.generation import unescaped
from espalier.harness.specs.run_spec import (
    CHECKPOINT,
    MODEL_KEYS,
    ORIGINAL,
    ModelSpec,
    PromptSpec,
    VideoSpec,
)

#: Tables of a model section that a prompt set can fill in.
TABLES = ("video", "processor", "generation")


@dataclass(frozen=True)
class _PromptTables:
    """Settings of prompts; `conversation` is their frame."""

    video: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    conversation: Text | None = None


@dataclass(frozen=True)
class _TaskPrompt(_PromptTables):
    """Settings of a prompt set for one benchmark or kind of task."""

    text: Text | None = None


@dataclass(frozen=True)
class _PromptSet(_PromptTables):
    """A table of `model.prompts`.

    Attributes:
        quoted: the frame of random weights where `conversation` is the checkpoint's template.
        join: how several images of a turn are joined.
        words: keys of `benchmark.texts`, the preferred one first.
        tasks: settings by benchmark and kind of task.
    """

    quoted: Text | None = None
    join: Text | None = None
    words: Names = ()
    tasks: Mapping[str, Any] = field(default_factory=dict)


def apply_prompt_set(
    part: Mapping[str, Any], tasks: Iterable[str] = ()
) -> tuple[dict[str, Any], PromptSpec]:
    """Return a model section completed by its prompt set, and the settings of the set that no key of the section has.

    The set fills in what is null or missing; any other value was chosen by the user and stays.

    Args:
        part: the composed section.
        tasks: kind and name of the benchmark, for which the set may have settings; later ones win.

    Raises:
        UserError: an unknown set, or a wrong setting of one; one line with the key and what is valid.
    """
    sets: dict[str, _PromptSet] = {
        name: _read_part(_PromptSet, f"model.prompts.{name}", prompt_set)
        for name, prompt_set in {ORIGINAL: {}, **table("model.prompts", part["prompts"])}.items()
        if prompt_set is not None
    }
    name = choice("model.prompt", part["prompt"], sets)
    prompt_set, key = sets[name], f"model.prompts.{name}"
    task_prompt = _task_prompt(f"{key}.tasks", prompt_set.tasks, tasks)
    section = dict(part)
    for group in TABLES:
        user_values = table(f"model.{group}", part[group])
        set_values = {**getattr(prompt_set, group)}
        if group == "generation":
            # Null unsets a setting of the task, unless the set has a value.
            kept = {k: v for k, v in user_values.items() if v is not None or k not in set_values}
        else:
            set_values |= getattr(task_prompt, group)
            kept = {k: v for k, v in user_values.items() if v is not None}
        section[group] = {**set_values, **kept}
    if part["conversation"] is None:
        section["conversation"] = task_prompt.conversation or prompt_set.conversation
        if section["conversation"] == CHECKPOINT and part["weights"] == "random":
            section["conversation"] = prompt_set.quoted
    user_generation = table("model.generation", part["generation"])
    join = part["join"] if part["join"] is not None else prompt_set.join
    spec = PromptSpec(
        name=name,
        join=read_value("model.join", join, Text | None),
        words=tuple(dict.fromkeys((*prompt_set.words, name))),
        text=task_prompt.text,
        generation={
            k: v for k, v in task_prompt.generation.items() if user_generation.get(k) is None
        },
    )
    return section, spec


def _read_part(section: type, key: str, value: Any) -> Any:
    """Return a section of a table, with the section's defaults in place of nulls and missing keys."""
    entries = table(key, value)
    unset = {k: v for k, v in defaults(section).items() if entries.get(k) is None}
    return read_section(section, key, {**entries, **unset})


def _task_prompt(key: str, tables: Mapping[str, Any], tasks: Iterable[str]) -> _TaskPrompt:
    """Return the settings of a prompt set for a benchmark, those of each of `tasks` merged in order."""
    entries: dict[str, Any] = {}
    for task in tasks:
        task_table = table(f"{key}.{task}", tables.get(task))
        _read_part(_TaskPrompt, f"{key}.{task}", task_table)
        entries = merged(entries, task_table)
    return cast("_TaskPrompt", _read_part(_TaskPrompt, key, entries))


def check_texts(texts: Iterable[str], prompts: Mapping[str, Any]) -> None:
    """Raise UserError if a key of `benchmark.texts` is a word of no prompt set.

    Args:
        texts: the keys.
        prompts: the sets of the run's model; the files of conf are read only for words that these do not have.
    """
    valid = {ORIGINAL, *_words(prompts)}
    if valid.issuperset(texts):
        return
    valid |= _words_of_conf()
    if unknown := [word for word in texts if word not in valid]:
        raise unknown_name("benchmark.texts", unknown[0], valid)


@cache
def _words_of_conf() -> frozenset[str]:
    """Return the words of all prompt sets of conf, read once: a sweep checks each of its cells."""
    return frozenset(
        word
        for group in ("base/prompts", "model")
        for name in choices(group)
        for word in _words(read_choice(group, name).get("prompts"))
    )


def _words(prompts: Mapping[str, Any] | None) -> set[str]:
    return {
        word
        for name, prompt_set in (prompts or {}).items()
        for word in (name, *((prompt_set or {}).get("words") or ()))
    }


def with_question(benchmark: BenchmarkSpec, prompt: PromptSpec) -> BenchmarkSpec:
    """Return a benchmark with the question and the generation settings of a prompt set.

    `benchmark.text` overrides `benchmark.texts`, which overrides the text of the set, which overrides the task's.
    """
    texts = [benchmark.texts[word] for word in prompt.words if word in benchmark.texts]
    text = benchmark.text or next(iter(texts), prompt.text)
    return replace(benchmark, text=text, generation={**prompt.generation, **benchmark.generation})


def model_spec(part: Mapping[str, Any], tasks: Iterable[str] = ()) -> ModelSpec:
    """Return the model of a composed section `model`, with the settings of its prompt set.

    `tasks` are kind and name of the benchmark, for which a prompt set may have settings.

    Raises:
        UserError: one line with every config key that is wrong, the value and what is valid.
    """
    gather({}, key_mistakes("model", part, MODEL_KEYS))
    part, prompt = apply_prompt_set(part, tasks)
    part["video"] = defaults(VideoSpec) | table("model.video", part["video"])
    values = read_fields(
        ModelSpec, "model", {name: part[name] for name in setting_hints(ModelSpec)}
    )
    if values["path"] is None and values["hub"] is None and values["weights"] == "trained":
        raise UserError("model.path=None and model.hub=None: one of the two must be set")
    random = values["weights"] == "random"
    if random:
        # Such a model is always built on one device.
        values["device_map"] = None
    if values["offload"] and values["device_map"] is None:
        raise UserError("model.offload=True needs model.device_map=auto; valid: false, or both")
    if values["max_memory"] and values["device_map"] is None:
        raise UserError(
            "model.max_memory needs model.device_map=auto; a model on one device takes what it needs"
        )
    values["generation"] = unescaped(values["generation"])
    return ModelSpec(
        **values,
        facts=_scaled(_facts(table("model.facts", part["facts"])), part["scale"], random),
        prompt=prompt,
    )


def _scaled(facts: ModelFacts, scale: Any, random: bool) -> ModelFacts:
    """Return the facts with the number of layers that `model.scale` sets, which only random weights can have."""
    key, part = "model.scale", table("model.scale", scale)
    names = ("layers", "tower_layers")
    sizes = gather(
        {name: (f"{key}.{name}", part[name], Count | None) for name in names if name in part},
        key_mistakes(key, part, names),
    )
    for name, size in sizes.items():
        if size is not None and not random:
            raise UserError(
                f"{key}.{name}={size} needs model.weights=random: a checkpoint has its own size"
            )
    return facts.scaled(sizes["layers"], sizes["tower_layers"])


def _facts(part: Mapping[str, Any]) -> ModelFacts:
    """Return the facts; `signals` are all where none are listed, less those of `lacking`."""
    key, signals = "model.facts", tuple[Annotated[str, OneOf(tuple(SIGNALS))], ...]
    part = dict(part)
    lacking = read_value(f"{key}.lacking", part.pop("lacking", ()), signals)
    listed = read_value(f"{key}.signals", part.get("signals") or sorted(SIGNALS), signals)
    part["signals"] = [signal for signal in listed if signal not in lacking]
    return read_facts(key, part)
