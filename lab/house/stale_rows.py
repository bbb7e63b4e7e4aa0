"""Count how many commits change the code digest of a run, under three definitions of the code that belongs to it.

    python -m lab.house.stale_rows REPOSITORY LAST_COMMIT [--count 200]

`walk` follows definitions (run key version 3, read from LAST_COMMIT), `packages` takes whole packages, `files` takes
the closure of imported files. A commit counts where the digest differs from that of its first parent. Approximations:
the signals of a method are the signal names quoted in its file, and every commit is assumed to have rows.
LAST_COMMIT must be before the packages moved into `espalier`: module names are those of that layout.

On the last 200 commits before that move, over ten runs: walk 679, packages 620, files 697. `packages` misses 66 changes
that the walk follows into other packages; the 22 that `files` misses are in classes that only annotations name, and in
the choice of a kind.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.runs.code_files import CodeFiles

#: Name: method file, base of the method, adapters, task files.
RUNS = {
    "fastv, llava": ("fastv:FastV", "TokenReducer", ("llava",), ("tasks/pope",)),
    "random, qwen2.5-vl": ("random:Random", "TokenReducer", ("qwen2_5_vl",), ("tasks/pope",)),
    "visionzip, llava-ov": ("visionzip:VisionZip", "TokenReducer", ("llava_onevision",), ()),
    "divprune, internvl": ("divprune:DivPrune", "TokenReducer", ("internvl",), ("tasks/rec",)),
    "rtprune, deepseek-ocr": ("rtprune:RTPrune", "TokenReducer", ("deepseek_ocr",), ("tasks/ocr",)),
    "fastv, seedling": ("fastv:FastV", "TokenReducer", ("llava",), ("tasks/seedling",)),
    "aircache, llava-next": ("aircache:AirCache", "CacheCompressor", ("llava_next",), ()),
    "h2o, qwen3-vl": ("h2o:H2O", "CacheCompressor", ("qwen3_vl",), ()),
    "parallelvlm, qwen2.5-vl": ("parallelvlm:ParallelVLM", "Decoder", ("qwen2_5_vl",), ()),
    "d3tom, llada-v": ("d3tom:D3ToM", "DenoisingReducer", ("llada_v",), ()),
}
#: Modules of the kinds in the old layout.
KINDS = {
    "TokenReducer": ("harness.kinds.reducer",),
    "CacheCompressor": ("harness.kinds.compressor",),
    "Decoder": ("harness.kinds.decoder",),
    "DenoisingReducer": ("harness.kinds.denoiser",),
}
#: Packages that every run uses entirely, and those of some kinds.
PACKAGES = ("engine", "artifacts", "evaluation", "measure", "kinds", "media", "stats")
DECODING = {"Decoder": ("decoding",), "DenoisingReducer": ("diffusion",)}
#: Files with alternative imports: the chosen ones are entries.
TABLES = ("harness.kinds.lookup", "harness.kinds.by_model")


def digests(tree: Path, files: CodeFiles, walk: Walk) -> dict[tuple[str, str], str]:
    """Return the digest of each run of RUNS on a checkout, by run and definition."""
    roots = constants(tree / "harness/running/roots.py")
    adapters, signals = (
        table(tree / name)
        for name in ("harness/adapters/base.py", "harness/engine/signals/table.py")
    )
    run_digests = {}
    for name, (method, base, families, tasks) in RUNS.items():
        module, _, _ = method.partition(":")
        quoted = set(
            re.findall(r'"(\w+)"', (tree / f"methods/{module}.py").read_text(encoding="utf-8"))
        )
        task = [path for folder in tasks for path in sorted((tree / folder).rglob("*.py"))]
        method_modules = [
            f"methods.{module}",
            *(adapters[family] for family in families if family in adapters),
        ]
        entries = {item.partition(":")[0] for item in roots["ENTRIES"]}
        producers = {signals[signal] for signal in quoted & set(signals)}
        excluded = {*roots["STOPPED"], *TABLES}

        def paths(*modules: str) -> list[Path]:
            return [path for item in modules if (path := files.path(item)) is not None]

        run_digests[name, "files"] = files.digest(
            [*paths(*method_modules, *entries, *producers, *KINDS[base]), *task], excluded
        )
        package_files = [
            path
            for package in (*PACKAGES, *DECODING.get(base, ()))
            for path in sorted((tree / "harness" / package).rglob("*.py"))
        ]
        outside = {
            f"harness.{folder.name.removesuffix('.py')}" for folder in (tree / "harness").iterdir()
        }
        mine = files.closure(paths(*method_modules), outside - {"harness.adapters"})
        shared = paths(*(f"harness.{item}" for item in ("budget", "facts", "generation")))
        run_digests[name, "packages"] = files.digest(
            [
                *package_files,
                *shared,
                *(stamp.path for stamp in mine),
                *paths("harness.running.row"),
                *task,
            ],
            {"harness", "methods"},
        )
        run_digests[name, "walk"] = walk.digest(
            symbols=(*roots["ENTRIES"], f"methods.{method}"),
            task=tuple(task),
            choices=(
                (roots["BY_ADAPTER"], frozenset(families)),
                (roots["BY_KIND"], frozenset({base})),
                *((item, frozenset(quoted)) for item in roots["BY_SIGNAL"]),
            ),
            stops=frozenset(roots["STOPPED"]),
        )
    return run_digests


class Walk:
    """The walk through definitions of run key version 3, imported from a separate checkout."""

    def __init__(self, code: Path, tree: Path) -> None:
        """Import it; `tree` is the checkout to walk through."""
        sys.path.insert(0, str(code))
        from harness.running.codebase import Codebase
        from harness.running.reach import Reaches, Roots

        self._roots, self._reaches = Roots, Reaches(Codebase(tree))

    def digest(self, symbols: tuple[str, ...], task: tuple[Path, ...], **roots: Any) -> str:
        """Return the digest of the code reachable from some roots."""
        outside = tuple(path for path in task if "harness" not in path.parts)
        digest: str = self._reaches.digest(
            self._roots(tuple(sorted(set(symbols))), outside, **roots)
        )
        return digest


def constants(path: Path) -> dict[str, Any]:
    """Return the literal constants that a file assigns."""
    literals = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            literals[node.targets[0].id] = ast.literal_eval(node.value)
    return literals


def table(path: Path) -> dict[str, str]:
    """Return the modules of a registry by name."""
    calls = re.findall(r'\.add\(\s*"(\w+)",\s*"([\w.]+):', path.read_text(encoding="utf-8"))
    return dict(calls)


def git(repository: Path, *arguments: str) -> str:
    """Return the output of a git command."""
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sides(repository: Path, last: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield the last commits that touch the code, oldest first, each with its first parent."""
    names = git(repository, "log", f"-{count}", "--format=%H %P", last, "--", "harness", "methods")
    for line in reversed(names.splitlines()):
        commit, parent, *_ = line.split()
        yield commit, parent


