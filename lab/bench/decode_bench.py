"""Benchmark of plain decoding with two loops: `python -m lab.bench.decode_bench` (`make bench-decode`).

Compares the engine's loop with the library's `generate`, in turns in one process, on caches of 144, 2,880 and 16,384
tokens of random content, with one row and with four rows (one padded). The library runs with its own cache, which is
concatenated at every step, and with the engine's, which is written by index. All answers have the same length; times
include the preparation of each loop and the growth of the cache.

`--write FOLDER` writes bench_decode.md and .json there. A table comes first; the last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import torch

from espalier.harness.errors import UserError
from espalier.harness.stats import ratio_interval
from lab.bench.bench_page import (
    DEVICE,
    LOAD,
    THREADS,
    Bench,
    choose,
    conditions,
    measured_on,
    verdict,
)
from lab.bench.bench_setup import Setup

if TYPE_CHECKING:
    from lab.bench.decode_parts import Filled

#: Of the page and its figures.
NAME = "bench_decode"

LENGTHS = (144, 2_880, 16_384)
ROWS = (1, 4)
TOKENS = 32
#: Minimum and maximum number of answers per loop: short answers take a tenth of a second and vary more.
ROUNDS = (12, 120)
#: The embedded model, and layers of a larger one with grouped heads.
MODELS: Mapping[str, tuple[str, ...]] = {
    "seedling": (),
    "llava_ov_0_5b": (
        *("model.weights=random", "model.dtype=float32"),
        *("model.scale.layers=8", "model.scale.tower_layers=1"),
    ),
}
#: From this many tokens on the loop should be faster; below, not slower.
FASTER_FROM = 2_880
#: Maximum width of an interval around 1 for a verdict of "even".
NARROW = 0.1


@dataclass(frozen=True)
class DecodeRow:
    """One model, batch and length.

    Attributes:
        model: name in conf/model.
        length: tokens in the cache.
        rows: rows of the batch.
        rounds: answers of each loop.
        ms: median time per token of each loop: `loop`, `indexed` (generate with the cache of the loop), `generate`.
        ratio: the library's time with its own cache over the loop's, geometric mean and 95 % interval.
        ratio_indexed: likewise with the cache of the loop.
        layer_bytes: size of the keys of one cache layer.
        written: bytes of the largest tensor written by an operation of a late step, per loop.
    """

    model: str
    length: int
    rows: int
    rounds: int
    ms: Mapping[str, float]
    ratio: tuple[float, float, float]
    ratio_indexed: tuple[float, float, float]
    layer_bytes: int
    written: Mapping[str, int]

    @property
    def verdict(self) -> str:
        """Verdict from the interval: faster, slower, even; open if it is wide and contains 1."""
        _, low, high = self.ratio
        if low > 1:
            return "faster"
        if high < 1:
            return "slower"
        return "even" if high - low <= NARROW else "open"

    @property
    def met(self) -> bool:
        """Whether the loop is as fast as the library, and faster from `FASTER_FROM` tokens on."""
        return self.verdict == "faster" or (self.length < FASTER_FROM and self.verdict == "even")


def timed_row(name: str, filled: Filled, seconds: float, tokens: int) -> DecodeRow:
    """Time the three loops in turns in changing order, after one warm-up answer of each.

    Args:
        name: of the model.
        filled: the caches.
        seconds: total time for the loop's answers, within `ROUNDS`.
        tokens: tokens per answer.
    """
    timed: dict[str, Callable[[], None]] = {
        "loop": lambda: filled.loop(tokens),
        "indexed": lambda: filled.library(tokens, indexed=True),
        "generate": lambda: filled.library(tokens, indexed=False),
    }
    first = {label: _seconds(run, filled) for label, run in timed.items()}
    fewest, maximum = ROUNDS
    rounds = max(fewest, min(maximum, round(seconds / first["loop"])))
    times: dict[str, list[float]] = {label: [] for label in timed}
    order = list(timed)
    for _ in range(rounds):
        for label in order:
            times[label].append(_seconds(timed[label], filled))
        order = [*order[1:], order[0]]
    return DecodeRow(
        model=name,
        length=filled.length,
        rows=filled.rows,
        rounds=rounds,
        ms={label: median(samples) / tokens * 1000 for label, samples in times.items()},
        ratio=_interval(times["generate"], times["loop"]),
        ratio_indexed=_interval(times["indexed"], times["loop"]),
        layer_bytes=filled.layer_bytes,
        written={label: filled.written(run) for label, run in timed.items()},
    )


def _seconds(run: Callable[[], None], filled: Filled) -> float:
    """Time one answer: on a CPU in processor time, which varies less on a shared machine, else in wall time."""
    clock = process_time if filled.device.type == "cpu" else perf_counter
    filled.refill()
    filled.synchronise()
    started = clock()
    run()
    filled.synchronise()
    return clock() - started


def _interval(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    interval = ratio_interval(theirs, ours)
    return interval.value, interval.low, interval.high


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the models, and of other models those in the folder."""
    # Imports transformers, which reads the environment at import time.
    from lab.bench.decode_parts import Filled

    rows: list[DecodeRow] = []
    for name in choose(options.only, MODELS):
        setup_overrides = (*MODELS[name], f"model.device={options.device}")
        adapter = Setup(model=name, overrides=setup_overrides).adapter
        for length in LENGTHS:
            for batch in ROWS:
                filled = Filled(adapter, length, batch)
                rows.append(timed_row(name, filled, options.seconds, TOKENS))
                print(line(entry(rows[-1])), flush=True)
    result: dict[str, Any] = {
        "tokens": TOKENS,
        "rows": [entry(row) for row in rows],
        "conditions": conditions(options.device),
    }
    earlier = None if options.write is None else options.write / f"{NAME}.json"
    if earlier is not None and earlier.exists():
        result["rows"] = together(json.loads(earlier.read_text(encoding="utf-8")), result)
    return result


