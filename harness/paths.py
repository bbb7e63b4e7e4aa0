"""Files of the installed package, and paths that a user types, relative to the working folder."""

from __future__ import annotations

import os
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path

from espalier.harness.errors import UserError, brief

#: The folder of harness, methods, tasks and conf: the repository, or the installed package.
ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"

#: Folders of code in it; their modules are imported below `espalier`.
FOLDERS = frozenset({"harness", "methods", "serve", "tasks"})

#: The store where none is given: `results` in the working directory. In conf/config.yaml it is `store`.
DEFAULT_STORE = Path("results")

#: Beginning of a path inside an installed package: `pkg://espalier/tasks`.
IN_PACKAGE = "pkg://"

#: Bytes that a name, and a path, have at most on Linux.
LONGEST, LONGEST_PATH = 255, 4095


def located(value: str | PathLike[str]) -> Path:
    """Return a path of the config or the command line as an absolute one; relative ones start at the working directory.

    `pkg://<package>/...` is inside an installed package, as in Hydra's search path.

    Raises:
        UserError: it is too long, or begins with `~` and a name that no user has, or with a package that is not
            installed, or the working directory is gone.
    """
    text = fspath(value)
    parts = os.fsencode(text).split(b"/")
    if "\0" in text or max(map(len, parts)) > LONGEST or len(os.fsencode(text)) > LONGEST_PATH:
        raise UserError(
            f"{brief(text)!r} is no path of a file system; valid: names of at most {LONGEST} bytes"
        )
    if text.startswith(IN_PACKAGE):
        return _inside_package(text)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # `~name`, and no user of that name
        raise UserError(f"{text!r} begins at no user's home; valid: a path, or ~/...") from error
    except FileNotFoundError as error:
        raise UserError(
            f"{text!r} starts at the working directory, which is gone; valid: an absolute path"
        ) from error


@cache  # a sweep reads the same places in every cell
def _inside_package(text: str) -> Path:
    """Return a path that begins with `pkg://`."""
    name, _, place = text.removeprefix(IN_PACKAGE).partition("/")
    spec = package_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{text!r}: no package {name!r} is installed; valid: pkg://espalier/...")
    # In the repository the folders of the package are links.
    return (Path(spec.submodule_search_locations[0]) / place).resolve()


def package_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a package, which is not imported; None: it is not installed, or the text is no such name."""
    try:
        return find_spec(name)
    except (ImportError, ValueError):  # `..` and the like are no names of packages
        return None


def short_path(path: Path) -> str:
    """Return a path as a user would type it: relative if it is inside the working directory, else in full."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def child_path() -> dict[str, str]:
    """Return the variable by which a new process imports this package from any folder; none where Python finds it."""
    # Most commands start no process.
    import sysconfig

    if str(IMPORTED_FROM) == sysconfig.get_path("purelib"):
        return {}
    places = filter(None, [str(IMPORTED_FROM), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(places)}


#: The folder that Python imports this package from.
IMPORTED_FROM = located("pkg://espalier").parent
#: Tables that papers print, as data.
PAPERS = located("pkg://espalier/papers")
#: Results of the embedded model that come with the package.
DEMO = located("pkg://espalier/demo")


def usual_store() -> Path:
    """Return the store that reports read where none is given: the user's own if it has rows, else the demo."""
    return DEFAULT_STORE if any(DEFAULT_STORE.glob("runs/*/row.json")) else DEMO
