"""The kinds of the methods of `methods/`, read from their sources: no method, and no torch, is imported."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from espalier.harness.config.group_lists import choices
from espalier.harness.paths import ROOT

#: The kind that each base class of methods makes (harness/kinds/lookup.py).
KINDS = {
    "TokenReducer": "reducer",
    "CacheCompressor": "compressor",
    "Decoder": "decoder",
    "DenoisingReducer": "denoiser",
}


def method_kind(name: str) -> str | None:
    """Return the kind of a method by the bases of its class; None: methods/ has no such file. Cost: milliseconds."""
    path = ROOT / "methods" / f"{name}.py"
    return _kind(path) if path.is_file() else None


def compressors() -> str:
    """Return the names of the methods that evict cache entries, for an error line."""
    return ", ".join(name for name in choices("method") if method_kind(name) == "compressor")


@cache
def _kind(path: Path, name: str | None = None) -> str | None:
    """Return the kind of a class of a file, None: of the first class that has one."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    modules = {
        alias.name: node.module
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    bases = (
        base.id
        for node in classes.values()
        if name in (None, node.name)
        for base in node.bases
        if isinstance(base, ast.Name)
    )
    for base in bases:
        if base in KINDS:
            return KINDS[base]
        module = modules.get(base, "").removeprefix("espalier.")
        file = ROOT.joinpath(*module.split(".")).with_suffix(".py") if module else path
        kind = _kind(file, base) if base in classes or module.startswith("methods.") else None
        if kind is not None:
            return kind
    return None
