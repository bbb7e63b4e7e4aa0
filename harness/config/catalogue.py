"""The names that may stand after `model=`, `method=`, `benchmark=` and the like, each with its config.

A name is that of a file of conf/, of a folder of the command or of an installed plug-in. Without a file there are tasks
of lmms-eval, users' classes and former names of methods, checkpoints, presets of published tables, and anchors:
`benchmark=task:mmstar`, `method=fastv_paper`, `+experiment=d2pruner_table1`, `+anchor=llava15_7b_pope`. A preset of a
published table is made when it is chosen: nothing of it is imported or read for other commands.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from espalier.harness.config import checkpoint_names
from espalier.harness.config.checkpoint_names import checkpoint_section
from espalier.harness.config.group_lists import ConfFile, ConfFolders, choices
from espalier.harness.config.lmms_task_files import TASK, task_section
from espalier.harness.config.method_names import (
    KINDS,
    combination_section,
    former_name,
    is_combination,
    method_section,
    methods_of,
)
from espalier.harness.errors import FOREIGN, UserError, first_words, tell_once, unknown_name
from espalier.harness.paths import CONF
from espalier.harness.settings import PLUS
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import conf_folders, problems, title_of
from espalier.harness.specs.run_spec import ORIGINAL, VARIANTS

ANCHOR = "anchor"
#: The presets of published tables, by name: reports is a package above this one.
TABLES = "espalier.harness.reports.tables.cell_runs"

#: Keys that the line of a user's file shows.
SHOWN = {
    "benchmark": ("dataset", "kind", "limit", "needs", "prompt_tokens", "title"),
    "method": ("name", "params"),
    "model": ("adapter", "hub", "path"),
}

#: How a file gets the keys that it does not set.
BASE = "defaults: [/base/{}@_here_, _self_]"


class Catalogue(ConfFolders):
    """All names of a command.

    Args:
        further: folders of configs besides conf/ and those of installed plug-ins.
    """

    def __init__(self, further: Sequence[Path] = ()) -> None:
        super().__init__((CONF, *further, *conf_folders()))
        self.further = frozenset(further)

    def is_group(self, key: str) -> bool:
        """Return whether a key is that of a group of names."""
        return key == ANCHOR or any((folder / key).is_dir() for folder in self.folders)

    def get_group_options(self, group_name: str, results_filter: Any = None) -> list[str]:
        """Return the names that a glob of Hydra's grammar chooses from; its interface."""
        return [*_anchors()] if group_name == ANCHOR else self.choices(group_name)

    def check(self, key: str, group: str, name: Any) -> None:
        """Raise UserError unless a name has a config of one owner; `key` is that of the line.

        A name of conf/ that only installed plug-ins have as well is that of conf/, which a line reports.
        """
        # Reading a task of lmms-eval shows whether it exists.
        if not isinstance(name, str) or not (self.owners(group, name) or _maker(group, name)):
            raise self._unknown(key, group, str(name))
        reference = CodeReference.parse(name) if group == "method" else None
        if reference is not None:
            reference.check(key)
        owners = self.owners(group, name)
        if owners[:1] != [CONF] or self.further & set(owners):
            self.check_owner(group, name, key)
        elif len(owners) > 1:
            titles = ", ".join(map(title_of, owners[1:]))
            tell_once(
                f"{key}={name} is that of conf; {titles} has the name, too, and is passed over"
            )

    def _unknown(self, key: str, group: str, name: str) -> UserError:
        """Return the error for a name that has no config; it names the plug-ins that are passed over."""
        # Only the line of a wrong name needs it.
        from espalier.harness.specs.records.data_file import is_data

        is_compressor = key == "compressor"
        options = ["none", *methods_of(key)] if is_compressor else self.get_group_options(group)
        if group == "experiment":
            options += descriptions(group)
        error = unknown_name(key, name, options)
        if group == "method" and PLUS in name:
            error = _no_combination(key, name)
        file = f"{name.partition('.py')[0]}.py"
        is_file = name.startswith(file) and os.path.isfile(os.path.expanduser(file))
        if key in ("method", "compressor") and is_file:
            error = UserError(f"{key}={name!r} names no class of the file; valid: {file}:<class>")
        if key == "model" and os.path.exists(name):
            places = f"model=./{name}, " if os.path.isdir(name) else ""
            error = UserError(
                f"model={name!r} is no name of conf/model; valid: {places}the folder of a checkpoint with a slash, a "
                "hub id, or a name (model=?)"
            )
        if key == "benchmark" and is_data(name):
            error = UserError(
                f"benchmark={name!r} is a path; valid: benchmark=data benchmark.path={name}"
            )
        return UserError("; ".join([str(error), *problems()])) if problems() else error

    def _read(self, group: str, name: str) -> ConfFile:
        """Return the config of a name.

        Raises:
            UserError: there is none, or a file cannot be read; lmms-eval has no such task, or it cannot be run;
                the paper has no such table, or no run fills a cell of it; no family supports the checkpoint.
        """
        make = None if self.owners(group, name) else _maker(group, name)
        if make is None:
            return super()._read(group, name)
        section = dict(make())
        defaults = section.pop("defaults", ())
        return ConfFile(section, (*defaults, "_self_"), group in (ANCHOR, "experiment"))


