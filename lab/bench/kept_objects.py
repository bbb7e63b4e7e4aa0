"""What a method keeps of scenes with known objects: `python -m lab.bench.kept_objects method=fastv ratio=0.75`.

Prints the share of patches alive in the last layer, for patches with an object, with the question's object and with
none, over 100 held-out scenes with a grounding question each; and the share of scenes that lose every patch of the
object of the question. Random selection keeps 1 - ratio of each kind.
Every method by default; everything else is a config override as for run.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.engine.artifacts import prior_for
from espalier.harness.errors import Refused
from espalier.harness.kinds.lookup import label_of
from espalier.harness.seedling.scene_benchmarks import sample_objects, sample_scene, samples
from espalier.harness.store.files.digests import Digests
from espalier.harness.tools.calibration.calibration_images import question
from espalier.methods.base import TokenReducer
from espalier.methods.none import NoReduction
from lab.bench.bench_page import bench_command

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.runs.admission import Job
    from espalier.harness.specs.run_spec import RunSpec

SCENES, BATCH = 100, 50
KINDS = ("objects", "asked", "ground", "lost")


def covered_patches(boxes: Sequence[Sequence[int]], side: int, pixels: int) -> Tensor:
    """Return (side^2,) booleans: the patches of a square raster that a box (x0, y0, x1, y1) covers by half or more."""
    edge = pixels / side
    covered = torch.zeros(side, side, dtype=torch.bool)
    low = torch.arange(side) * edge
    for x0, y0, x1, y1 in boxes:
        across = (torch.clamp(low + edge, max=x1) - low.clamp(min=x0)).clamp(min=0)
        down = (torch.clamp(low + edge, max=y1) - low.clamp(min=y0)).clamp(min=0)
        covered |= down[:, None] * across[None] >= edge**2 / 2
    return covered.flatten()


def kept_shares(job: Job, adapter: Adapter) -> dict[str, float]:
    """Return the mean share kept of each kind of patch, and of scenes without a patch of the question's object."""
    # These import transformers, which takes seconds, after main has set it offline.
    from espalier.harness.engine.session import Session

    spec, shares = job.spec, {kind: list[float]() for kind in KINDS}
    drawn = [sample for sample in samples("seedling_rec", "test", 0, 0, SCENES) if sample["box"]]
    prior = prior_for(spec.model, job.method, spec.store)
    # Decoders do not drop tokens of the model.
    method = job.method if isinstance(job.method, TokenReducer) else NoReduction()
    with Session(adapter, method, spec.budget, seed=spec.seed, prior=prior) as session:
        for first in range(0, len(drawn), BATCH):
            part = drawn[first : first + BATCH]
            scenes = [sample_scene(sample) for sample in part]
            chats = [
                question(scene.to_pil(), sample["question"])
                for scene, sample in zip(scenes, part, strict=True)
            ]
            names = [str(first + place) for place in range(len(part))]
            records = session.generate(
                adapter.encode(chats), names, max_new_tokens=1, do_sample=False
            ).records
            for sample, scene, record in zip(part, scenes, records, strict=True):
                side, pixels = round(record.visual**0.5), scene.image.shape[0]
                alive = torch.zeros(record.visual, dtype=torch.bool)
                alive[record.origin] = True
                objects = covered_patches(
                    [item.box for item in sample_objects(sample)], side, pixels
                )
                target = covered_patches([sample["box"]], side, pixels)
                for kind, patches in zip(KINDS, (objects, target, ~objects), strict=False):
                    shares[kind].append(float(alive[patches].float().mean()))
                shares["lost"].append(float(not alive[target].any()))
    return {kind: fmean(values) for kind, values in shares.items()}


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each cell; return 0, or 2 after one line on standard error."""
    # Imports transformers, which reads the variables above at import time.
    from espalier.harness.models.build_adapter import load_adapter

    overrides = list(sys.argv[1:] if argv is None else argv)
    # The questions come from this module, so one benchmark is enough.
    cells = ["-m", "+experiment=sweep", "ratio=0.75", *overrides, "benchmark=seedling_rec"]
    specs = specs_of(*cells)
    adapter, digests = load_adapter(specs[0].model), Digests()
    print(f"{'':56}{'  '.join(KINDS)}")
    for spec in specs:
        name = f"{spec.method.title} {label_of(spec)} {spec.budget.ratio:g}"
        print(f"{name:56}{_line(spec, adapter, digests)}", flush=True)
    return 0


def _line(spec: RunSpec, adapter: Adapter, digests: Digests) -> str:
    """Return the shares of one cell, or the reason that it cannot run."""
    # The checks import the adapters and so transformers.
    from espalier.harness.runs.admission import admit

    try:
        shares = kept_shares(admit(spec, digests), adapter)
    except Refused as error:
        return str(error)
    return "  ".join(f"{shares[kind]:{len(kind)}.2f}" for kind in KINDS)


if __name__ == "__main__":
    sys.exit(main())
