"""Time and FLOP savings of merging while denoising: `python -m lab.bench.diffusion_bench` (`make bench-diffusion`).

LaViDa with random weights, scaled down for a CPU, denoises one answer unreduced and with D3ToM at five shares of
its visual tokens, in turns in one process. Complete runs are timed, from the prompt through all steps; once more
after a cached prompt, there also with sampled words, with four answers at once, and with four steps to a choice.

    promised saving = 1 - FLOPs of the run / FLOPs of the whole model's run        (decoder and head, harness/cost)

`--write FOLDER` writes `bench_diffusion.json` and `bench_diffusion.md` there; `--only 50,10` selects shares kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from espalier.harness.evaluation.synthetic_prompts import words
from espalier.harness.tools.calibration.calibration_images import question
from lab.bench.bench_page import Bench, choose, printed_page
from lab.bench.bench_setup import spec_of
from lab.bench.diffusion_page import page

#: The release's adapter, view sizes and vocabulary with fewer and narrower layers; a square picture has 980 tokens.
INSTANCE = (
    "model=lavida_llada_8b",
    "model.weights=random",
    "model.dtype=float32",
    "model.device=cpu",
    "model.facts.text={layers: 12, hidden: 512, intermediate: 1536, heads: 8, kv_heads: 8, head_dim: 64}",
    "model.facts.tower={layers: 1, hidden: 144, intermediate: 288, heads: 2, kv_heads: 2, head_dim: 72}",
    "model.facts.projector=[144, 512, 512]",
)

#: The first of 12 layers runs unreduced, as the first 3 of 32 in the paper.
D3TOM = ("method=d3tom", "method.variant=paper", "method.params.K=1")

#: Shares kept in the paper's tables, in percent.
KEPT: Mapping[str, str] = {"50": "0.5", "33": "0.667", "25": "0.75", "17": "0.833", "10": "0.9"}

#: Picture size in pixels (a global view and four crops), and words of the question, each several byte tokens.
EDGE, WORDS = 768, 12
#: Positions and steps of the answer, four positions per step.
ANSWER = {"max_new_tokens": 32, "steps": 8}

#: Further settings of answers by name, answers at once, and steps that share a choice.
VARIANTS: Mapping[str, tuple[Mapping[str, Any], int, int]] = {
    "after a cached prompt": ({"prefix_cache": True}, 1, 1),
    "after a cached prompt, sampled": ({"prefix_cache": True, "temperature": 0.7}, 1, 1),
    "after a cached prompt, four answers": ({"prefix_cache": True}, 4, 1),
    "after a cached prompt, every=4": ({"prefix_cache": True}, 1, 4),
}
CACHED_SHARES = ("50", "25", "10")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the unreduced model, of D3ToM at each share kept, and of random tokens at the last one."""
    instance, rounds = tuple(options.overrides) or INSTANCE, options.rounds
    shares = choose(options.only, KEPT)
    # Both import transformers, which reads the variables above at import time.
    from espalier.harness.models.build_adapter import load_adapter
    from lab.bench.diffusion_sides import DiffusionSide, rows_of

    adapter = load_adapter(spec_of(*instance).model)
    ratios = [KEPT[share] for share in shares]

    def sides_of(
        ratios: Sequence[str], every: int, *controls: tuple[str, ...]
    ) -> list[DiffusionSide]:
        merged = (*D3TOM, f"method.params.every={every}")
        settings = [("method=none",), *((*merged, f"ratio={ratio}") for ratio in ratios), *controls]
        return [DiffusionSide.of(adapter, spec_of(*instance, *side)) for side in settings]

    sides = sides_of(ratios, 1, ("method=random", f"ratio={ratios[-1]}"))
    pixels = np.random.default_rng(0).integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8)
    chat = question(Image.fromarray(pixels), words(WORDS))
    rows = rows_of(sides, adapter.encode([chat]), rounds, **ANSWER)
    cached = [KEPT[share] for share in shares if share in CACHED_SHARES]
    variants = {
        name: rows_of(
            sides_of(cached, every), adapter.encode([chat] * answers), rounds, **ANSWER, **settings
        )
        for name, (settings, answers, every) in VARIANTS.items()
    }
    return {
        "instance": " ".join(instance),
        "method": " ".join(D3TOM),
        "answer": ANSWER,
        "rounds": rounds,
        "rows": [row.entry() for row in rows],
        "variants": {name: [row.entry() for row in variant] for name, variant in variants.items()},
    }


BENCH = Bench(
    "diffusion_bench",
    measure,
    printed_page(page),
    page,
    {
        "overrides": {"nargs": "*", "help": "model overrides; default: those on the page"},
        "--rounds": {"type": int, "default": 4, "help": "counted runs per side"},
        "--only": {"help": f"comma-separated shares kept: {', '.join(KEPT)}"},
    },
    name="bench_diffusion",
    one_thread=True,
    schema=2,
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
