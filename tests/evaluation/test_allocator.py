"""What is freed while batches are read ahead is used again, and goes back to the system at the end."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from espalier.harness.paths import ROOT

#: Takes and frees 36 MB ten times, before, inside and behind; prints the page faults of each, and the megabytes kept.
FAULTS = """
import resource
from espalier.harness.evaluation.prefetch import read_ahead

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(36_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

outside, start = faults(), resident()
with read_ahead([1, 2], 1, lambda: lambda item, check: item):
    inside, held = faults(), resident()
print(outside, inside, faults(), held - start, resident() - start)
"""


def measured(**environment: str) -> list[float]:
    settings = ("MALLOC_", "GLIBC_TUNABLES")
    unset = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    output = subprocess.run(
        [sys.executable, "-c", FAULTS],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**unset, **environment},
    ).stdout
    return [float(word) for word in output.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_used_again_and_then_given_back() -> None:
    outside, inside, behind, held, left = measured()
    assert inside < 0.3 * outside
    assert behind > 0.5 * outside
    assert held > 30
    assert left < 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_the_environment_says_stands() -> None:
    outside, inside, *_ = measured(MALLOC_MMAP_THRESHOLD_="131072")
    assert inside > 0.5 * outside
