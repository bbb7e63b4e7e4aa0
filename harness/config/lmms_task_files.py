"""What lmms-eval's task files say, read as text: without the package, whose import takes seconds, and without data."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from espalier.harness.errors import UserError, near_names

#: Settings at the margin of a task file that say what it declares, each with the lines that go on below it.
_DECLARES = re.compile(
    r"^[\"']?(?:task|group|tag|include|class)[\"']?[ \t]*:.*(?:\n(?:[ \t]*-|[ \t]+\S|[ \t]*#|[ \t]*$).*)*",
    re.MULTILINE,
)

Settings = dict[str, Any]


class _Loader(yaml.CSafeLoader):
    """Reads `!function utils.f` as the string `utils.f`, so that nothing of a task is run."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


@dataclass(frozen=True)
class Index:
    """Every name that a folder of task files declares, as lmms-eval finds them.

    Attributes:
        files: file of each task and of each group.
        groups: names in `files` that are groups.
        tags: tasks of each tag.
    """

    files: Mapping[str, Path]
    groups: frozenset[str] = frozenset()
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Tasks, groups and tags."""
        return frozenset(self.files) | frozenset(self.tags)

    def leaves(self, name: str) -> tuple[Leaf, ...]:
        """Return the task of a name, or all tasks of a group or a tag. Cost: one file for each task."""
        return tuple(_leaves(name, {}, self))


@dataclass(frozen=True)
class Leaf:
    """A task, with the settings of its file and of those that this includes; functions stand there as their names."""

    name: str
    settings: Mapping[str, Any]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Its metrics in the order of the file, without those that only write a file for a server.

        Tasks that name none get lmms-eval's default for tasks that generate text.
        """
        return tuple(one["metric"] for one in self._metric_list if not _submits(one))

    def higher_is_better(self, metric: str) -> bool:
        """Say of a metric whether more is better."""
        entries = [one for one in self._metric_list if one["metric"] == metric]
        return all(one.get("higher_is_better", True) for one in entries)

    @property
    def _metric_list(self) -> list[Settings]:
        listed = self.settings.get("metric_list") or [{"metric": "exact_match"}]
        return [one for one in listed if one]


def leaves(name: str) -> tuple[Leaf, ...]:
    """Return the task of a name, or all tasks of a group or a tag.

    Raises:
        UserError: lmms-eval has no task of this name, or one of them is no list of questions with written answers.

    Cost: a quarter of a second, once a process, then one file for each task.
    """
    index = library()
    if name not in index.names:
        raise UserError(
            f"benchmark='task:{name}': lmms-eval has no task {name!r}{near_names(name, index.names)};"
            " valid: a task, group or tag of lmms-eval"
        )
    found = index.leaves(name)
    for leaf in found:
        kind = leaf.settings.get("output_type", "generate_until")
        if "class" in leaf.settings or kind != "generate_until":
            what = "is a Python class" if "class" in leaf.settings else f"is of type {kind}"
            raise UserError(f"benchmark='task:{name}': {leaf.name} {what}; valid: generate_until")
        if not leaf.metrics:
            raise UserError(
                f"benchmark='task:{name}': {leaf.name} is scored by a submission server alone;"
                " valid: a task with metrics of its own"
            )
    return found


@cache  # lmms-eval's task files do not change while a process runs
def library() -> Index:
    """Return the index of lmms-eval's own task files; an empty one where the package is absent."""
    # The package is found, not imported: its import takes seconds.
    found = find_spec("lmms_eval")
    if found is None or found.origin is None:
        return Index({})
    return index_of(Path(found.origin).parent / "tasks")


def index_of(folder: Path) -> Index:
    """Return what the task files below a folder declare. Cost: one read of each file."""
    files: dict[str, Path] = {}
    groups: set[str] = set()
    tags: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.yaml")):
        declared = _declared(path)
        task, group = declared.get("task"), declared.get("group")
        if isinstance(task, list) and isinstance(group, str):
            files[group] = path
            groups.add(group)
        elif isinstance(task, str):
            files[task] = path
            for tag in (*_listed(declared.get("tag")), *_listed(group)):
                tags[tag].append(task)
    own = {tag: tuple(tasks) for tag, tasks in tags.items() if tag not in files}
    return Index(files, frozenset(groups), own)


def read_task(path: Path) -> Settings:
    """Return the settings of a task file and of those that it includes; its own go first, then the first included."""
    own = read_yaml(path.read_text("utf-8-sig"), path)
    found: Settings = {}
    for one in reversed(_listed(own.pop("include", None))):
        found |= read_task(path.parent / one)
    return found | own


def read_yaml(text: str, path: Path) -> Settings:
    """Return the table that a file of settings holds.

    Raises:
        UserError: the text is no YAML, or no table; the line names the file and where in it.
    """
    try:
        found = yaml.load(text, _Loader) or {}
    except yaml.MarkedYAMLError as error:
        raise not_yaml(error, path) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a table of key: value pairs")
    return found


def not_yaml(error: yaml.MarkedYAMLError, path: Path | None = None) -> UserError:
    """Return the error for a file that does not parse: which one, where, and what is wrong there."""
    mark = error.problem_mark
    name = path or (mark.name if mark else "config")
    line = f", line {mark.line + 1}" if mark else ""
    return UserError(f"{name}{line}: {error.problem}; valid: YAML")


def _declared(path: Path) -> Settings:
    # Some files begin with a byte order mark.
    text = "\n".join(_DECLARES.findall(path.read_text("utf-8-sig", errors="replace")))
    own = read_yaml(text, path)
    found: Settings = {}
    for one in reversed(_listed(own.pop("include", None))):
        found |= _declared(path.parent / one)
    return found | own


def _leaves(name: str, more: Settings, index: Index) -> Iterator[Leaf]:
    """Yield the tasks of a name, each with the settings `more` on top."""
    if name in index.tags:
        for task in index.tags[name]:
            yield from _leaves(task, more, index)
        return
    settings = (read_task(index.files[name]) if name in index.files else {}) | more
    if name not in index.groups:
        yield Leaf(name, settings)
        return
    yield from _members(settings, index)


def _members(group: Settings, index: Index) -> Iterator[Leaf]:
    """Yield the tasks that a group lists: names, tables that change a task, groups within it."""
    for one in group["task"]:
        if isinstance(one, str):
            yield from _leaves(one, {}, index)
        elif isinstance(one["task"], str):
            yield from _leaves(one["task"], {key: one[key] for key in one if key != "task"}, index)
        else:
            yield from _members(one, index)


def _submits(entry: Mapping[str, Any]) -> bool:
    return any("submission" in str(entry.get(key, "")) for key in ("metric", "aggregation"))


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
