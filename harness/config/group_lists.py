"""The choices of the groups of conf/, read as plain YAML, without Hydra and torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.paths import CONF

_ASKED = re.compile(r"\+?(\w+)=\?")

Section = dict[str, Any]


def asked_groups(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the config groups that a command line wants listed: `benchmark` for `benchmark=?`."""
    matches = (_ASKED.fullmatch(text) for text in arguments)
    groups = (match[1] for match in matches if match)
    return tuple(group for group in groups if (CONF / group).is_dir() or group == "anchor")


def asked_model(arguments: Iterable[str]) -> str | None:
    """Return the model that a command line gives beside a listing: `model=llava15_7b method=?`."""
    names = [text.partition("=")[2] for text in arguments if text.startswith("model=")]
    return next((name for name in names if name != "?"), None)


def choices(group: str) -> list[str]:
    """Return the names of a group's files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def read_choice(group: str, name: str) -> Section:
    """Return the section of a file, merged over its defaults; `${}` stays unresolved."""
    return _read(CONF / group / f"{name}.yaml")


def comment(group: str, name: str) -> str:
    """Return the first sentence of the comment at the head of a file."""
    lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    count = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    words = (line.lstrip("# ") for line in lines[:count])
    text = " ".join(line for line in words if not line.startswith("@package"))
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0].rstrip(".")


def _read(path: Path) -> Section:
    entries = read_yaml(path.read_text(encoding="utf-8"), path)
    section: Section = {}
    for default in entries.pop("defaults", ["_self_"]):
        if isinstance(default, Mapping):
            # `override /benchmark: ...` is a choice from another group.
            continue
        section = merged(section, entries if default == "_self_" else _read(_file(default, path)))
    return section


def _file(default: str, path: Path) -> Path:
    """Return the file that an entry of a defaults list names: in the folder of `path`, or from the top of conf/."""
    name = default.partition("@")[0]
    folder = CONF if name.startswith("/") else path.parent
    return folder / f"{name.lstrip('/')}.yaml"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Section:
    """Return the table `below`, overridden by the entries of `above`; tables within it are merged as well."""
    tables = {key: merged(below[key], above[key]) for key in above if _tables(below, above, key)}
    return {**below, **above, **tables}


def _tables(below: Mapping[str, Any], above: Mapping[str, Any], key: str) -> bool:
    return isinstance(below.get(key), Mapping) and isinstance(above[key], Mapping)
