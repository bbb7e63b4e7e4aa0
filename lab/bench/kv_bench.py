"""Compares decoding speed with cache size after eviction: `python -m lab.bench.kv_bench` (`make bench-kv`).

A decoder with random weights and a far larger cache answers prompts of two lengths with the full
cache and with compressed caches, in turns in one process. A decoding step reads weights and cache once:

    allowed = (weights + full cache) / (weights + remaining cache),

which is compared with the measured gain. The cost of scoring and eviction and the peak memory are reported too.
`--write FOLDER` writes `bench_kv.json` and `bench_kv.md` there; `--quick` is for testing the benchmark itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lab.bench.bench_page import Bench, printed_page
from lab.bench.bench_setup import spec_of
from lab.bench.kv_page import page
from lab.bench.kv_sides import CacheRow, CacheSide, Purpose, rows_of

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter

#: LLaVA's layout with two wide layers: at 16k tokens 268 MB of cache, and a step reads 95 MB of weights.
INSTANCE = (
    "model=llava15_7b",
    "model.weights=random",
    "model.dtype=float32",
    "model.device=cpu",
    "model.architecture.text.max_position_embeddings=65536",
    "+model.architecture.text.head_dim=128",
    "model.facts.text={layers: 2, hidden: 512, intermediate: 1024, heads: 8, kv_heads: 8, head_dim: 128}",
    "model.facts.tower={layers: 1, hidden: 128, intermediate: 128, heads: 2, kv_heads: 2, head_dim: 64}",
    "model.facts.projector=[128, 512, 512]",
)

#: One decoder layer of the size used in papers, for the cost of scoring relative to its prefill: the wide layers above
#: have few weights, so their prefill per token is far cheaper than in any real model.
LAYER = (
    "model=llava_ov_7b",
    "model.weights=random",
    "model.scale.layers=1",
    "model.scale.tower_layers=1",
    "model.dtype=bfloat16",
    "model.device=cpu",
)

#: Overrides of a side -> whether its score reads only a few rows of the attention.
FULL = "method=none"
OF_ROWS = ("random_kv", "snapkv_paper", "aircache")
ALL_ROWS = ("h2o_paper", "elastic_paper", "prefixkv_paper")
BY_HEAD = ("method=aircache", "method.params.per_head=true", "ratio=0.9")


@dataclass(frozen=True)
class Length:
    """One prompt length: its sides, repetitions, answer length, model and targets."""

    tokens: int
    sides: tuple[tuple[str, ...], ...]
    rounds: int
    warmup: int
    new_tokens: int
    instance: tuple[str, ...] = INSTANCE
    purpose: Purpose = "steps"


def evicting(names: Sequence[str], *ratios: str) -> tuple[tuple[str, ...], ...]:
    """Return the overrides of each method at each ratio."""
    return tuple((f"method={name}", f"ratio={ratio}") for ratio in ratios for name in names)


#: The short prompts warm up the process for the long ones, which take most of the time.
FULL_PLAN = (
    Length(
        4096,
        ((FULL,), *evicting(OF_ROWS, "0.5", "0.9"), BY_HEAD, *evicting(ALL_ROWS, "0.9")),
        rounds=3,
        warmup=1,
        new_tokens=48,
    ),
    Length(
        16384,
        ((FULL,), ("method=aircache", "ratio=0.5"), *evicting(OF_ROWS, "0.9"), BY_HEAD),
        rounds=3,
        warmup=0,
        new_tokens=48,
    ),
    Length(
        4096,
        ((FULL,), *evicting((*OF_ROWS, *ALL_ROWS), "0.9"), BY_HEAD),
        rounds=2,
        warmup=0,
        new_tokens=2,
        instance=LAYER,
        purpose="scores",
    ),
)
QUICK_PLAN = (
    Length(1400, ((FULL,), *evicting(OF_ROWS, "0.9"), BY_HEAD), rounds=1, warmup=0, new_tokens=4),
)


def adapter_of(overrides: Sequence[str]) -> Adapter:
    """Return the model of a command line, loaded."""
    from espalier.harness.models.build_adapter import (
        load_adapter,  # transformers takes seconds to import
    )

    return load_adapter(spec_of(*overrides).model)


def measured(plan: Sequence[Length]) -> list[CacheRow]:
    """Return one row per side and length."""
    rows: list[CacheRow] = []
    for instance, lengths in groupby(plan, lambda length: length.instance):
        adapter = adapter_of(instance)
        for length in lengths:
            print(f"bench: {length.tokens} tokens", file=sys.stderr, flush=True)
            sides = [CacheSide.of(adapter, spec_of(*instance, *side)) for side in length.sides]
            side_rows = rows_of(
                adapter, sides, length.tokens, length.rounds, length.warmup, length.new_tokens
            )
            rows += [
                replace(row, instance=" ".join(instance), purpose=length.purpose)
                for row in side_rows
            ]
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the full or the quick plan."""
    plan: Sequence[Length] = QUICK_PLAN if options.quick else FULL_PLAN
    if options.rounds is not None:
        plan = tuple(replace(length, rounds=options.rounds) for length in plan)
    if options.overrides:
        plan = tuple(replace(length, instance=tuple(options.overrides)) for length in plan)
    return {"rows": [row.entry() for row in measured(plan)]}


BENCH = Bench(
    "kv_bench",
    measure,
    printed_page(page),
    page,
    {
        "overrides": {"nargs": "*", "help": "model overrides; default: the two on the page"},
        "--quick": {"action": "store_true", "help": "short prompts, one round"},
        "--rounds": {"type": int, "help": "counted rounds per length"},
    },
    name="bench_kv",
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
