"""How long the status of a store takes: `python -m lab.bench.sweep_status [--runs 10000]`.

Makes a store of so many finished runs, each with a row of the size of a real one, and one sweep of all of
them; then times `python -m espalier sweep status` as a user starts it: without an index, with one, and with one that is
stale for a hundredth of the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.paths import ROOT
from espalier.harness.store import SCHEMA
from espalier.harness.store.sweep_files import SweepCell, announce

#: Bytes of a row of the embedded model.
ROW = 6400


def main(argv: Sequence[str] | None = None) -> int:
    """Print the times in seconds."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench.sweep_status", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="finished runs (10000)")
    runs = parser.parse_args(argv).runs
    with tempfile.TemporaryDirectory(prefix="status-") as name:
        store = Path(name)
        keys = [f"{number:016x}" for number in range(runs)]
        for number, key in enumerate(keys):
            _write(store / "runs" / key, number)
        line = ("method=fastv",)
        cells = [SweepCell(key, "m", "fastv", "b", 0.5, "", 100, line) for key in keys]
        announce(store, ("-m", "method=fastv"), cells)
        print(f"{runs} runs, no index yet: {_status(store):.2f} s")
        print(f"{runs} runs, index of all: {min(_status(store) for _ in range(3)):.2f} s")
        for key in keys[:: max(runs // 100, 1)]:
            os.utime(store / "runs" / key / "row.json")
        print(f"{runs} runs, index stale for {runs // 100}: {_status(store):.2f} s")
    return 0


def _write(folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    row = {
        **{"schema": SCHEMA, "run_key": folder.name, "model": "m", "method": "fastv"},
        **{"benchmark": "b", "ratio": 0.5, "n_samples": 100},
        "metrics": {"acc": {"value": number / 1e5, "stderr": 0.01}},
        "extra": {"headline": "acc", "label": ""},
    }
    row["extra"] = {**row["extra"], "settings": "x" * (ROW - len(json.dumps(row)))}  # type: ignore[dict-item]
    (folder / "row.json").write_text(json.dumps(row, indent=1), encoding="utf-8")


def _status(store: Path) -> float:
    command = [sys.executable, "-m", "espalier", "sweep", "status", "--store", str(store)]
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", check=True
    )
    taken = time.monotonic() - start
    assert f"{len(list((store / 'runs').iterdir()))} done" in done.stdout
    return taken


if __name__ == "__main__":
    sys.exit(main())
