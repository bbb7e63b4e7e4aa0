"""Runs cases in a worker that is ended when one of them hangs; prints what fails, and exits with its number."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.paths import ROOT
from tests.fuzz.case import CELLS, Case
from tests.fuzz.worker import cases


class Worker:
    """A process that carries out cases; a new one follows each that is ended."""

    def __init__(self, seed: int, store: Path) -> None:
        self._line = [sys.executable, "-m", "tests.fuzz.worker", str(seed), str(store)]
        self._process: subprocess.Popen[str] | None = None

    def outcome(self, number: int, seconds: float) -> list[str]:
        """Return what is wrong with a case."""
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
            self._process = subprocess.Popen(
                self._line,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            seconds += 60  # for its imports
        process = self._process
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            answered = bool(waiting.select(seconds))
        line = process.stdout.readline() if answered else ""
        if line:
            return json.loads(line)
        self.end()
        return ["the process died"] if answered else [f"no end within {seconds:.0f} s"]

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def reference(store: Path) -> None:
    """Fill a store with two finished runs."""
    line = [sys.executable, "run.py", "-m", "method=none,random", *CELLS, f"store={store}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(line, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def fuzz(
    seed: int, count: int | None, kinds: Sequence[str] = ("",), verbose: bool = False
) -> list[str]:
    """Carry out the first cases of a seed and return a line for each that fails."""
    drawn: list[tuple[int, Case]] = [
        (number, case)
        for number, case in enumerate(cases(seed))
        if case.kind.startswith(tuple(kinds))
    ][:count]
    failures, done, start = [], Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz_store_") as folder:
        store = Path(folder)
        reference(store)
        worker = Worker(seed, store)
        try:
            for number, case in drawn:
                began = time.monotonic()
                wrong = worker.outcome(number, case.seconds)
                done[case.kind.partition(":")[0]] += 1
                failures += [
                    f"{number} {case.kind}: {case.line}\n    {failure}" for failure in wrong[:1]
                ]
                if verbose or wrong:
                    spent = time.monotonic() - began
                    print(
                        f"{'FAIL' if wrong else 'ok'} {number} {spent:.1f}s {case.kind}: {case.line}"
                    )
                    print(*(f"    {failure}" for failure in wrong), sep="\n", flush=True)
        finally:
            worker.end()
    kinds = ", ".join(f"{name} {number}" for name, number in sorted(done.items()))
    print(
        f"{len(drawn)} cases, {len(failures)} fail; {kinds}; {time.monotonic() - start:.0f} s, seed {seed}"
    )
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Return the number of cases that fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="the first so many (default: all)")
    parser.add_argument("--kind", nargs="+", default=[""], help="cases of kinds that begin so")
    parser.add_argument("--verbose", action="store_true", help="name those that pass, too")
    options = parser.parse_args(argv)
    return len(fuzz(options.seed, options.cases, options.kind, options.verbose))


if __name__ == "__main__":
    sys.exit(min(main(), 125))
