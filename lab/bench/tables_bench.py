"""Time and peak memory of reading a store of synthetic rows: `python -m lab.bench.tables_bench`.

Three readers: all published tables rebuilt in all formats, `results.load`, and the report page. Each reads twice, in a
new process each time: first the files, building the index of the store, then the index. Rows repeat those of the
tables' runs and are as large as stored ones. Seconds are processor time and wall time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.paths import ROOT
from espalier.harness.reports.tables.cell_runs import CellRun, choice, method_of, runs_of
from espalier.harness.reports.tables.cell_settings import compared_settings
from espalier.harness.reports.tables.published_tables import read_paper
from espalier.harness.reports.tables.rebuild import rebuild, requested_tables
from espalier.harness.reports.tables.table_formats import FORMATS
from espalier.harness.store.exports import dated_rows
from espalier.harness.store.index import NAME as INDEX

#: Rows that provide the blocks of the synthetic ones.
TEMPLATES = ROOT / "results" / "demo"


def rows() -> Iterator[dict[str, Any]]:
    """Yield rows of the tables' runs repeatedly, with the blocks of stored rows."""
    _, stored = dated_rows(TEMPLATES)[0]
    runs = [
        run
        for slug, number in requested_tables("all", [])
        for run in runs_of(read_paper(slug), number)
    ]
    for number, run in enumerate(cycle(runs)):
        name, variant, params = method_of(CellRun(run, "", 1.0))
        metric = choice("benchmark", run["benchmark"])["headline"]
        settings, extra = stored["settings"], stored["extra"]
        # Numbers that are unique to each row of a store.
        value = random.random()
        times = {name: random.random() for name in stored["time"]}
        yield {
            **stored,
            "run_key": f"{number:016x}",
            "model": run["model"],
            "method": name,
            "variant": variant,
            "benchmark": run["benchmark"],
            "ratio": float(run["ratio"]),
            "budget_rule": run["budget"],
            "seed": number // len(runs),
            "metrics": {metric: {"value": value, "stderr": value / 50}},
            "time": times,
            "memory": {**stored["memory"], "peak_bytes": random.getrandbits(33)},
            "extra": {
                **extra,
                "headline": metric,
                "samples_per_second": random.random(),
                "time_iqr": {name: [time, time + 1] for name, time in times.items()},
                "answers": {
                    "number": stored["n_samples"],
                    "sha256": f"{random.getrandbits(256):064x}",
                },
            },
            "settings": {
                **settings,
                **_compared(run),
                "method": {"params": dict(params)},
            },
        }


def _compared(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of a run that tables compare, by section."""
    sections: dict[str, dict[str, Any]] = {"benchmark": {"limit": None}}
    for key, value in compared_settings(CellRun(run, "", 1.0)).values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def tables(folder: Path) -> int:
    """Rebuild all tables from a store in every format; return their number."""
    rebuilt, _ = rebuild(requested_tables("all", []), [folder])
    for table in rebuilt:
        for text in FORMATS.values():
            text(table)
    return len(rebuilt)


def load(folder: Path) -> int:
    """Load a store with `results.load`; return its number of lines."""
    # Imported here: the tables need neither pandas nor torch, which is half of this reader's memory.
    from espalier.harness.reports import results

    return len(results.load(folder))


def page(folder: Path) -> int:
    """Write the report page of a store, without pictures of kept tokens; return its bytes."""
    from espalier.harness.reports.html.page import assemble, collect

    return len(assemble(collect([folder], "original")).encode())


READERS: dict[str, Callable[[Path], int]] = {"tables": tables, "load": load, "page": page}


def measure(reader: str, folder: Path) -> dict[str, Any]:
    """Return a reader's result, its seconds, and the peak memory of this process in MiB."""
    indexed = (folder / INDEX).exists()
    clock, processor = time.perf_counter(), time.process_time()
    result = READERS[reader](folder)
    return {
        "reader": reader,
        "index": "there" if indexed else "made",
        "given": result,
        "processor_s": round(time.process_time() - processor, 2),
        "clock_s": round(time.perf_counter() - clock, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line for each reader."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench.tables_bench", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the store")
    parser.add_argument(
        "--reader", choices=sorted(READERS), help="run only this reader, on --store"
    )
    parser.add_argument("--store", type=Path, help="an existing store")
    options = parser.parse_args(argv)
    if options.reader is not None and options.store is not None:
        print(json.dumps(measure(options.reader, options.store)))
        return 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        for row in islice(rows(), options.rows):
            path = folder / "runs" / row["run_key"]
            path.mkdir(parents=True)
            (path / "row.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
        command = [sys.executable, "-m", "lab.bench.tables_bench", "--store", name, "--reader"]
        for reader in READERS:
            (folder / INDEX).unlink(missing_ok=True)
            for _ in ("cold", "warm"):
                # A separate process, for its own peak memory and without earlier reads.
                subprocess.run([*command, reader], check=True, cwd=ROOT, stdin=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
