"""Check of `model.template`: the families for which some task has its own prompts."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from espalier.harness.errors import unknown_name

#: The table of a task file that holds prompts by family, up to the next key at the margin.
_TABLE = re.compile(
    r"^lmms_eval_specific_kwargs:[ \t]*\n((?:[ \t]+.*\n?|[ \t]*\n|#.*\n?)*)", re.MULTILINE
)
#: A key in it that opens a table: a family's name. Deeper ones are filtered by their indent.
_FAMILY = re.compile(r"^([ \t]+)[\"']?([\w.-]+)[\"']?[ \t]*:[ \t]*(?:#.*)?$", re.MULTILINE)


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
