"""The prompt set of a run: what `model.prompt` chooses of the table `model.prompts`, under what a user set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from espalier.harness.config.group_lists import choices, merged, read_choice
from espalier.harness.errors import unknown_name
from espalier.harness.settings import Names, Text, check_keys, choice, read_value
from espalier.harness.settings import table as as_table
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import CHECKPOINT, ORIGINAL, PromptSpec

#: Tables of a model section that a set may fill in.
TABLES = ("video", "processor", "generation")

#: What a set says of some benchmarks or kinds of task alone.
OF_TASKS = (*TABLES, "text")

#: All that a set may say. `quoted` is the frame of random weights where a checkpoint's template is asked for.
KEYS = ("conversation", "quoted", "join", "words", "tasks", *TABLES)


def settled(
    part: Mapping[str, Any], tasks: Iterable[str] = ()
) -> tuple[dict[str, Any], PromptSpec]:
    """Return a model section with the values of its prompt set where it has none, and the rest of the set.

    A value that is null, or not there, is left to the set; anything else was chosen by somebody and stays.

    Args:
        part: the composed section.
        tasks: kind and name of the benchmark, for what the set says of it; the later ones win.

    Raises:
        UserError: an unknown set, or one that says what no set can; one line with the key and what is valid.
    """
    sets = {ORIGINAL: {}, **as_table("model.prompts", part["prompts"])}
    valid = [name for name, one in sets.items() if one is not None]
    name = choice("model.prompt", part["prompt"], valid)
    for word in valid:
        check_keys(f"model.prompts.{word}", as_table(f"model.prompts.{word}", sets[word]), KEYS)
    key = f"model.prompts.{name}"
    chosen = as_table(key, sets[name])
    of_tasks = _of_tasks(f"{key}.tasks", chosen, tasks)
    found = dict(part)
    for table in TABLES:
        own = as_table(f"model.{table}", part[table])
        given = as_table(f"{key}.{table}", chosen.get(table))
        if table != "generation":
            given |= as_table(f"{key}.tasks.{table}", of_tasks.get(table))
        # A null that no set fills in says something of generation alone: that nothing is set.
        stays = table == "generation"
        kept = {k: v for k, v in own.items() if v is not None or (stays and k not in given)}
        found[table] = {**given, **kept}
    if part["conversation"] is None:
        found["conversation"] = _frame(key, chosen, part["weights"])
    join = part["join"] if part["join"] is not None else chosen.get("join")
    words = read_value(f"{key}.words", chosen.get("words") or [], Names)
    ahead = as_table(f"{key}.tasks.generation", of_tasks.get("generation"))
    mine = as_table("model.generation", part["generation"])
    spec = PromptSpec(
        name=name,
        join=read_value("model.join", join, Text | None),
        words=tuple(dict.fromkeys((*words, name))),
        text=read_value(f"{key}.tasks.text", of_tasks.get("text"), Text | None),
        generation={k: v for k, v in ahead.items() if mine.get(k) is None},
    )
    return found, spec


def check_texts(texts: Iterable[str], prompts: Mapping[str, Any]) -> None:
    """Raise UserError if a text of `benchmark.texts` is for no word that any prompt set has.

    Args:
        texts: the words that have a text.
        prompts: the sets of the model at hand; those of the files of conf are read where these do not have a word.
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
    return {word for name, one in sets for word in (name, *((one or {}).get("words") or ()))}


def worded(benchmark: BenchmarkSpec, prompt: PromptSpec) -> BenchmarkSpec:
    """Return a benchmark as a prompt set asks it: with the set's text, if it has none of its own, and its settings.

    `benchmark.text` goes before `benchmark.texts`, that before the text of the set, and that before the task's.
    """
    named = [benchmark.texts[word] for word in prompt.words if word in benchmark.texts]
    text = benchmark.text or next(iter(named), prompt.text)
    generation = {**prompt.generation, **benchmark.generation}
    return replace(benchmark, text=text, generation=generation)


def _of_tasks(key: str, chosen: Mapping[str, Any], tasks: Iterable[str]) -> dict[str, Any]:
    tables = as_table(key, chosen.get("tasks"))
    found: dict[str, Any] = {}
    for task in tasks:
        one = as_table(f"{key}.{task}", tables.get(task))
        check_keys(f"{key}.{task}", one, OF_TASKS)
        found = merged(found, one)
    return found


def _frame(key: str, chosen: Mapping[str, Any], weights: str) -> str | None:
    """Return the set's conversation frame; random weights have no checkpoint's template and take the quoted one."""
    frame: str | None = read_value(f"{key}.conversation", chosen.get("conversation"), Text | None)
    if frame == CHECKPOINT and weights == "random":
        frame = read_value(f"{key}.quoted", chosen.get("quoted"), Text | None)
    return frame
