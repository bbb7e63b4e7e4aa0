"""The recipes of CONTRIBUTING.md and docs/recipes, followed to the letter: `python -m tests.pages.recipes`.

A step is a comment that says what is done with the block of code below it: `write <file>`, `insert <file> below <start
of a line>`, `run` for commands, and `see` for lines that the commands before must have printed. The rest is for people.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from espalier.harness.paths import ROOT

STEP = re.compile(r"<!-- recipe: (\w+)(?: ([^\n]+))? -->\n```\w+\n(.*?)```", re.DOTALL)

#: Tests that list methods, decoders, benchmarks and models: what a recipe adds changes some of them.
CONCERNED = (
    *(
        "tests/models/test_facts_confirmed.py",
        "tests/models/test_prompts.py",
        "tests/admission",
    ),
    *("tests/api/test_wrap.py", "tests/config", "tests/decoding/test_speculation.py"),
    *("tests/decoding/test_text_only.py", "tests/kinds", "tests/methods/test_all.py"),
    *("tests/methods/test_compressors.py", "tests/methods/test_decoders.py"),
    *("tests/methods/test_matrix.py", "tests/methods/test_registry.py"),
    *(
        "tests/methods/test_signals.py",
        "tests/mutants",
        "tests/pages",
        "tests/runs/test_input.py",
        "tests/runs/test_keys_walk.py",
    ),
    *("tests/tasks", "tests/benchmarks/test_benchmarks_run.py"),
)

#: What is checked at the end with `--part`.
PART = "make docs && make -j 2 lint types layers && make test ARGS=@concerned.txt"

#: A step that PART does once, after the last recipe.
DOCS = "make docs\n"

#: What may be done with a block.
ACTIONS = ("write", "insert", "run", "see")


@dataclass(frozen=True)
class Step:
    """One step of a recipe: what is done, to what, with which block."""

    action: str
    where: str
    block: str


def pages(root: Path) -> list[Path]:
    """The pages with recipes of a checkout."""
    return [root / "CONTRIBUTING.md", *sorted((root / "docs" / "recipes").glob("*.md"))]


def steps_of(page: Path) -> list[Step]:
    """The steps of a page, in order."""
    steps = [
        Step(*match.groups(default="")) for match in STEP.finditer(page.read_text(encoding="utf-8"))
    ]
    unknown = {step.action for step in steps} - set(ACTIONS)
    assert not unknown, f"{page.name}: {unknown}; valid: {', '.join(ACTIONS)}"
    return steps


def environment() -> dict[str, str]:
    """The variables of a command: make takes the environment that runs this, instead of building one.

    What make, pytest or git told their own children is left out.
    """
    inherited = ("MAKE", "MFLAGS", "PYTEST_", "GIT_", "ARGS", "SLOW_PART")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(inherited)}
    return {
        **variables,
        "VENV": sys.prefix,
        "TOKENIZERS_PARALLELISM": "false",
        "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache"),  # most files of the clone were checked here
    }


def follow(steps: Sequence[Step], root: Path) -> str:
    """Do the steps in a checkout and return what the last commands printed."""
    printed = ""
    for step in steps:
        if step.action == "write":
            file = root / step.where
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.block)
        elif step.action == "insert":
            insert(root, *step.where.split(" below "), step.block)
        elif step.action == "run":
            printed = run(step.block, root)
        else:
            missing = [line for line in step.block.splitlines() if not shows(printed, line)]
            assert not missing, f"not printed: {missing}\n{printed}"
    return printed


def insert(root: Path, name: str, start: str, block: str) -> None:
    """Put a block below the one line of a file that begins so, unless it stands there already."""
    lines = (root / name).read_text().splitlines(keepends=True)
    (place,) = [number for number, line in enumerate(lines) if line.startswith(start)]
    if block not in "".join(lines):
        lines.insert(place + 1, block)
    (root / name).write_text("".join(lines))


def run(commands: str, root: Path) -> str:
    """Run commands as they stand, and return all that they printed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=root,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


def shows(printed: str, line: str) -> bool:
    """Whether a printed line holds these words one behind another, however far apart columns stand."""
    words = r"\s+".join(map(re.escape, line.split()))
    return re.search(rf"(?<!\S){words}(?!\S)", printed) is not None


def concerned(root: Path, names: Collection[str]) -> list[str]:
    """Return the instances of CONCERNED that have an added name, and all tests that have no instances."""
    options = ["--collect-only", "-q", "--no-header", *CONCERNED]
    listing = run(shlex.join([sys.executable, "-m", "pytest", *options]), root)
    tests = [line for line in listing.splitlines() if "::" in line]
    return [test for test in tests if "[" not in test or any(name in test for name in names)]


def main(argv: Sequence[str] | None = None) -> int:
    """Follow all recipes in a clone of the last commit, then check it."""
    parser = argparse.ArgumentParser(prog="python -m tests.pages.recipes", description=__doc__)
    parser.add_argument("--check", default="make docs check", help="what must be green at the end")
    parser.add_argument(
        "--part",
        action="store_const",
        dest="check",
        const=PART,
        help="at the end only the tests that see what was added",
    )
    parser.add_argument("--only", default="", help="comma-separated names of pages, such as kind")
    options = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        root = Path(folder) / "espalier"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
        chosen = options.only.split(",") if options.only else [page.stem for page in pages(root)]
        added = set()
        for page in (page for page in pages(root) if page.stem in chosen):
            print(f"== {page.relative_to(root)}", flush=True)
            steps = steps_of(page)
            if options.check == PART:
                steps = [step for step in steps if step.block != DOCS]
            print(follow(steps, root)[-2000:], flush=True)
            added |= {Path(step.where).stem for step in steps if step.action == "write"}
        if options.check == PART:
            (root / "concerned.txt").write_text("\n".join(concerned(root, added)))
        print(f"== {options.check}", flush=True)
        return subprocess.run(
            options.check, shell=True, cwd=root, env=environment(), check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
