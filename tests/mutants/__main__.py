"""Would the tests notice? `python -m tests.mutants` (`make mutants`) makes small mistakes on purpose and runs tests.

Each file beside this one lists the mistakes of a room: a line of code, what it becomes, and the tests that should see
it. A mistake is made in a copy of the tree; it is killed if those tests fail, and survives if they pass. The tests are
run once without it first, or a failure would mean nothing. `--sample N` takes N of all mistakes by a stated seed,
`--room NAME` those of one room, `--write docs/mutants.md` leaves the score by room. The exit code is 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Literal

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent

#: What of the tree is not copied.
LEFT_OUT = (
    ".git",
    ".venv",
    "results",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    "__pycache__",
)

#: Seconds after which tests that hang count as having noticed.
PATIENCE = 300

Verdict = Literal["killed", "survived"]


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old`, which stands in `file` exactly once, becomes `new`; `tests` should notice."""

    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file and the first line of what it becomes."""
        return f"{self.file}: {self.new.strip().splitlines()[0] if self.new.strip() else 'removed'}"


def read_mutants(folder: Path = HERE, tree: Path = ROOT) -> list[Mutant]:
    """Return the mistakes of every room.

    Raises:
        SystemExit: a line of code is gone, or there twice: the list is older than the code.
    """
    found, stale = [], []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            tests = tuple(entry["tests"].split())
            mutant = Mutant(path.stem, entry["file"], entry["old"], entry["new"], tests)
            count = (tree / mutant.file).read_text().count(mutant.old)
            if count != 1 or mutant.old == mutant.new:
                stale.append(f"{path.name}: {mutant.file} has {count} of {mutant.old!r}")
            missing = [test for test in tests if not (tree / test.partition("::")[0]).is_file()]
            stale += [f"{path.name}: no file {test}" for test in missing]
            found.append(mutant)
    if stale:
        raise SystemExit("\n".join(stale))
    return found


@contextmanager
def copies(count: int) -> Iterator[Queue[Path]]:
    """Yield so many copies of the tree to make mistakes in; they go when the block ends."""
    with tempfile.TemporaryDirectory() as name:
        free: Queue[Path] = Queue()
        for number in range(count):
            tree = Path(name) / str(number)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
            free.put(tree)
        yield free


def passes(tree: Path, tests: Sequence[str]) -> bool:
    """Run tests in a tree and say whether all pass; a run that hangs does not."""
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    call = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            call, cwd=tree, env=env, capture_output=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def verdict(mutant: Mutant, free: Queue[Path]) -> Verdict:
    """Make one mistake in a free copy, run its tests there, and put the copy right again."""
    tree = free.get()
    path = tree / mutant.file
    text = path.read_text()
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        return "survived" if passes(tree, mutant.tests) else "killed"
    finally:
        path.write_text(text)
        free.put(tree)


def page(verdicts: Sequence[tuple[Mutant, Verdict]]) -> str:
    """Return the score by room, and what survived, as Markdown."""
    lines = [
        "# Mistakes made on purpose",
        "",
        "Written by `make mutants`: each mistake changes behaviour; killed are those that the tests named beside it in"
        " [tests/mutants](../tests/mutants) notice.",
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
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with copies(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:
        tree = free.get()
        if not passes(tree, tests):
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
        options.write.write_text(page(verdicts))
    return 0 if killed == len(verdicts) else 1


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