def _maker(group: str, name: str) -> Callable[[], Mapping[str, Any]] | None:
    """Return what makes the config of a name without a file; None: the group has no such name."""
    if group == ANCHOR and name in _anchors():
        return partial(_anchor, name)
    if group == "benchmark" and name.startswith(TASK):
        return partial(task_section, name.removeprefix(TASK))
    if group == "method" and is_combination(name):
        return partial(combination_section, name)
    if group == "method" and (former_name(name) or CodeReference.parse(name)):
        return partial(_method, name)
    if group == checkpoint_names.GROUP and name.startswith(checkpoint_names.PREFIX):
        return partial(checkpoint_section, name)
    if group == "experiment" and _tables().is_table(name):
        return partial(_tables().preset, name)
    return None


def descriptions(group: str) -> dict[str, str]:
    """Return the description of each config without a file, by its name. Cost: reads results/papers."""
    if group == ANCHOR:
        text = "{benchmark}, {published} in table {table} of {paper}"
        return {name: text.format_map(line) for name, line in _anchors().items()}
    return dict(_tables().titles()) if group == "experiment" else {}


def _method(name: str) -> dict[str, Any]:
    """Return the section of a former name, or of a user's class."""
    reference = CodeReference.parse(name)
    if reference is None:
        return method_section(name)
    # Imports the user's file, and torch with it.
    from espalier.harness.specs.catalogue import defaults_of, method_class

    code = str(reference.anchored(Path.cwd()))
    params = defaults_of(method_class(reference.name, code))
    return {"name": reference.name, "variant": VARIANTS[0], "code": code, "params": params}


def _no_combination(key: str, name: str) -> UserError:
    """Return the error for names with a plus between them that are no combination of two methods."""
    parts, valid = name.split(PLUS), methods_of("reducer")
    unknown = [part for part in parts if part not in choices("method") and not former_name(part)]
    if unknown:
        return unknown_name(f"{key}={name!r}: part", unknown[0], valid)
    return UserError(f"{key}={name!r} joins {len(parts)} methods; valid: two, as divprune+fastv")


def _anchor(name: str) -> dict[str, Any]:
    """Return the preset that runs the unpruned model of a line of conf/anchors.csv."""
    line = _anchors()[name]
    choices = [{f"override /{group}": line[group]} for group in ("model", "benchmark")]
    prompt = line["prompt"]
    model = {} if prompt == ORIGINAL else {"model": {"prompt": prompt}}
    return {"defaults": choices, **model}


@lru_cache(maxsize=1)
def _anchors() -> dict[str, dict[str, str]]:
    with (CONF / "anchors.csv").open(encoding="utf-8", newline="") as file:
        return {line["anchor"]: line for line in csv.DictReader(file)}


def _tables() -> Any:
    return import_module(TABLES)


@dataclass(frozen=True)
class OwnChoices:
    """A group's files in conf/ and in the folders of users, checked as far as a list of their names needs it.

    Attributes:
        folders: conf/, and those of users.
        all_names: of the files that can be used, in alphabetical order.
        own_names: those of users among them.
        notes: a line for each folder with its names, and for each file that is passed over.
        kinds: of the methods of users.
    """

    folders: Catalogue
    all_names: Sequence[str]
    own_names: Sequence[str]
    notes: Sequence[str]
    kinds: Mapping[str, str]


def own_choices(group: str, folders: Sequence[Path] = ()) -> OwnChoices:
    """Return the files of a group. Cost: imports the methods and the model families of users."""
    every = Catalogue(folders)
    kinds: dict[str, str] = {}
    notes, own_names = [], []
    for folder in every.folders[1:]:
        usable = []
        for name in ConfFolders((folder,)).choices(group):
            try:
                every.check_owner(group, name)
                kinds[name] = _checked_kind(group, name, every)
                usable.append(name)
            except FOREIGN as error:
                reason = error if isinstance(error, UserError) else first_words(error)
                notes.append(f"passed over: {folder / group / name}.yaml: {reason}")
        if usable:
            notes.insert(0, f"of {title_of(folder)}: {', '.join(usable)}")
        own_names += usable
    all_names = sorted([*choices(group), *own_names])
    return OwnChoices(every, all_names, own_names, [*notes, *problems()], kinds)


def _checked_kind(group: str, name: str, every: Catalogue) -> str:
    """Return the kind of a user's method, of another file an empty text.

    Raises:
        UserError: the class that the file names cannot be imported, or is none of its group.
    """
    section = every.read_choice(group, name)
    if group == "model" and CodeReference.parse(section.get("adapter", "")) is not None:
        # Only a family of a user needs it.
        from espalier.harness.models.families import own_family

        own_family(section["adapter"])
    if missing := set(SHOWN.get(group, ())) - set(section):
        valid = "name, variant, params" if group == "method" else BASE.format(group)
        raise UserError(f"lacks {min(missing)}; valid: {valid}")
    if group != "method":
        return ""
    # Imports torch.
    from espalier.harness.specs.catalogue import method_class

    bases = (base.__name__ for base in method_class(section["name"], section.get("code")).__mro__)
    return next((KINDS[base] for base in bases if base in KINDS), "")
