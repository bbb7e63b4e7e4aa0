"""Does merging save the time that its FLOPs promise? `python -m lab.bench.diffusion_bench` (`make bench-diffusion`).

LaViDa with random weights, scaled to what a processor runs, denoises one answer whole and with D3ToM at five shares of
its visual tokens, in turns in one process: whole runs from the prompt on, steps and what lies between them included.

    promised saving = 1 - FLOPs of the run / FLOPs of the whole model's run        (decoder and head, harness/cost)

`--write FOLDER` leaves `bench_diffusion.json` and `bench_diffusion.md` there; `--only 50,10` picks shares kept.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.evaluation.synthetic_prompts import words
from lab.bench.bench_page import bench_command, finish, parser
from lab.bench.diffusion_page import page
from lab.bench.selection_times import one_thread
from lab.bench.speed_bench import choose, conditions

SCHEMA = 1

#: The release's adapter, view sizes and vocabulary around fewer and narrower layers; a square picture has 980 tokens.
INSTANCE = (
    "model=lavida_llada_8b",
    "model.weights=random",
    "model.dtype=float32",
    "model.device=cpu",
    "model.facts.text={layers: 12, hidden: 512, intermediate: 1536, heads: 8, kv_heads: 8, head_dim: 64}",
    "model.facts.tower={layers: 1, hidden: 144, intermediate: 288, heads: 2, kv_heads: 2, head_dim: 72}",
    "model.facts.projector=[144, 512, 512]",
)

#: Of 12 layers the first runs whole, as the first 3 of 32 in the paper.
D3TOM = ("method=d3tom", "method.variant=paper", "method.params.K=1")

#: Shares kept, in percent, of the paper's tables.
KEPT: Mapping[str, str] = {"50": "0.5", "33": "0.667", "25": "0.75", "17": "0.833", "10": "0.9"}

#: Pixels along the picture's edge: a global view and four crops. Words of the question, each several tokens of bytes.
EDGE, WORDS = 768, 12
#: Places and steps of the answer, four places a step.
ANSWER = {"max_new_tokens": 32, "steps": 8}


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 2 for bad input, else 0, whether targets are met or not."""
    options = _options(argv)
    instance = tuple(options.overrides) or INSTANCE
    shares = choose(options.only, KEPT)
    with contextlib.redirect_stdout(sys.stderr), one_thread():
        result = measured(instance, shares, options.rounds)
        result["conditions"] = conditions("cpu")
    text = page(result)
    print(text)
    finish(options.write, "bench_diffusion", text, result)
    return 0


def measured(instance: Sequence[str], shares: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the rows of the whole model, of D3ToM at each share kept, and of random tokens at the last of them."""
    # Both bring in transformers, which reads the variables above when it is imported.
    from espalier.harness.models.adapter import load_adapter
    from lab.bench.diffusion_sides import Side, rows_of

    adapter = load_adapter(_spec(instance).model)
    ratios = [KEPT[share] for share in shares]
    asked = [
        ("method=none",),
        *((*D3TOM, f"ratio={ratio}") for ratio in ratios),
        ("method=random", f"ratio={ratios[-1]}"),
    ]
    sides = [Side.of(adapter, _spec([*instance, *side])) for side in asked]
    pixels = np.random.default_rng(0).integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8)
    content = [
        {"type": "image", "image": Image.fromarray(pixels)},
        {"type": "text", "text": words(WORDS)},
    ]
    inputs = adapter.encode([[{"role": "user", "content": content}]])
    rows = rows_of(sides, inputs, rounds, **ANSWER)
    return {
        "schema": SCHEMA,
        "instance": " ".join(instance),
        "method": " ".join(D3TOM),
        "answer": ANSWER,
        "rounds": rounds,
        "rows": [row.entry() for row in rows],
    }


def _spec(overrides: Sequence[str]) -> Any:
    command = read_command(list(overrides))
    assert command is not None  # only requests for help compose nothing
    return build_spec(command.cells[0])


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    known = parser("diffusion", "bench_diffusion")
    known.add_argument("overrides", nargs="*", help="the model; default: the one in the page")
    known.add_argument("--rounds", type=int, default=4, help="runs of each side that count")
    known.add_argument("--only", help=f"comma-separated shares kept: {', '.join(KEPT)}")
    return known.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