def entry(row: DecodeRow) -> dict[str, Any]:
    """Return the JSON form of a row."""
    return {**asdict(row), "verdict": row.verdict, "met": row.met}


def line(row: Mapping[str, Any]) -> str:
    """Return one line of the table."""
    ms = " | ".join(f"{row['ms'][label]:.3g}" for label in ("loop", "indexed", "generate"))
    ratios = " | ".join(
        "{:.2f} [{:.2f}, {:.2f}]".format(*row[key]) for key in ("ratio", "ratio_indexed")
    )
    written = " | ".join(
        f"{row['written'][label] / row['layer_bytes']:.2g}"
        for label in ("loop", "indexed", "generate")
    )
    return (
        f"| {row['model']} | {row['length']:,} | {row['rows']} | {ms} | {ratios} | {written} "
        f"| {row['verdict']}: {verdict(row['met'])} |"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table in Markdown."""
    return [
        "| model | cache | rows | ms a token: loop | generate, indexed | generate | generate over loop "
        "| indexed over loop | written: loop | generate, indexed | generate | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | --- |",
        *(line(row) for row in rows),
    ]


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    machine = result["conditions"]
    rounds = [row["rounds"] for row in result["rows"]]
    lines = [
        "# Ordinary answers: the engine's loop and the library's",
        "",
        f"Written by `make bench-decode` on {measured_on(machine, DEVICE, THREADS, LOAD)}. Answers of "
        f"{result['tokens']} tokens after a cache of random content, {min(rounds)} to {max(rounds)} rounds in turns "
        "in one process, on a CPU in processor time of one thread; of four rows one is padded by a third. Times are "
        "medians, ratios geometric means with 95 % intervals (Student's t on the logarithms).",
        "",
        "`generate` is the library's loop with its own cache, `generate, indexed` with the cache of the engine's loop. "
        "Written is the largest tensor that one operation of a late step wrote, over the keys of one layer of the "
        "cache: 1 and more is a copy of the cache or, with a short one, the logits of a large vocabulary. To be met: "
        "as fast as `generate`, and faster from "
        f"{FASTER_FROM:,} tokens on; even is an interval that holds 1 and is at most {NARROW:g} wide.",
        "",
        *table(result["rows"]),
    ]
    return "\n".join(lines)


def together(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of a run, and rows of other models from an earlier run under the same conditions.

    Raises:
        UserError: the earlier figures are from another device or other versions.
    """
    measured = {row["model"] for row in now["rows"]}
    kept = [row for row in former["rows"] if row["model"] not in measured]
    for name in ("device_name", "torch", "transformers"):
        ours, theirs = now["conditions"][name], former["conditions"][name]
        if kept and ours != theirs:
            raise UserError(
                f"--write: figures there are of {name} {theirs}, these of {ours}; valid: all models at once (no --only)"
            )
    order = list(MODELS)
    return sorted([*kept, *now["rows"]], key=lambda row: order.index(row["model"]))


BENCH = Bench(
    "decode_bench",
    measure,
    lambda result: print("\n".join(table(result["rows"]))),
    page,
    {
        "--seconds": {
            "type": float,
            "default": 12,
            "help": "total time for the loop's answers, per row",
        },
        "--device": {"default": "cpu", "help": "model.device"},
        "--only": {"help": f"comma-separated models: {', '.join(MODELS)}"},
    },
    name=NAME,
    one_thread=True,
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
