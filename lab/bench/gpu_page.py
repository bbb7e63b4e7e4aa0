"""Output of the GPU benchmark: one result for all parts, as JSON and as a page."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from espalier.harness.runs.environment import commit
from lab.bench.bench_page import conditions, leave
from lab.bench.bench_setup import Figure, table_lines
from lab.bench.gpu_setup import Note

SCHEMA = 1

#: Figures may share a page if these conditions agree.
SAME = ("device", "device_name", "devices", "driver", "cuda", "torch", "transformers", "commit")


@dataclass(frozen=True)
class PartOutcome:
    """The result of one part.

    Attributes:
        figures: the figures, in order.
        notes: omissions and failures.
        seconds: duration.
    """

    figures: tuple[Figure, ...]
    notes: tuple[Note, ...]
    seconds: float

    def remarks(self) -> list[str]:
        """Return everything except the figures."""
        return [f"{'Failed: ' if note.failed else ''}{note.text}" for note in self.notes]

    def entry(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "figures": [figure.entry() for figure in self.figures],
            "notes": [asdict(note) for note in self.notes],
            "seconds": self.seconds,
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> PartOutcome:
        """Rebuild from the JSON form."""
        figures = tuple(Figure.from_entry(figure) for figure in entry["figures"])
        return cls(figures, tuple(Note(**note) for note in entry["notes"]), entry["seconds"])


def surroundings(device: str) -> dict[str, Any]:
    """Return the conditions that figures depend on, and the code's commit."""
    on_gpu = device.startswith("cuda")
    return {
        **conditions(device),
        "devices": torch.cuda.device_count() if on_gpu else 0,
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30
        if on_gpu
        else None,
        "driver": driver() if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "commit": commit(),
    }


def driver() -> str | None:
    """Return the version of the GPU's driver; None if its tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def result_of(
    outcomes: Mapping[str, PartOutcome], counts: Mapping[str, str], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of all parts so far."""
    return {
        "schema": SCHEMA,
        "parts": {name: outcome.entry() for name, outcome in outcomes.items()},
        "plan": dict(counts),
        "conditions": dict(machine),
    }


def earlier(folder: Path, machine: Mapping[str, Any]) -> dict[str, PartOutcome]:
    """Return the parts in a folder that were measured under the same conditions.

    A file in another format gives none.
    """
    try:
        result = json.loads((folder / "bench_gpu.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        return {}
    if any(result["conditions"].get(name) != machine[name] for name in SAME):
        return {}
    return {name: PartOutcome.from_entry(entry) for name, entry in result["parts"].items()}


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Leave the figures as JSON and as a page, each atomically."""
    leave(folder, "bench_gpu", "\n".join(page_lines(result)), result)


def page_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the page: machine, repetitions, then all parts."""
    machine = result["conditions"]
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']:.0f} GiB"
    lines = [
        "# On a GPU",
        "",
        f"Written by `make bench-gpu` on {machine['device_name']}{memory} ({machine['devices']} such devices seen), "
        f"driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, commit {machine['commit']}. Large models have random weights at their real "
        "widths and depth. Brackets hold 95 % intervals of speed-ups and quartiles of everything else.",
        "",
        *(f"- {name}: {count}" for name, count in result["plan"].items()),
    ]
    for name, entry in result["parts"].items():
        outcome = PartOutcome.from_entry(entry)
        lines += ["", f"## {name}", "", f"{outcome.seconds:.0f} s.", ""]
        lines += [
            *(f"- {remark}" for remark in outcome.remarks()),
            *([""] if outcome.remarks() else []),
        ]
        lines += table_lines(outcome.figures) if outcome.figures else []
    return lines
