"""Crowded scenes with the tokens that the question needs: `python -m lab.bench.crowd_oracle --ratio 0.9`.

Keeps the patches of the objects that a question is about (all shapes of its name or colour, all digits of its number),
then an even sample of the others: before the decoder, the best that a choice by question could be. Prints the accuracy
of `seedling_crowd` on its benchmark, in percent, in all and by family.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.seedling.crowd import crowd_metrics, sample_objects, sample_scene, samples
from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.stats import mean_interval
from espalier.harness.tools.calibration.calibration_images import question
from lab.bench.bench_page import bench_command, parser
from lab.bench.second_question import Oracle
from lab.training.crowd_gaze import objects_looked_at
from lab.training.patch_targets import crowd_targets

#: Split, seed and first scene of the benchmark, see tasks/seedling_crowd/seedling_crowd.json.
SPLIT, SEED, FIRST = "test", 0, 2_000_000
BATCH = 50


def needed(sample: dict[str, Any]) -> Tensor:
    """Return (N,) booleans: the patches of the objects that a sample's question is about."""
    objects = sample_objects(sample)
    target = next((item for item in objects if list(item.box) == list(sample["box"])), None)
    fields = (sample["family"], sample["template"], sample["question"], sample["answer"])
    looks = objects_looked_at(SceneQuestion(*fields, target), objects)
    slots = {slot for candidates, deciding in looks for slot in (*candidates, *deciding)}
    return torch.from_numpy(np.isin(crowd_targets([objects]).owner[0], list(slots)))


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the line of each metric; return 0."""
    # Imports transformers, which reads the environment at import time.
    from espalier.harness.engine.session import Session
    from espalier.harness.models.build_adapter import load_adapter

    arguments = parser("crowd_oracle")
    arguments.add_argument("--ratio", type=float, default=0.9, help="share that is removed")
    arguments.add_argument("--scenes", type=int, default=200, help="number of scenes")
    options = arguments.parse_args(sys.argv[1:] if argv is None else argv)
    overrides = ["model=seedling_crowd", "method=random", f"ratio={options.ratio}"]
    spec = specs_of(*overrides, "benchmark=seedling_crowd")[0]
    adapter, drawn = load_adapter(spec.model), samples(SPLIT, SEED, FIRST, options.scenes)
    scores: dict[str, list[float]] = {}
    for start in range(0, len(drawn), BATCH):
        part = drawn[start : start + BATCH]
        method = Oracle(torch.stack([needed(sample) for sample in part]))
        chats = [question(sample_scene(sample).to_pil(), sample["question"]) for sample in part]
        with Session(adapter, method, spec.budget, seed=spec.seed) as session:
            names = [str(sample["index"]) for sample in part]
            output = session.generate(
                adapter.encode(chats), names, max_new_tokens=16, do_sample=False
            )
        for sample, text in zip(part, adapter.decode(output.ids), strict=True):
            for name, score in crowd_metrics(sample, text).items():
                scores.setdefault(name, []).append(score)
    for name, values in scores.items():
        print(f"{name:20}{mean_interval(values).percent}  n={len(values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
