"""The path of one run through the code: `python -m lab.house.run_path [run.py arguments]`.

A FastV run on 8 samples is traced call by call: files entered and imported, own frames on the stack when `plan` is
called, and how often control changes file inside config/ and admission (a stand-in for the path of the command line).
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = (
    "method=fastv",
    "ratio=0.9",
    "limit=8",
    "engine.paired=0",
    "engine.warmup=0",
    "json=false",
)


class CallTrace:
    """Calls in this repository's files, recorded by a profile hook."""

    def __init__(self) -> None:
        """Start with empty records."""
        self.files: set[str] = set()
        self.changes = 0
        self.plan_stack: list[str] = []
        self._last = ""

    def hook(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call."""
        path = own_file(frame.f_code.co_filename)
        if event != "call" or path is None or frame.f_code.co_name == "<module>":
            return
        self.files.add(path)
        config = path.startswith(
            (
                "harness/config/",
                "harness/kinds/signal_check",
                "harness/kinds/checkpoint_check",
                "harness/runs/admission",
            )
        )
        if config and path != self._last:
            self.changes += 1
        self._last = path
        if path.startswith("methods/") and frame.f_code.co_name == "plan" and not self.plan_stack:
            self.plan_stack = stack(frame)


@cache
def own_file(name: str) -> str | None:
    """Return a file's path below the repository, links resolved; None for library code."""
    if not name.startswith(f"{ROOT}/") or "site-packages" in name:
        return None
    return name.removeprefix(f"{ROOT}/").removeprefix("espalier/")


def stack(frame: FrameType) -> list[str]:
    """Return the own frames below a frame, the outermost first."""
    frames = []
    current: FrameType | None = frame
    while current is not None:
        path = own_file(current.f_code.co_filename)
        if path is not None and not path.startswith("lab/house/"):
            frames.append(f"{path}:{current.f_code.co_qualname}")
        current = current.f_back
    return frames[::-1]


def measure(arguments: Sequence[str] = ARGUMENTS) -> tuple[dict[str, float], list[str]]:
    """Run and return the figures, and the own frames at `plan`. The run prints on standard error.

    Raises:
        RuntimeError: the run fails.
    """
    from espalier.harness.cli import run

    trace = CallTrace()
    with tempfile.TemporaryDirectory() as store:
        threading.setprofile(trace.hook)
        sys.setprofile(trace.hook)
        try:
            with redirect_stdout(sys.stderr):
                code = run.main([*arguments, f"store={store}"])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if code:
        raise RuntimeError(f"the run ends with {code}")
    paths = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    imported = {
        path for path in paths if path.startswith(f"{ROOT}/") and "site-packages" not in path
    }
    figures: dict[str, float] = {
        "files_entered": len(trace.files),
        "files_imported": sum("/lab/house/" not in path for path in imported),
        "own_frames_at_plan": len(trace.plan_stack),
        "files_at_plan": len({frame.partition(":")[0] for frame in trace.plan_stack}),
        "changes_of_file_before_a_run": trace.changes,
    }
    return figures, trace.plan_stack


if __name__ == "__main__":
    counts, frames = measure(sys.argv[1:] or ARGUMENTS)
    print(json.dumps(counts | {"plan_stack": frames}, indent=1))
