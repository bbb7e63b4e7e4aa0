"""A copy of the code to edit, and what that does to the keys of runs."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from espalier.harness.paths import ROOT
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method
from tests import commands

#: Runs by what is special about them.
RUNS = {
    "reducer": ("method=fastv", "ratio=0.5"),
    "decoder": ("method=pearl",),  # its draft is of another family, see `run`
    "reads no signal": ("method=uniform", "ratio=0.5"),
}

#: The family of the decoder's draft; the models themselves are LLaVAs.
OTHER_FAMILY = "qwen2_vl"


@cache
def run(name: str) -> tuple[RunSpec, Method]:
    """Return one of RUNS."""
    spec = commands.spec_of(*RUNS[name])
    if spec.method.draft is not None:
        draft = replace(spec.method.draft, adapter=OTHER_FAMILY)
        spec = replace(spec, method=replace(spec.method, draft=draft))
    return spec, build_method(spec.method.name, spec.method.params)


@dataclass(frozen=True)
class Tree:
    """A copy of the code and of the tasks."""

    root: Path

    @classmethod
    def copied(cls, root: Path) -> Tree:
        """Copy what runs go through."""
        for folder in ("espalier", "harness", "methods", "tasks"):
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=leave)
        return cls(root)

    def keys(self) -> dict[str, str]:
        """Return the key of each of RUNS on this code."""
        return {name: run_key(self.parts(name)) for name in RUNS}

    def parts(self, name: str) -> dict[str, object]:
        """Return what the key of one of RUNS is computed from."""
        spec, method = run(name)
        sources = tuple(self.root / source.relative_to(ROOT) for source in spec.benchmark.sources)
        here = replace(spec, benchmark=replace(spec.benchmark, sources=sources))
        return key_parts(here, method, Digests(), root=self.root)

    def edit(self, name: str, change: Callable[[str], str]) -> None:
        """Change the text of a file, which must not stay as it is."""
        path = self.root / name
        before = path.read_text()
        after = change(before)
        assert after != before, name
        path.write_text(after)


def other_code(text: str) -> str:
    """Return a file in which every function and class does one thing more."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.body.append(ast.parse("del len").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))
