"""The files of users in a group of configs, checked as far as a list of their names needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.config.group_lists import ConfFolders, choices
from espalier.harness.config.method_kinds import KINDS
from espalier.harness.errors import FOREIGN, UserError, first_words
from espalier.harness.paths import CONF
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import conf_folders, problems, title_of

#: Keys that the line of a file shows.
SHOWN = {
    "benchmark": ("dataset", "kind", "limit", "needs", "prompt_tokens", "title"),
    "method": ("name", "params"),
    "model": ("adapter", "hub", "path"),
}

#: How a file gets the keys that it does not set.
BASE = "defaults: [/base/{}@_here_, _self_]"


@dataclass(frozen=True)
class OwnChoices:
    """A group's files in conf/ and in the folders of users.

    Attributes:
        folders: conf/, and those of users.
        all_names: of the files that can be used, in alphabetical order.
        own_names: those of users among them.
        notes: a line for each folder with its names, and for each file that is passed over.
        kinds: of the methods of users.
    """

    folders: ConfFolders
    all_names: Sequence[str]
    own_names: Sequence[str]
    notes: Sequence[str]
    kinds: Mapping[str, str]


def own_choices(group: str, folders: Sequence[Path] = ()) -> OwnChoices:
    """Return the files of a group. Cost: imports the methods and the model families of users."""
    every = ConfFolders((CONF, *folders, *conf_folders()))
    kinds: dict[str, str] = {}
    notes, own_names = [], []
    for folder in every.folders[1:]:
        usable = []
        for name in ConfFolders((folder,)).choices(group):
            try:
                every.check_owner(group, name)
                kinds[name] = _checked_kind(group, name, every, folder)
                usable.append(name)
            except FOREIGN as error:
                reason = error if isinstance(error, UserError) else first_words(error)
                notes.append(f"passed over: {folder / group / name}.yaml: {reason}")
        if usable:
            notes.insert(0, f"of {title_of(folder)}: {', '.join(usable)}")
        own_names += usable
    all_names = sorted([*choices(group), *own_names])
    return OwnChoices(every, all_names, own_names, [*notes, *problems()], kinds)


def _checked_kind(group: str, name: str, every: ConfFolders, folder: Path) -> str:
    """Return the kind of a user's method, of another file an empty text.

    Raises:
        UserError: the class that the file names cannot be imported, or is none of its group.
    """
    section = every.read_choice(group, name)
    key = {"method": "code", "model": "adapter"}.get(group, "")
    reference = CodeReference.parse(section.get(key, ""))
    place = None if reference is None else str(reference.anchored(folder))
    if group == "model" and place is not None:
        # Only a family of a user needs it.
        from espalier.harness.models.families import own_family

        own_family(place)
    if missing := set(SHOWN.get(group, ())) - set(section):
        valid = "name, variant, params" if group == "method" else BASE.format(group)
        raise UserError(f"lacks {min(missing)}; valid: {valid}")
    if group != "method":
        return ""
    # Imports torch.
    from espalier.harness.specs.catalogue import method_class

    bases = (base.__name__ for base in method_class(section["name"], place).__mro__)
    return next((KINDS[base] for base in bases if base in KINDS), "")
