"""Files of settings as plain YAML, and lmms-eval's tasks: the package, which takes seconds, is not imported."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import yaml

from espalier.harness.errors import UserError, foreign, near_names
from espalier.harness.paths import IN_PACKAGE, located

#: Top-level settings of a task file that declare its names, each with its continuation lines.
_DECLARES = re.compile(
    r"^[\"']?(?:task|group|tag|include|class)[\"']?[ \t]*:.*(?:\n(?:[ \t]*-|[ \t]+\S|[ \t]*#|[ \t]*$).*)*",
    re.MULTILINE,
)

#: A header that puts the content of a file of conf/ at the top of the config.
_GLOBAL = re.compile(rb"#\s*@package\s+_global_\s*$")

Settings = dict[str, Any]

#: Prefix of a benchmark that is a task of lmms-eval.
TASK = "task:"

#: Files of lmms-eval's tasks that replace its own: their aggregations hide the scores of samples.
REPLACED = f"{IN_PACKAGE}espalier/tasks/replaced"


class _Loader(yaml.SafeLoader):
    """Reads `!function utils.f` as the string `utils.f`, so that no code of a task runs."""


class _FastLoader(yaml.CSafeLoader):
    """The same in C, where nesting without end ends the process."""


for _loader in (_Loader, _FastLoader):
    _loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


class _ConfLoader(_FastLoader):
    """Reads files of conf/ as OmegaConf does: 1e4 is a number, a date is text, and no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a table.

        Raises:
            ConstructorError: a key stands twice.
        """
        names = [key.value for key, _ in node.value]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.constructor.ConstructorError(
                None, None, f"found duplicate key {twice}", node.start_mark
            )
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


_NUMBER = r"[-+]?(\d+(_\d+)*(\.[\d_]*)?([eE][-+]?\d+)|\d+(_\d+)*\.[\d_]*|\.\d+(_\d+)*|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
_ConfLoader.yaml_implicit_resolvers = {
    sign: [entry for entry in entries if not entry[0].endswith(("timestamp", "float"))]
    for sign, entries in _FastLoader.yaml_implicit_resolvers.items()
}
_ConfLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"^(?:{_NUMBER})$"), [*"-+0123456789."]
)

#: Brackets, and characters of a line, up to which a text is not deeply nested.
SHALLOW = 2000


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
        return tuple(
            entry["metric"]
            for entry in self._metric_list
            if not any("submission" in str(entry.get(key, "")) for key in ("metric", "aggregation"))
        )

    def higher_is_better(self, metric: str) -> bool:
        """Return whether higher values of a metric are better."""
        entries = [entry for entry in self._metric_list if entry["metric"] == metric]
        return all(entry.get("higher_is_better", True) for entry in entries)

    @property
    def _metric_list(self) -> list[Settings]:
        listed = self.settings.get("metric_list") or [{"metric": "exact_match"}]
        return [entry for entry in listed if entry]


def leaves(name: str) -> tuple[Leaf, ...]:
    """Return the task of a name, or all tasks of a group or a tag.

    Raises:
        UserError: lmms-eval has no task of this name, or one of the tasks has no written answers.

    Cost: a quarter of a second, once a process, then one file for each task.
    """
    index = replacements() if name in replacements().names else library()
    if name not in index.names:
        raise UserError(
            f"benchmark='task:{name}': lmms-eval has no task {name!r}{near_names(name, index.names)};"
            " valid: a task, group or tag of lmms-eval"
        )
    tasks = index.leaves(name)
    for leaf in tasks:
        kind = leaf.settings.get("output_type", "generate_until")
        if "class" in leaf.settings or kind != "generate_until":
            reason = "is a Python class" if "class" in leaf.settings else f"is of type {kind}"
            raise UserError(f"benchmark='task:{name}': {leaf.name} {reason}; valid: generate_until")
        if not leaf.metrics:
            raise UserError(
                f"benchmark='task:{name}': {leaf.name} is scored by a submission server alone;"
                " valid: a task with metrics of its own"
            )
    return tasks


def task_section(name: str) -> dict[str, Any]:
    """Return the section that a file of conf/benchmark would have for a task, group or tag of lmms-eval.

    Its metrics are the task's in their order; the first is the headline. A group has the mean over its tasks of every
    metric that all of them have, then the metrics of each task.

    Raises:
        UserError: there is no such task, or it cannot be run.
    """
    tasks, is_replaced = leaves(name), name in replacements().names
    first, all_settings = tasks[0], [leaf.settings for leaf in tasks]
    common = [metric for metric in first.metrics if all(metric in leaf.metrics for leaf in tasks)]
    metrics = list(first.metrics)
    if len(tasks) > 1:
        task_metrics = [f"{leaf.name}/{metric}" for leaf in tasks for metric in leaf.metrics]
        metrics = [*common, *task_metrics]
    return {
        "defaults": ["/base/benchmark@_here_", "_self_"],
        "name": TASK + name,
        "task": name,
        "include_path": REPLACED if is_replaced else None,
        "sources": [REPLACED] if is_replaced else [],
        "metrics": metrics,
        "headline": metrics[0],
        "derived": {metric: {"mean": [f"*/{metric}"]} for metric in common}
        if len(tasks) > 1
        else {},
        "higher_is_better": first.higher_is_better(metrics[0].rpartition("/")[2]),
        "dataset": {
            "path": _shared(settings.get("dataset_path") for settings in all_settings),
            "config": _shared(settings.get("dataset_name") for settings in all_settings),
            "revision": _shared(
                (settings.get("dataset_kwargs") or {}).get("revision") for settings in all_settings
            ),
            "split": _shared(
                settings.get("test_split") or settings.get("validation_split")
                for settings in all_settings
            ),
        },
    }


@cache  # neither these files nor lmms-eval's change while a process runs
def replacements() -> Index:
    """Return the index of REPLACED."""
    return index_of(located(REPLACED))


@cache
def library() -> Index:
    """Return the index of lmms-eval's own task files; an empty one where the package is absent."""
    folder = library_folder()
    return Index({}) if folder is None else index_of(folder)


