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
        path = own_file(frame)
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


def own_file(frame: FrameType) -> str | None:
    """Return a frame's file below the repository, links resolved; None for library code."""
    name = frame.f_code.co_filename
    if not name.startswith(f"{ROOT}/") or "site-packages" in name:
        return None
    return name.removeprefix(f"{ROOT}/").removeprefix("espalier/")


def stack(frame: FrameType) -> list[str]:
    """Return the own frames below a frame, the outermost first."""
    frames = []
    current: FrameType | None = frame
    while current is not None:
        path = own_file(current)
        if path is not None and not path.startswith("lab/house/"):
            frames.append(f"{path}:{current.f_code.co_qualname}")
        current = current.f_back
    return frames[::-1]


def measure(arguments: Sequence[str] = ARGUMENTS) -> dict[str, object]:
    """Run and return the figures.

    Raises:
        RuntimeError: the run fails.
    """
    from espalier.harness.cli import run

    trace = CallTrace()
    with tempfile.TemporaryDirectory() as store:
        threading.setprofile(trace.hook)
        sys.setprofile(trace.hook)
        try:
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
    return {
        "files_entered": len(trace.files),
        "files_imported": sum("/lab/house/" not in path for path in imported),
        "frames_at_plan": len(trace.plan_stack),
        "files_at_plan": len({frame.partition(":")[0] for frame in trace.plan_stack}),
        "changes_of_file_before_a_run": trace.changes,
        "plan_stack": trace.plan_stack,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:] or ARGUMENTS), indent=1))
