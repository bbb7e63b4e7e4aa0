"""Mutation tests: `python -m tests.mutants` (`make mutants`) makes small mistakes on purpose and runs tests.

Each YAML file of this folder lists the mistakes of a package: a line of code, its replacement, and the tests that
should fail. A mistake is made in a copy of the tree; it is killed if one of those tests fails, and survives if all
pass. The tests run once without a mistake first, because they must pass then. `--sample N` draws N mistakes by
`--seed`, `--package NAME` takes those of one package, `--write lab/measured/mutants.md` writes the score by package.
The exit code is 1 if a mistake survives.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.mutants.lists import ROOT, Mutant, read_mutants
from tests.mutants.trying import Verdict, copies, import_once, passes, verdict


def page(verdicts: Sequence[tuple[Mutant, Verdict]], when: str) -> str:
    """Return the score by package and the survivors as Markdown; `when` names the code and the date."""
    lines = [
        "# Mistakes made on purpose",
        "",
        "Written by `make mutants`: each mistake changes behaviour and is killed if one of the tests that"
        " [tests/mutants](../../tests/mutants) names for it fails. CONTRIBUTING.md describes how to run them again.",
        "",
        f"Of {when}.",
        "",
        "| package | mistakes | killed | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    packages = sorted({mutant.package for mutant, _ in verdicts})
    for package in [*packages, None]:
        ours = [end for mutant, end in verdicts if package in (mutant.package, None)]
        killed = ours.count("killed")
        share = f"{100 * killed / len(ours):.0f} %"
        lines.append(f"| {package or 'all'} | {len(ours)} | {killed} | {share} |")
    alive = [f"- `{mutant.name}`" for mutant, end in verdicts if end == "survived"]
    return "\n".join([*lines, *(["", "Survived:", "", *alive] if alive else [])]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the selected mistakes; return 1 if one survives, 2 if the tests fail without any."""
    options = _options(argv)
    mutants = [mutant for mutant in read_mutants() if options.package in (None, mutant.package)]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    import_once()
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with copies(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:
        tree = free.get()
        if not passes(tree, tests, patience=None):
            print(f"error: without a mistake these fail: {' '.join(tests)}", file=sys.stderr)
            return 2
        free.put(tree)
        ends = pool.map(lambda mutant: verdict(mutant, free), mutants)
        tracked = track(ends, "mistakes", len(mutants), console=Console(stderr=True))
        verdicts = list(zip(mutants, tracked, strict=True))
    table = Table("mistake", "tests", "")
    for mutant, end in verdicts:
        if end == "survived":
            table.add_row(mutant.name, " ".join(mutant.tests), end)
    console = Console()
    if table.rows:
        console.print(table)
    killed = sum(end == "killed" for _, end in verdicts)
    console.print(f"{killed} of {len(verdicts)} mistakes were noticed")
    if options.write is not None:
        options.write.write_text(page(verdicts, _today()))
    return 0 if killed == len(verdicts) else 1


def _today() -> str:
    """Return the commit, and the date of the run."""
    call = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    described = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"commit {described.stdout.strip() or 'unknown'}, run on {date.today()}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--package", help="mistakes of one file of tests/mutants")
    parser.add_argument(
        "--sample", type=int, help="number of mistakes, drawn by --seed; default: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree used in parallel")
    parser.add_argument("--write", type=Path, help="page for the score by package")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
