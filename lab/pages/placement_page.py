"""The page of models and cards: `python -m lab.pages.placement_page [--write docs/placement.md]`.

Sizes are those of the config files, built without weights; no card is needed.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

from transformers import PreTrainedModel
from transformers.integrations import accelerate

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.cost.rehearsed import REHEARSALS
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import build_skeleton, weight_bytes
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.memory_check import check_memory, prompt_bytes
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.paths import CONF
from espalier.harness.specs.commands import command
from espalier.harness.specs.run_spec import ModelSpec
from lab.pages.page_writer import print_or_write, table

GIB = 2**30

#: Number of cards and GiB of each.
CARDS = ((1, 24), (1, 48), (1, 80), (2, 80), (8, 80))

#: What drivers and the allocator take of a card.
TAKEN = 1 * GIB

HEAD = f"""# Which model fits where

Written by `make docs` from [conf/model](../conf/model), with the check that runs before weights are read: weights and,
beside them on each card, what the longest prompt of the model's own benchmark needs (cache, activations, the tower on
its frames), for one row of a batch; {TAKEN // GIB} GiB of each card are left to driver and allocator. `auto` is
`model.device_map=auto`. Host memory helps only under `model.offload=true`, slowly, and such a run has no times.
`espalier doctor model=<name>` tries the longest prompt on your card.

"""

REHEARSED = """
## Rehearsed

```bash
python run.py model=llava_ov_72b method=parallelvlm ratio=0.9 --rehearse cards=4x80   # or 2xH100; sweeps, too
```

answers one prompt with the engine itself on simulated cards, without weights, without a GPU and in 1 GiB of memory:
whether the run works when its layers lie on these cards, the peak of each, kernels, reads and uploads of the host,
FLOPs, a range of times by the roofline, and the largest batch and the longest video that fit.
`espalier.rehearse("model=...", cards="4x80")` returns the same, and `espalier doctor model=... cards=4x80` checks
that it fits. Not simulated: which kernels run, CUDA graphs, an allocator's rounding; scores are plausible, not real.

Every published model, and every model and method of a preset, on the fewest cards of 80 GiB that hold it (`make
rehearsals`), with a picture of 1024 x 768 or a video of the model's frames. Peaks are of the fullest card; rows and
frames are the most that fit; kernels, reads and uploads are of the prompt with its first token.

"""


UNTESTED = """
## What only a card can tell

`make bench-gpu` does all of it in less than ten minutes and writes a page that has passed or failed for each.

| not tested without a card | one command |
| --- | --- |
| CUDA graphs: capture, replay, a second stream | `make doctor`, `pytest tests/decoding/test_gpu.py` |
| order of the streams of draft and target; layers spread over cards; FlashAttention | `make doctor` |
| which kernel of attention runs, and its numbers in bfloat16 | `make bench-gpu ARGS="--only checks"` |
| allocated memory against the rehearsal | `make bench-gpu ARGS="--only checks"` |
| events and the times of prefill, selection and steps | `make bench-gpu ARGS="--only checks,engine,select,decoding"` |
| energy | `python run.py engine.energy=true model.device=cuda` |
"""


def page() -> str:
    """Return the page."""
    names = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    # A sweep composes what its cells share once.
    request = read_command(["-m", f"model={','.join(names)}", "model.weights=random"])
    assert request is not None
    specs = [replace(build_spec(cell).model, device="cuda:0") for cell in request.cells]
    # The library leaves out cards that this machine does not have.
    with patch.object(accelerate, "get_max_memory", dict):
        lines = [_line(spec) for spec in specs if spec.architecture and spec.hub is not None]
    titles = [f"{number} x {size} GB" if number > 1 else f"{size} GB" for number, size in CARDS]
    head = ("`model=`", "weights (GiB)", "longest prompt (tokens)", "for it (GiB)", *titles)
    return HEAD + table(head, lines) + REHEARSED + rehearsals() + UNTESTED


def rehearsals() -> str:
    """Return the table of rehearsed runs."""
    with REHEARSALS.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    titles = {
        "clip": "of a video's frames",
        "cards": "cards",
        "visual": "visual tokens",
        "kept": "kept",
        "weights": "weights (GiB)",
        "peak": "peak (GiB)",
        "rows": "rows",
        "frames": "frames",
        "kernels": "kernels",
        "reads": "reads",
        "uploads": "uploads",
        "tflops": "TFLOPs",
    }
    rows = []
    for line in lines:
        method = " + ".join(name for name in (line["method"], line["compressor"]) if name != "none")
        outcome = [line[key] or "-" for key in titles]
        if line["outcome"] != "runs":
            outcome = [line["outcome"], *["-"] * (len(titles) - 1)]
        rows.append([f"`{line['model']}`", method or "none", *outcome])
    return table(("`model=`", "method", *titles.values()), rows)


def _line(spec: ModelSpec) -> list[str]:
    """Return a line of the table."""
    family = ADAPTERS.load(spec.adapter)
    config = family.configuration(spec, byte_tokenizer(family.data.special))
    skeleton = build_skeleton(family.class_of(config), config, spec)
    weights = weight_bytes(skeleton)
    sizes = [f"{weights / GIB:.1f}", f"{spec.longest:,}", f"{prompt_bytes(spec) / GIB:.1f}"]
    return [f"`{spec.name}`", *sizes, *(verdict(spec, skeleton, *cards) for cards in CARDS)]


def verdict(spec: ModelSpec, skeleton: PreTrainedModel, cards: int, size: int) -> str:
    """Return the setting under which a model fits on some cards."""
    free: dict[int | str, int] = {card: size * GIB - TAKEN for card in range(cards)}
    free["cpu"] = 0
    for setting, plan in (("fits", None), ("auto", "auto")):
        try:
            check_memory(replace(spec, device_map=plan), weight_bytes(skeleton), free, skeleton)
        except UserError:
            continue
        return setting
    return "no"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    return print_or_write(page, "lab.pages.placement_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