def main() -> None:
    """Print a table: number of commits that make rows stale, by run and definition."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("last")
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    digests_of: dict[str, Mapping[tuple[str, str], str]] = {}
    stale: Counter[tuple[str, str]] = Counter()
    number = 0
    with TemporaryDirectory() as folder:
        code, tree = Path(folder, "walk"), Path(folder, "tree")
        for place in (code, tree):
            git(options.repository, "worktree", "add", "--detach", str(place), options.last)
        files, walk = CodeFiles(tree), Walk(code, tree)
        try:
            for commit, parent in sides(options.repository, options.last, options.count):
                for name in (parent, commit):
                    if name not in digests_of:
                        git(tree, "checkout", "--quiet", "--detach", name)
                        digests_of[name] = digests(tree, files, walk)
                number += 1
                stale.update(
                    key
                    for key in digests_of[commit]
                    if digests_of[commit][key] != digests_of[parent].get(key)
                )
        finally:
            for place in (code, tree):
                git(options.repository, "worktree", "remove", "--force", str(place))
    definitions = ("walk", "packages", "files")
    print("run", *definitions, sep=" | ")
    for run in RUNS:
        print(run, *(stale[run, name] for name in definitions), sep=" | ")
    print("all", *(sum(stale[run, name] for run in RUNS) for name in definitions), sep=" | ")
    print(f"{number} commits")


if __name__ == "__main__":
    main()
