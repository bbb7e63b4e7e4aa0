"""`python -m harness.bench.tables`: all published tables from a store of synthetic rows: seconds, and peak memory."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.tables.__main__ import asked, rebuild
from harness.tables.formats import FORMATS
from harness.tables.presets import runs_of
from harness.tables.published import read_paper
from harness.tables.wanted import Wanted, method_of

#: Letters that fill a row up to the size of a stored one.
FILLING = 3500


def rows() -> Iterator[dict[str, Any]]:
    """Yield rows of the tables' runs, over and over, as large as stored ones."""
    runs = [run for slug, number in asked("all", []) for run in runs_of(read_paper(slug), number)]
    for number, run in enumerate(cycle(runs)):
        name, variant, params = method_of(Wanted(run, "", 1.0))
        yield {
            "schema": 1,
            "run_key": f"{number:016x}",
            "model": run["model"],
            "method": name,
            "variant": variant,
            "benchmark": run["benchmark"],
            "ratio": float(run["ratio"]),
            "budget_rule": run["budget"],
            "seed": number // len(runs),
            "n_samples": 1000,
            "metrics": {"exact_match": {"value": 0.5, "stderr": 0.01}},
            "tokens": {},
            "flops": {},
            "time": {"prefill_ms": 1.0},
            "memory": {},
            "settings": {
                "model": {"weights": "trained"},
                "method": {"params": dict(params)},
                "draft": None,
                "benchmark": {"limit": None},
                "engine": {"positions": "original"},
            },
            "extra": {"environment": {"commit": "synthetic"}, "prompt": "x" * FILLING},
        }


def measure(count: int, folder: Path) -> dict[str, float]:
    """Write a store of `count` rows and return the seconds of rebuilding all tables in all formats, and peak memory."""
    for row in islice(rows(), count):
        path = folder / "runs" / row["run_key"]
        path.mkdir(parents=True)
        (path / "row.json").write_text(json.dumps(row))
    begin = time.perf_counter()
    tables, _ = rebuild(asked("all", []), [folder])
    read = time.perf_counter()
    size = sum(len(write(table)) for table in tables for write in FORMATS.values())
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rows": count,
        "tables": len(tables),
        "reading_s": read - begin,
        "writing_s": end - read,
        "megabytes": size / 1e6,
        "peak_mib": peak,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the measurement as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench.tables", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of the store")
    options = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        print(json.dumps(measure(options.rows, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
