"""Checks of a benchmark: the tools of its scorer, its prompts for a family, and words that the model does not know."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from espalier.harness.config.lmms_task_files import index_of
from espalier.harness.errors import UserError, foreign, tell_once, unknown_name
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import read_json

#: The table of a task file that holds prompts by family, up to the next key at the margin.
_TABLE = re.compile(
    r"^lmms_eval_specific_kwargs:[ \t]*\n((?:[ \t]+.*\n?|[ \t]*\n|#.*\n?)*)", re.MULTILINE
)
#: A key in it that opens a table: a family's name. Deeper ones are filtered by their indent.
_FAMILY = re.compile(r"^([ \t]+)[\"']?([\w.-]+)[\"']?[ \t]*:[ \t]*(?:#.*)?$", re.MULTILINE)

#: Number of words that the note spells out.
NAMED = 8


def check_needs(benchmark: BenchmarkSpec) -> None:
    """Raise UserError if a tool of `benchmark.needs` is missing.

    A split that only a submission server scores cannot get a number here, so it is always refused.
    """
    if "server" in benchmark.needs:
        raise UserError(
            f"benchmark={benchmark.name}: scored by a submission server alone (benchmark.needs=[server]);"
            " valid: a split whose answers are public"
        )
    if "java" in benchmark.needs and shutil.which("java") is None:
        raise UserError(
            f"benchmark={benchmark.name}: its scorer runs in Java (benchmark.needs=[java]), and there is no java"
            " on PATH; valid: with a Java runtime, for example OpenJDK 17"
        )


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
    return frozenset(name for text in texts for name in _declared(text))


def _declared(text: str) -> list[str]:
    tables = (table.group(1) for table in _TABLE.finditer(text))
    keys = [key for table in tables for key in _FAMILY.findall(table)]
    margin = min((len(indent) for indent, _ in keys), default=0)
    return [name for indent, name in keys if len(indent) == margin]


@cache  # lmms-eval's task files do not change while a process runs
def _of_the_library() -> frozenset[str]:
    # The package is found, not imported: its import takes seconds.
    package = find_spec("lmms_eval")
    if package is None or package.origin is None:
        return frozenset()
    return families(Path(package.origin).parent / "tasks")


def note_unknown_words(spec: RunSpec) -> None:
    """Print on stderr which words of own data a model reads as unknown: a tokenizer of whole words has no other ones.

    Raises:
        UserError: the tokenizer's file cannot be read.
    """
    table, path = spec.benchmark.own_data(), spec.model.path
    file = None if path is None else path / "tokenizer.json"
    if table is None or spec.benchmark.text is not None or file is None or not file.is_file():
        return
    with foreign(f"model.path: {str(file)!r} cannot be read", "a tokenizer.json"):
        model = read_json(file)["model"]
        vocabulary = set(model["vocab"]) if model["type"] == "WordLevel" else None
    if vocabulary is None:
        return
    prompt = _prompt(spec.benchmark)
    texts = [*(text for record in table.records for text in (record.question, *record.choices))]
    texts += [prompt.get("pre_prompt") or "", prompt.get("post_prompt") or ""]
    words = dict.fromkeys(word for text in texts for word in text.split())
    unknown = [word for word in words if word not in vocabulary]
    if unknown:
        count = len(unknown) - NAMED
        tail = f" and {count} more" if count > 0 else ""
        tell_once(
            f"model={spec.model.name} knows {len(vocabulary)} words; of {spec.benchmark.name} it does not know "
            f"{', '.join(unknown[:NAMED])}{tail} (+benchmark.prompt.post_prompt='' leaves out the instruction)"
        )


def _prompt(benchmark: BenchmarkSpec) -> dict[str, Any]:
    """Return the prompt settings of the benchmark's task, with those of the user."""
    assert benchmark.include_path is not None  # own data have tasks of this repository
    (leaf,) = index_of(benchmark.include_path).leaves(benchmark.task)
    tables: Mapping[str, Any] = leaf.settings.get("lmms_eval_specific_kwargs") or {}
    return {**tables.get("default", {}), **benchmark.prompt}
