"""How a command's process starts and ends: the collector rests, and nothing is freed after the last hook."""

from __future__ import annotations

import gc
import subprocess
import sys

from espalier.harness.specs.commands import RARE, collect_again, resting_collector

PROGRAM = """
import atexit, sys, threading, time
from espalier.harness.specs.commands import run_process

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()

def later():
    time.sleep(0.2)
    print("thread")

def main():
    atexit.register(print, "hook")
    threading.Thread(target=later).start()
    print("x" * 100_000)
    {end}

sys.exit(run_process(main))
"""


def run(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def test_a_process_ends_after_its_threads_and_hooks() -> None:
    result = run("return 3")
    assert (result.returncode, result.stderr) == (3, "")
    assert result.stdout.split() == ["x" * 100_000, "thread", "hook"]


def test_an_error_ends_a_process_as_ever() -> None:
    result = run("raise ValueError('no')")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ValueError: no"
    assert result.stdout.split()[1:] == ["thread", "hook", "freed"]


def test_the_collector_rests_until_the_work_begins() -> None:
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    with resting_collector():
        assert gc.get_threshold() == RARE
        collect_again()
        assert gc.get_threshold() == usual
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0


def test_a_collector_that_does_not_rest_is_left_alone() -> None:
    state = gc.get_threshold(), gc.get_freeze_count()
    collect_again()
    assert (gc.get_threshold(), gc.get_freeze_count()) == state
