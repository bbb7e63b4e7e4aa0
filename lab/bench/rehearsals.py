"""Rehearse every published model and every preset on the fewest 80 GiB cards: `make rehearsals`.

One line a run is added to conf/rehearsals.csv; a run that has a line is not rehearsed again.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.cost.rehearsed import REHEARSALS, VIDEOS
from espalier.harness.errors import UserError
from espalier.harness.models.families import ADAPTERS
from espalier.harness.paths import CONF
from espalier.harness.specs.commands import command
from espalier.harness.tools.rehearsal.real_sizes import RealSizes
from espalier.harness.tools.rehearsal.rehearse import GIB, Rehearsal, read_cards, rehearse_run
from espalier.methods.base import MethodError

#: Numbers of cards that are tried, the fewest first.
CARDS = (1, 2, 4, 8)

HEAD = (
    *("model", "method", "compressor", "benchmark", "outcome", "cards", "visual", "kept"),
    *("weights", "peak", "rows", "frames", "kernels", "reads", "uploads", "tflops", "seconds"),
    "clip",
)
NAMES = HEAD[:4]


def cells() -> Iterator[Mapping[str, Any]]:
    """Yield a cell of each model, one with a video if it takes any, and of each model and method of a preset."""
    models = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    every = f"model={','.join(models)}"
    lines = [[every, "method=none"], [every, "method=none", f"benchmark={VIDEOS}"]]
    lines += [[f"+experiment={path.stem}"] for path in sorted((CONF / "experiment").glob("*"))]
    names_so_far = set()
    for line in lines:
        for cell in read_command(["-m", *line]).cells:
            names, model = names_of(cell), cell["model"]
            key = names if VIDEOS in line[-1] else names[:3]
            if key in names_so_far or not (model["hub"] and model["architecture"]):
                continue
            if VIDEOS in line[-1] and not ADAPTERS.load(model["adapter"]).data.takes_video:
                continue
            names_so_far.add(key)
            yield cell


def names_of(cell: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the first columns of a cell's line."""
    return tuple(str(cell[part]["name"]) for part in NAMES)


def rehearsed(cell: Mapping[str, Any]) -> list[object]:
    """Return the outcome of a cell on the fewest cards, and what it took."""
    start, outcome = perf_counter(), ""
    for count in CARDS:
        number, kind = read_cards(f"{count}xH100")
        try:
            with RealSizes(number, kind) as cards:
                model = {**cell["model"], **({"device_map": "auto"} if count > 1 else {})}
                rehearsal = rehearse_run(build_spec({**cell, "model": model}), cards)
        except UserError as error:
            outcome = f"refused: {error}"
            if "do not fit" in outcome:
                continue
            break
        except (RuntimeError, MethodError, ValueError, TypeError, LookupError) as error:
            outcome = f"crash: {type(error).__name__} {error}"
            break
        clip = rehearsal.video_frames
        seconds = f"{perf_counter() - start:.0f}"
        return ["runs", count, *_figures(rehearsal), seconds, "" if clip is None else clip]
    return [" ".join(outcome.split())[:300]]


def _figures(rehearsal: Rehearsal) -> list[object]:
    record, prompt = rehearsal.record, rehearsal.prompt
    sizes = (max(getattr(card, name) for card in rehearsal.cards) for name in ("weights", "peak"))
    return [
        record.visual,
        record.kept[-1] if record.kept else record.visual,
        *(f"{size / GIB:.2f}" for size in sizes),
        *("" if number is None else number for number in (rehearsal.batch, rehearsal.frames)),
        *(f"{number:.0f}" for number in (prompt.kernels, prompt.reads, prompt.uploads)),
        f"{prompt.flops / 1e12:.1f}",
    ]


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Add the lines that are missing; return 1 if a run crashes."""
    lines = list(csv.reader(REHEARSALS.open())) if REHEARSALS.exists() else []
    present = {tuple(line[: len(NAMES)]) for line in lines}
    with REHEARSALS.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if not lines:
            table.writerow(HEAD)
        for cell in cells():
            if names_of(cell) in present:
                continue
            print(f"rehearsing {', '.join(names_of(cell))}", file=sys.stderr, flush=True)
            table.writerow([*names_of(cell), *rehearsed(cell)])
            file.flush()
    return int("crash: " in REHEARSALS.read_text())


if __name__ == "__main__":
    sys.exit(main())
