"""Would the tests notice? `python -m tests.mutants` (`make mutants`) makes small mistakes on purpose and runs tests.

Each file beside this one lists the mistakes of a room: a line of code, what it becomes, and the tests that should see
it. A mistake is made in a copy of the tree; it is killed if those tests fail, and survives if they pass. The tests are
run once without it first, or a failure would mean nothing. `--sample N` takes N of all mistakes by a stated seed,
`--room NAME` those of one room, `--write lab/measured/mutants.md` leaves
the score by room. The exit code is 1 if one survives.
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
    """Return the score by room, and what survived, as Markdown; `when` says of which code."""
    lines = [
        "# Mistakes made on purpose",
        "",
        "Written by `make mutants`: each mistake changes behaviour; killed are those that the tests named beside it in"
        " [tests/mutants](../tests/mutants) notice. CONTRIBUTING.md says how to run them again.",
        "",
        f"Of {when}.",
        "",
        "| room | mistakes | killed | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    rooms = sorted({mutant.room for mutant, _ in verdicts})
    for room in [*rooms, None]:
        ours = [end for mutant, end in verdicts if room in (mutant.room, None)]
        killed = ours.count("killed")
        share = f"{100 * killed / len(ours):.0f} %"
        lines.append(f"| {room or 'all'} | {len(ours)} | {killed} | {share} |")
    alive = [f"- `{mutant.name}`" for mutant, end in verdicts if end == "survived"]
    return "\n".join([*lines, *(["", "Survived:", "", *alive] if alive else [])]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the mistakes asked for; return 1 if one survives, 2 if the tests fail without any."""
    options = _options(argv)
    mutants = [one for one in read_mutants() if options.room in (None, one.room)]
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
        ends = pool.map(lambda one: verdict(one, free), mutants)
        shown = track(ends, "mistakes", len(mutants), console=Console(stderr=True))
        verdicts = list(zip(mutants, shown, strict=True))
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
    found = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"commit {found.stdout.strip() or 'unknown'}, run on {date.today()}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--room", help="those of one file of tests/mutants")
    parser.add_argument("--sample", type=int, help="how many, drawn by --seed; all if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree worked on at once")
    parser.add_argument("--write", type=Path, help="page for the score by room")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