def library_folder() -> Path | None:
    """Return the folder of lmms-eval's own task files; None where the package is absent."""
    # The package is found, not imported: its import takes seconds.
    package = find_spec("lmms_eval")
    return (
        None if package is None or package.origin is None else Path(package.origin).parent / "tasks"
    )


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
    tag_tasks = {tag: tuple(tasks) for tag, tasks in tags.items() if tag not in files}
    return Index(files, frozenset(groups), tag_tasks)


def read_task(path: Path) -> Settings:
    """Return the settings of a task file and of included files; earlier files override later ones."""
    return _with_included(path, read_yaml(path), read_task)


def read_yaml(
    path: Path, text: str | None = None, loader: type[_FastLoader] = _FastLoader
) -> Settings:
    """Return the table that a file of settings holds, or `text` of it.

    Raises:
        UserError: the file cannot be read, or is not UTF-8, not YAML or not a table; the message has the file and the
            line.
    """
    with foreign(f"{path} cannot be read", "YAML in UTF-8"):
        # Some files begin with a byte order mark.
        text = path.read_text("utf-8-sig") if text is None else text
        longest = max(map(len, text.splitlines()), default=0)
        is_shallow = max(text.count("[") + text.count("{"), longest) < SHALLOW
        table = yaml.load(text, loader if is_shallow else _Loader) or {}
    if not isinstance(table, dict):
        raise UserError(f"{path} must be a table of key: value pairs")
    return table


def read_conf(path: Path) -> tuple[Settings, bool]:
    """Return the table of a file of conf/, and whether its header puts it at the top of the config.

    Raises:
        UserError: as `read_yaml`.
    """
    table = read_yaml(path, loader=_ConfLoader)
    with path.open("rb") as file:
        return table, any(_GLOBAL.match(line) for line in file)


def _declared(path: Path) -> Settings:
    text = "\n".join(_DECLARES.findall(path.read_text("utf-8-sig", errors="replace")))
    return _with_included(path, read_yaml(path, text), _declared)


def _with_included(path: Path, settings: Settings, read: Callable[[Path], Settings]) -> Settings:
    merged: Settings = {}
    for included in reversed(_listed(settings.pop("include", None))):
        merged |= read(path.parent / included)
    return merged | settings


def _leaves(name: str, overrides: Settings, index: Index) -> Iterator[Leaf]:
    """Yield the tasks of a name, each with the settings `overrides` on top."""
    if name in index.tags:
        for task in index.tags[name]:
            yield from _leaves(task, overrides, index)
        return
    settings = (read_task(index.files[name]) if name in index.files else {}) | overrides
    if name in index.groups:
        yield from _members(settings, index)
    else:
        yield Leaf(name, settings)


def _members(group: Settings, index: Index) -> Iterator[Leaf]:
    """Yield the tasks that a group lists: names, tables that change a task, groups within it."""
    for member in group["task"]:
        if isinstance(member, str):
            yield from _leaves(member, {}, index)
        elif isinstance(member["task"], str):
            changes = {key: value for key, value in member.items() if key != "task"}
            yield from _leaves(member["task"], changes, index)
        else:
            yield from _members(member, index)


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _shared(values: Any) -> str | None:
    """Return the value that all tasks of a group share, as text; None: they differ."""
    distinct = {None if value is None else str(value) for value in values}
    return distinct.pop() if len(distinct) == 1 else None
