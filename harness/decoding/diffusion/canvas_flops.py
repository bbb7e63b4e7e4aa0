"""Exact FLOPs of answers on canvases, from the prompt's pixels to the last step.

Beside a prompt's prefill (harness/cost/flops.py), which has no head:

| part                 | FLOPs of a canvas of g places after s steps                               |
| -------------------- | ------------------------------------------------------------------------- |
| steps                | s times the decoder layers on g places, with the cache and one another    |
| head                 | s times 2 g d v                                                           |
| words as inputs      | s times 6 g d m, and s - 1 times 2 g v d: the last step's distribution     |
| reading              | the decoder layers on g places, but for the last canvas                   |

Left out are the cutting of patches and the tower's average over patches, a product with a table of shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.facts import CanvasFacts, ModelFacts
from espalier.harness.cost.flops import (
    Components,
    SampleFlops,
    attending_flops,
    head_flops,
    projector_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.cost.paper_flops import PAPERS, counts_of
from espalier.harness.cost.row_work import Work

if TYPE_CHECKING:
    from espalier.harness.engine.record import SampleRecord

#: For each canvas and layer, the cache entries and places that a place sees, or the pairs that attend.
Counts = Sequence[Sequence[int]]


def canvas_flops(facts: ModelFacts, record: SampleRecord) -> SampleFlops:
    """Return the FLOPs of one sample's whole run, from its pixels to its last step, reduced and unreduced."""
    assert record.canvases is not None  # the engine records them on every model with a canvas
    canvases: Mapping[str, Any] = record.canvases
    steps, full = canvases["steps"], (record.visual,) * facts.text.layers
    work, visible, full_visible = Work(*record.work), canvases["visible"], canvases["full_visible"]

    def parts(work: Work, decoder: int) -> Components:
        projector = projector_flops(facts, work.units, work.reprojected)
        places = sum(steps) * canvas_of(facts).length
        return Components(tower_flops(facts, work), projector, decoder, head_flops(facts, places))

    def prompt(entering: Sequence[int], pairs: Sequence[int] | None) -> int:
        return text_flops(facts, entering, record.text, pairs=pairs or ())

    def paper(entering: Sequence[int], visible: Counts) -> dict[str, float]:
        places = [canvas_of(facts).length] * facts.text.layers
        passes = [(1, counts_of(facts.text, [visual + record.text for visual in entering]))]
        # A canvas that is read runs once more.
        runs = [count + 1 for count in steps[:-1]] + steps[-1:]
        passes += [
            (n, counts_of(facts.text, places, keys)) for n, keys in zip(runs, visible, strict=True)
        ]
        return {name: sum(n * count[name] for n, count in passes) for name in PAPERS}

    reduced = prompt(record.entering, record.pairs)
    unreduced = prompt(full, record.full_pairs)
    return SampleFlops(
        exact=parts(work, reduced + answer_flops(facts, steps, visible, canvases["pairs"])),
        exact_full=parts(
            work.untouched(),
            unreduced + answer_flops(facts, steps, full_visible, canvases["full_pairs"]),
        ),
        paper=paper(record.entering, visible),
        paper_full=paper(full, full_visible),
    )


def answer_flops(facts: ModelFacts, steps: Sequence[int], visible: Counts, read: Counts) -> int:
    """Return the exact FLOPs of all steps without the head, and of reading canvases into the cache."""
    canvas, text = canvas_of(facts), facts.text
    length = canvas.length
    words = 2 * length * facts.vocabulary * text.hidden
    feedback = 6 * length * text.hidden * canvas.intermediate
    total = sum(feedback * count + words * max(count - 1, 0) for count in steps)
    for count, entries in zip(steps, visible, strict=True):
        total += count * sum(
            attending_flops(text, layer, length, length * keys)
            for layer, keys in enumerate(entries)
        )
    return total + sum(
        attending_flops(text, layer, length, pairs)
        for canvas in read
        for layer, pairs in enumerate(canvas)
    )


def canvas_of(facts: ModelFacts) -> CanvasFacts:
    """Return the sizes of a canvas; the model must have one."""
    assert facts.canvas is not None
    return facts.canvas
