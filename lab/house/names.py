"""Uninformative names: `python -m lab.house.names` counts them, `--check` fails above the ceilings.

Counts in harness/, methods/, lab/, serve/ and tasks/: bindings (variables, parameters, functions) with a name that is
a pronoun or a bare participle; files named -ing; class names used in several files. A ceiling (ceilings.json) only
goes down: when a count falls, `--lower` writes the new one.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.house import ceilings

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("harness", "methods", "lab", "serve", "tasks")

#: Files named -ing that hold a thing: `Setting` is a class.
NOUNS = frozenset(["setting"])

#: Names that are not nouns of the field.
VAGUE = frozenset(
    [
        "one",
        "ones",
        "other",
        "others",
        "own",
        "found",
        "told",
        "known",
        "asked",
        "given",
        "here",
        "there",
        "them",
        "it",
        "this",
        "that",
        "these",
        "those",
        "whole",
        "most",
        "least",
        "what",
        "which",
        "who",
        "said",
        "shown",
        "seen",
        "made",
        "held",
        "gone",
        "left",
        "some",
        "any",
        "both",
        "rest",
        "more",
        "behind",
        "beside",
        "apart",
        "again",
        "same",
        "alone",
    ]
)


def files(root: Path = ROOT) -> list[Path]:
    """Return the Python files to check."""
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]


def bindings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and line of every variable, parameter and function, without leading underscores."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line):
                yield name.strip("_"), line
            case ast.arg(arg=name, lineno=line) if name not in ("self", "cls"):
                yield name.strip("_"), line
            case (
                ast.FunctionDef(name=name, lineno=line)
                | ast.AsyncFunctionDef(name=name, lineno=line)
            ):
                yield name.strip("_"), line


def _named_ing(path: Path) -> bool:
    return path.stem.endswith("ing") and path.stem not in NOUNS


def measure(root: Path = ROOT) -> tuple[dict[str, float], list[str]]:
    """Return the counts and a line for each occurrence. Cost: parses about 780 files, five seconds."""
    places: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    total = vague = 0
    for path in files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(root).as_posix()
        for binding, line in bindings(tree):
            total += 1
            if binding in VAGUE:
                vague += 1
                places.append(f"{name}:{line}: {binding}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.strip("_")].append(name)
        if _named_ing(path):
            places.append(f"{name}: a file named -ing")
    twice = {name: sorted(set(where)) for name, where in classes.items() if len(set(where)) > 1}
    places += [f"class {name}: {', '.join(where)}" for name, where in sorted(twice.items())]
    counts = {
        "vague_names": vague,
        "vague_percent": round(100 * vague / total, 2),
        "files_named_ing": sum(map(_named_ing, files(root))),
        "classes_in_several_files": len(twice),
    }
    return counts, places


def main(argv: Sequence[str] | None = None) -> int:
    """Print counts; exit code 1 if `--check` finds one above its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m lab.house.names", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every occurrence")
    ceilings.add_options(parser)
    options = parser.parse_args(argv)
    counts, places = measure()
    if options.list:
        print("\n".join(places))
    return ceilings.hold(counts, options)


if __name__ == "__main__":
    sys.exit(main())
