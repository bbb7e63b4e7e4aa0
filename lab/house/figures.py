"""Sizes of the code base: `python -m lab.house.figures` prints one JSON object.

Files and lines of harness/, packages, ranks of the layer contract, the longest import chain, names
(lab/house/names.py), files of conf/, words of hand-written pages. `--run` adds the path of one run (run_path.py).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from lab.house import names, run_path

ROOT = Path(__file__).resolve().parents[2]

#: Generated pages of docs/, and the log.
GENERATED = ("methods.md", "benchmarks.md", "placement.md", "conflicts.md")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the modules of harness/ and methods/ by dotted name, and run.py."""
    listed = {"run": root / "run.py"}
    for folder in ("harness", "methods"):
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            listed["espalier." + ".".join(parts).removesuffix(".__init__")] = path
    return listed


def imports(listed: dict[str, Path]) -> dict[str, set[str]]:
    """Return each module's imports of the others, including those in functions, without type-checking imports."""
    graph: dict[str, set[str]] = {}
    for name, path in listed.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        hidden = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        }
        targets: set[str] = set()
        for node in ast.walk(tree):
            if id(node) in hidden:
                continue
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets.add(inner if inner in listed else node.module)
        graph[name] = targets & set(listed) - {name}
    return graph


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """Return the longest chain of imports. The graph has no cycles (pyproject.toml, import-linter)."""

    @cache
    def chain(name: str) -> tuple[str, ...]:
        longest: tuple[str, ...] = ()
        for target in sorted(graph[name]):
            reached = chain(target)
            longest = reached if len(reached) > len(longest) else longest
        return (name, *longest)

    sys.setrecursionlimit(10_000)
    longest: tuple[str, ...] = ()
    for name in graph:
        longest = longest if len(longest) > len(chain(name)) else chain(name)
    return list(longest)


def words(path: Path) -> int:
    """Return the number of words of a file outside of the tables that `make docs` writes into it."""
    text = path.read_text(encoding="utf-8")
    return len(re.sub(r"<!-- [\w ]+ -->\n(?s:.*?)<!-- end -->", "", text).split())


def measure() -> dict[str, object]:
    """Return all figures except those of a run."""
    harness = sorted((ROOT / "harness").rglob("*.py"))
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = layers["tool"]["importlinter"]["contracts"][0]["layers"]
    chain = longest_chain(imports(modules()))
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "log" not in path.parts]
    by_hand = [path for path in pages if path.name not in (*GENERATED, "log.md")]
    return {
        "files": len(harness),
        "lines": sum(path.read_text(encoding="utf-8").count("\n") for path in harness),
        "packages": sum(
            path.is_dir() and path.name != "__pycache__" for path in (ROOT / "harness").iterdir()
        ),
        "loose_modules": sum(
            path.suffix == ".py" and path.stem != "__init__"
            for path in (ROOT / "harness").iterdir()
        ),
        "ranks": len(contract),
        "chain": len(chain),
        "chain_modules": chain,
        **names.measure()[0],
        "conf_files": len([*(ROOT / "conf").rglob("*.yaml")]),
        "hand_written_words": sum(map(words, by_hand)),
        "readme_words": words(ROOT / "README.md"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m lab.house.figures", description=__doc__)
    parser.add_argument("--run", action="store_true", help="trace one run as well")
    options = parser.parse_args(argv)
    figures = measure()
    if options.run:
        figures |= run_path.measure()[0]
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
