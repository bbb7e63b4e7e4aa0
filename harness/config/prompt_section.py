"""The prompt set of a run: what `model.prompt` selects from the table `model.prompts`, overridden by the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.harness.config.group_lists import choices, merged, read_choice
from espalier.harness.errors import unknown_name
from espalier.harness.settings import Names, Text, choice, defaults, read_section, read_value, table
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import CHECKPOINT, ORIGINAL, PromptSpec

#: Tables of a model section that a prompt set can fill in.
TABLES = ("video", "processor", "generation")


@dataclass(frozen=True)
class _TaskPrompt:
    """Settings of a prompt set for one benchmark or kind of task."""

    video: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    conversation: Text | None = None
    text: Text | None = None


@dataclass(frozen=True)
class _PromptSet:
    """A table of `model.prompts`.

    Attributes:
        conversation: frame of the prompts.
        quoted: the frame of random weights where `conversation` is the checkpoint's template.
        join: how several images of a turn are joined.
        words: keys of `benchmark.texts`, the preferred one first.
        tasks: settings by benchmark and kind of task.
    """

    conversation: Text | None = None
    quoted: Text | None = None
    join: Text | None = None
    words: Names = ()
    tasks: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


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
    sets = {
        name: _read_set(f"model.prompts.{name}", prompt_set)
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


def _read_set(key: str, value: Any) -> _PromptSet:
    return read_section(_PromptSet, key, _complete(_PromptSet, key, value))


def _complete(section: type, key: str, value: Any) -> dict[str, Any]:
    """Return a table with the section's defaults in place of nulls and missing keys."""
    entries = table(key, value)
    return {**entries, **{k: v for k, v in defaults(section).items() if entries.get(k) is None}}


def _task_prompt(key: str, tables: Mapping[str, Any], tasks: Iterable[str]) -> _TaskPrompt:
    """Return the settings of a prompt set for a benchmark, those of each of `tasks` merged in order."""
    entries: dict[str, Any] = {}
    for task in tasks:
        task_table = table(f"{key}.{task}", tables.get(task))
        read_section(_TaskPrompt, f"{key}.{task}", _complete(_TaskPrompt, key, task_table))
        entries = merged(entries, task_table)
    return read_section(_TaskPrompt, key, _complete(_TaskPrompt, key, entries))


def check_texts(texts: Iterable[str], prompts: Mapping[str, Any]) -> None:
    """Raise UserError if a key of `benchmark.texts` is a word of no prompt set.

    Args:
        texts: the keys.
        prompts: the sets of the run's model; the files of conf are read only for words that these do not have.
    """
    valid = {ORIGINAL, *_words(prompts)}
    if valid.issuperset(texts):
        return
    for group in ("base/prompts", "model"):
        for name in choices(group):
            valid |= _words(read_choice(group, name).get("prompts"))
    for word in texts:
        if word not in valid:
            raise unknown_name("benchmark.texts", word, valid)


def _words(prompts: Mapping[str, Any] | None) -> set[str]:
    sets = (prompts or {}).items()
    return {
        word
        for name, prompt_set in sets
        for word in (name, *((prompt_set or {}).get("words") or ()))
    }


def with_question(benchmark: BenchmarkSpec, prompt: PromptSpec) -> BenchmarkSpec:
    """Return a benchmark with the question and the generation settings of a prompt set.

    `benchmark.text` overrides `benchmark.texts`, which overrides the text of the set, which overrides the task's.
    """
    texts = [benchmark.texts[word] for word in prompt.words if word in benchmark.texts]
    text = benchmark.text or next(iter(texts), prompt.text)
    generation = {**prompt.generation, **benchmark.generation}
    return replace(benchmark, text=text, generation=generation)
