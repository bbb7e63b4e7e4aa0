"""Does evicting cache entries pay what their bytes promise? `python -m lab.bench.kv_bench` (`make bench-kv`).

A decoder with random weights whose cache is far larger than its weights answers prompts of two lengths behind the whole
cache and behind what compressors leave of it, in turns in one process. A step of decoding reads weights and cache once:

    allowed = (weights + whole cache) / (weights + what is left of it),

which the measured gain is held against. Beside it stand what scoring and evicting cost, and what is held meanwhile.
`--write FOLDER` leaves `bench_kv.json` and `bench_kv.md` there; `--quick` is for looking at the benchmark itself.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from lab.bench.bench_page import bench_command, finish, parser
from lab.bench.kv_page import page
from lab.bench.kv_sides import Asked, Row, Side, rows_of
from lab.bench.speed_bench import conditions

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter

SCHEMA = 1

#: LLaVA's layout around two wide layers: at 16k tokens 268 MB of cache, and a step reads 95 MB of weights.
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

#: One decoder layer of the size that papers report on, for what scores cost beside its prefill: the wide layers above
#: have next to no weights, so that their prefill is far cheaper a token than any model's.
LAYER = (
    "model=llava_ov_7b",
    "model.weights=random",
    "model.scale.layers=1",
    "model.scale.tower_layers=1",
    "model.dtype=bfloat16",
    "model.device=cpu",
)

#: Overrides of a side -> whether its score looks at a few rows of the attention, not at all of them.
FULL = "method=none"
OF_ROWS = ("random_kv", "snapkv_paper", "aircache")
ALL_ROWS = ("h2o_paper", "elastic_paper", "prefixkv_paper")
BY_HEAD = ("method=aircache", "method.params.per_head=true", "ratio=0.9")


@dataclass(frozen=True)
class Length:
    """One length of prompts: which sides answer them, how often, how long, on which model, and what is asked of it."""

    tokens: int
    sides: tuple[tuple[str, ...], ...]
    rounds: int
    warmup: int
    new_tokens: int
    instance: tuple[str, ...] = INSTANCE
    asked: Asked = "steps"


def evicting(names: Sequence[str], *ratios: str) -> tuple[tuple[str, ...], ...]:
    """Return the overrides of each method at each ratio."""
    return tuple((f"method={name}", f"ratio={ratio}") for ratio in ratios for name in names)


#: The short prompts warm the process up for the long ones, whose prefill takes most of the time.
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
        asked="scores",
    ),
)
QUICK_PLAN = (
    Length(1400, ((FULL,), *evicting(OF_ROWS, "0.9"), BY_HEAD), rounds=1, warmup=0, new_tokens=4),
)


def adapter_of(overrides: Sequence[str]) -> Adapter:
    """Return the loaded model of a command line."""
    from espalier.harness.models.adapter import load_adapter  # transformers takes seconds to import

    return load_adapter(_spec(overrides).model)


def measured(plan: Sequence[Length]) -> list[Row]:
    """Return a row of each side at each length."""
    rows: list[Row] = []
    for instance, lengths in groupby(plan, lambda one: one.instance):
        adapter = adapter_of(instance)
        for one in lengths:
            print(f"bench: {one.tokens} tokens", file=sys.stderr, flush=True)
            sides = [Side.of(adapter, _spec([*instance, *side])) for side in one.sides]
            found = rows_of(adapter, sides, one.tokens, one.rounds, one.warmup, one.new_tokens)
            rows += [replace(row, instance=" ".join(instance), asked=one.asked) for row in found]
    return rows


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 2 for bad input, else 0, whether targets are met or not."""
    options = _options(argv)
    plan: Sequence[Length] = QUICK_PLAN if options.quick else FULL_PLAN
    if options.rounds is not None:
        plan = tuple(replace(one, rounds=options.rounds) for one in plan)
    if options.overrides:
        plan = tuple(replace(one, instance=tuple(options.overrides)) for one in plan)
    with contextlib.redirect_stdout(sys.stderr):
        rows = measured(plan)
    result = {
        "schema": SCHEMA,
        "rows": [one.entry() for one in rows],
        "conditions": conditions("cpu"),
    }
    text = page(rows, result)
    print(text)
    finish(options.write, "bench_kv", text, result)
    return 0


def _spec(overrides: Sequence[str]) -> Any:
    command = read_command(list(overrides))
    assert command is not None  # only requests for help compose nothing
    return build_spec(command.cells[0])


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    known = parser("kv", "bench_kv")
    known.add_argument("overrides", nargs="*", help="the model; default: two, in the page")
    known.add_argument("--quick", action="store_true", help="short prompts, a round")
    known.add_argument("--rounds", type=int, help="of answers that count, at each length")
    return known.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
