"""Times exports (`python -m lab.bench.export_bench`): from scratch, unchanged, and after a few new rows.

Rows are the synthetic ones of `lab.bench.tables_bench`, each with a journal of answers and their scores.
Every export runs in its own process; the last one starts from scratch again and must write the same files as the one
before. Seconds are processor time and wall time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.paths import ROOT
from espalier.harness.store.parquet_tables import write_tables
from lab.bench.tables_bench import rows

#: Lengths of a question and an answer of a caption benchmark.
ASKED, ANSWER = "What is shown in this picture? " * 3, "a short answer of several words " * 4


def fill(store: Path, result_rows: Iterable[Mapping[str, Any]], samples: int) -> None:
    """Write rows as finished runs, each with a journal of this many answers and scores."""
    for row in result_rows:
        folder = store / "runs" / row["run_key"]
        folder.mkdir(parents=True)
        (metric,) = row["metrics"]
        answers = [
            {"task": "t", "doc_id": number, "asked": ASKED, "answer": f"{ANSWER}{random.random()}"}
            for number in range(samples)
        ]
        scores = [
            {"task": "t", "doc_id": number, "scores": {metric: float(random.getrandbits(1))}}
            for number in range(samples)
        ]
        lines = "".join(f"{json.dumps(entry)}\n" for entry in (*answers, *scores))
        (folder / "journal.jsonl").write_text(lines, encoding="utf-8")
        (folder / "row.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def measure(name: str, store: Path, folder: Path) -> dict[str, Any]:
    """Export a store; return the result and the time in seconds."""
    clock, processor = time.perf_counter(), time.process_time()
    written = write_tables(store, folder)
    return {
        "export": name,
        **written._asdict(),
        "processor_s": round(time.process_time() - processor, 2),
        "clock_s": round(time.perf_counter() - clock, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line for each export; return 1 if tables differ from those written from scratch."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench.export_bench", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000, help="rows of the store")
    parser.add_argument("--new", type=int, default=10, help="rows added later")
    parser.add_argument("--samples", type=int, default=100, help="samples per row")
    parser.add_argument(
        "--one", nargs=3, metavar=("NAME", "STORE", "FOLDER"), help="export this store"
    )
    options = parser.parse_args(argv)
    if options.one is not None:
        name, *places = options.one
        print(json.dumps(measure(name, *map(Path, places))))
        return 0
    with TemporaryDirectory() as name:
        store, folder, full = (Path(name) / part for part in ("store", "tables", "full"))

        def export(label: str, where: Path) -> None:
            command = [sys.executable, "-m", "lab.bench.export_bench", "--one", label]
            # A separate process, so nothing has been read before.
            subprocess.run([*command, str(store), str(where)], check=True, cwd=ROOT)

        new_rows = rows()
        fill(store, islice(new_rows, options.rows), options.samples)
        export("from nothing", folder)
        export("again", folder)
        fill(store, islice(new_rows, options.new), options.samples)
        export(f"behind {options.new} new rows", folder)
        export("from nothing", full)
        equal = all(
            file.read_bytes() == (full / file.name).read_bytes()
            for file in sorted(folder.iterdir())
        )
    print("the same files" if equal else "the files differ")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
