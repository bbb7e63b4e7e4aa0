"""Plug-ins as installers leave them: a package, and the metadata with its entry point beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from espalier.harness.specs.plugins.installed import installed

METHOD = """
from dataclasses import dataclass

from espalier.methods.base import Plan, Site, TokenReducer, View


@dataclass(frozen=True)
class {name}(TokenReducer):
    K: int = 2

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        raise NotImplementedError
"""


def method(name: str = "FirstTokens") -> str:
    """Return the source of a method."""
    return METHOD.format(name=name)


def config(name: str, code: str | None) -> str:
    """Return the file of a method in a folder of configs."""
    place = "" if code is None else f"code: {code}\n"
    return f"# About {name}.\nname: {name}\nvariant: paper\n{place}params: {{K: 2}}\n"


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files by their paths."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def install(site: Path, package: str, files: dict[str, str], entry: str | None = None) -> None:
    """Lay down version 1.0 of a distribution of the package's name."""
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    points = f"[espalier.plugins]\nit = {entry or package}\n"
    info = f"{package}-1.0.dist-info"
    write(site, {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": points})
    write(site, {f"{package}/{name}": text for name, text in {"__init__.py": "", **files}.items()})


@contextmanager
def imported_from(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process find what is installed in a folder; forget its modules at the end."""
    with monkeypatch.context() as context:
        context.syspath_prepend(str(site))
        context.setenv("COLUMNS", "1000")
        installed.cache_clear()
        yield
    installed.cache_clear()
    tops = {path.name for path in site.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]
