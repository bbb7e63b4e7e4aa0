"""Kill the writers of a sweep at random moments, then judge its store: `python -m tests.faults --kills 200`.

Four processes run one sweep of 20 cells over one store, two of them as if on another machine; one after the other is
killed (SIGKILL) at a random moment and begun again. When all kills are done the rest goes on undisturbed, and each
machine gives the command once more. Exit code 1 if anything is lost, torn, there twice or left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.runs.sweep_progress import progress_of
from tests.faults.judge import faults
from tests.faults.writers import Command, wait

MACHINES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fault test and print what happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    for name, value, what in (
        ("kills", 200, "how many"),
        ("cells", 20, "of the sweep, at most 20"),
        ("limit", 24, "samples of each cell"),
        ("writers", 4, "at once"),
        ("seed", 0, "of moments and orders"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} ({value})")
    parser.add_argument(
        "--life", type=float, default=1.2, help="mean seconds that a writer lives (1.2)"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        return _judge(options, Path(name))


def _judge(options: argparse.Namespace, folder: Path) -> int:
    store, reference, plain = folder / "store", folder / "reference", folder / "plain"
    plain.mkdir()
    command = Command(options.cells, options.limit, reference)
    start = time.monotonic()
    (code,) = wait([command.begin(reference, 9, plain, options.seed)])
    alone = time.monotonic() - start
    if code:
        print(f"the uninterrupted sweep failed: {(plain / 'log').read_text()[-2000:]}")
        return 1
    command.announce(store)
    start = time.monotonic()
    kills, begun = _kill(command, store, folder, options)
    # Each machine gives the same command once more: all rows are there, and what the dead left goes.
    codes = wait([command.begin(store, machine, folder, 0) for machine in range(MACHINES)])
    seconds = time.monotonic() - start
    log, acknowledged = folder / "log", (folder / "acknowledged").read_text().splitlines()
    wrong = [*faults(store, reference, command.keys, acknowledged)]
    wrong += [f"a writer failed:\n{log.read_text()[-2000:]}"] if any(codes) else []
    answers = options.cells * options.limit
    takes = len([*store.glob("runs/*/journal.take*.jsonl")])
    print(
        f"{kills} kills (SIGKILL) of {begun} writers, {options.writers} at once on {MACHINES} machines: "
        f"{options.cells} cells of {options.limit} samples in {seconds:.0f} s (undisturbed, one writer: {alone:.0f} s)"
    )
    print(
        f"acknowledged answers: {len(acknowledged)}, of {answers} samples; {takes} runs taken over from another machine"
    )
    print(*(f"WRONG: {line}" for line in wrong), sep="\n", end="\n" if wrong else "")
    missed = options.kills - kills
    if missed:
        print(f"WRONG: {missed} kills were left when the sweep was done; a larger --limit keeps it")
    else:
        print(
            "each cell has one whole row, as undisturbed; nothing lost, nothing left behind"
            * (not wrong)
        )
    return 1 if wrong or missed else 0


def _kill(
    command: Command, store: Path, folder: Path, options: argparse.Namespace
) -> tuple[int, int]:
    """Run the sweep under fire until it is done; return how many were killed, and how many begun."""
    chance, begun, kills = random.Random(options.seed), 0, 0
    living: dict[int, int] = {}
    for place in range(options.writers):
        living[command.begin(store, place % MACHINES, folder, begun)] = place
        begun += 1
    while living:
        # Kills are spread over nine tenths of the sweep, however fast this machine is.
        pause, start = chance.uniform(0, 2 * options.life / options.writers), time.monotonic()
        due = 0.9 * kills / options.kills
        while time.monotonic() - start < pause * (0.2 if _share(folder, options) >= due else 4.0):
            time.sleep(0.01)
        for pid in [pid for pid in living if os.waitpid(pid, os.WNOHANG)[0]]:
            del living[pid]  # all its cells have a row
        if kills < options.kills and living:
            pid = chance.choice([*living])
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            place = living.pop(pid)
            living[command.begin(store, place % MACHINES, folder, begun)] = place
            begun, kills = begun + 1, kills + 1
            # Whoever looks sees a store that makes sense, at any moment.
            assert len(progress_of(store, None).cells) <= len(command.keys)
    return kills, begun


def _share(folder: Path, options: argparse.Namespace) -> float:
    """Return the share of answers that are acknowledged."""
    acknowledged = folder / "acknowledged"
    lines = acknowledged.read_bytes().count(b"\n") if acknowledged.exists() else 0
    return lines / (options.cells * options.limit)


if __name__ == "__main__":
    sys.exit(main())
