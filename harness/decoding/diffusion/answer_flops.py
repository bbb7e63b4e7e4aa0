"""FLOPs of denoised answers and of answers on canvases, from the prompt's pixels to the last step.

Of a canvas, beside a prompt's prefill (harness/cost/flops.py), which has no head:

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
from typing import Any

from espalier.harness.cost.budget import frame_of
from espalier.harness.cost.facts import CanvasFacts, ModelFacts, Work
from espalier.harness.cost.flops import (
    PAPERS,
    Components,
    SampleFlops,
    attending_flops,
    cached_prompt_flops,
    counts_of,
    head_flops,
    mlp_flops,
    projector_flops,
    split_layer,
    text_flops,
    tower_flops,
)
from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord, denoising_records
from espalier.harness.engine.record import SampleRecord
from espalier.methods.base import TokenReducer
from espalier.methods.denoiser import as_denoiser

#: For each canvas and layer, the cache entries and places that a place sees, or the pairs that attend.
Counts = Sequence[Sequence[int]]


def canvas_flops(facts: ModelFacts, record: SampleRecord) -> SampleFlops:
    """Return the FLOPs of one sample's whole run, from its pixels to its last step, reduced and unreduced."""
    assert record.canvases is not None  # the engine records them on every model with a canvas
    canvases: Mapping[str, Any] = record.canvases
    steps, full = canvases["steps"], (record.visual,) * facts.text.layers
    work, visible, full_visible = Work(*record.work), canvases["visible"], canvases["full_visible"]

    head = head_flops(facts, sum(steps) * canvas_of(facts).length)

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
        return _printed(passes)

    reduced = prompt(record.entering, record.pairs)
    unreduced = prompt(full, record.full_pairs)
    return SampleFlops(
        exact=_components(
            facts, work, reduced + answer_flops(facts, steps, visible, canvases["pairs"]), head
        ),
        exact_full=_components(
            facts,
            work.untouched(),
            unreduced + answer_flops(facts, steps, full_visible, canvases["full_pairs"]),
            head,
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


def _components(facts: ModelFacts, work: Work, decoder: int, head: int) -> Components:
    projector = projector_flops(facts, work.units, work.reprojected)
    return Components(tower_flops(facts, work), projector, decoder, head)


def _printed(passes: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the sum over kinds of passes, each with its number, as every paper counts it."""
    return {name: sum(n * count[name] for n, count in passes) for name in PAPERS}


def canvas_of(facts: ModelFacts) -> CanvasFacts:
    """Return the sizes of a canvas; the model must have one."""
    assert facts.canvas is not None
    return facts.canvas


def run_flops(method: TokenReducer, facts: ModelFacts, record: SampleRecord) -> SampleFlops:
    """Count one sample's whole run: tower and projector once, decoder and head at every step.

    Inside a split layer the MLP has fewer tokens than the attention; of the papers only D3ToM counts that. Cached
    prompts are counted by `cached_flops`.
    """
    (denoising,) = denoising_records([record])
    if denoising.prefix_cache:
        return cached_flops(method, facts, record, denoising)
    text, steps = record.text + denoising.length, len(denoising.kept)
    frame = frame_of(method, facts, record.visual, text)
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    entering = [frame.entering(kept) for kept in denoising.kept]
    blocks = [number for number, site in enumerate(sites) if site.where == "block"]
    halves = sum(
        mlp_flops(facts.text) * (record.visual - kept[number])
        for kept in denoising.kept
        for number in blocks
    )
    work, full = Work(*record.work), (record.visual,) * facts.text.layers
    head = sum(head_flops(facts, scored) for scored in denoising.scored)
    windows = denoising.windows or (0,) * steps
    few = denoising.parts or (0,) * steps

    def decoded(entering: Sequence[tuple[int, ...]]) -> int:
        return sum(
            cached_prompt_flops(facts, counts, text - window, window, part)
            if window
            else text_flops(facts, counts, text)
            for counts, window, part in zip(entering, windows, few, strict=True)
        )

    decoder = decoded(entering) - halves

    def printed(entering: Sequence[tuple[int, ...]]) -> dict[str, float]:
        passes = []
        for counts, window, part in zip(entering, windows, few, strict=True):
            keys = [visual + text for visual in counts]
            queries = [window, *[part or window] * (len(keys) - 1)] if window else keys
            passes.append((1, counts_of(facts.text, queries, keys)))
        return _printed(passes)

    paper = printed(entering)
    paper["d3tom"] += sum(
        split_layer(facts.text, record.visual, kept[number])
        for kept in denoising.kept
        for number in blocks
    )

    return SampleFlops(
        exact=_components(facts, work, decoder, head),
        exact_full=_components(facts, work.untouched(), decoded([full] * steps), head),
        paper=paper,
        paper_full=printed([full] * steps),
    )


def cached_flops(
    method: TokenReducer, facts: ModelFacts, record: SampleRecord, denoising: DenoisingRecord
) -> SampleFlops:
    """Count one sample's whole run: tower, projector and prompt once, the answer's places and the head at each step.

    A method that acts on every prefill shortens the prompt's own run; one that acts on denoising steps shortens the
    entries that places attend to.
    """
    frame = frame_of(method, facts, record.visual, record.text)
    steps, full = len(denoising.kept), (record.visual,) * facts.text.layers
    entering = [frame.entering(kept) for kept in denoising.kept]
    prompt = entering[0] if as_denoiser(method) is None else full
    text, places = record.text, denoising.length
    head = sum(head_flops(facts, scored) for scored in (denoising.says_first, *denoising.scored))

    def parts(work: Work, prompt: tuple[int, ...], entries: list[tuple[int, ...]]) -> Components:
        decoder = text_flops(facts, prompt, text, causal=False)
        decoder += sum(cached_prompt_flops(facts, counts, text, places) for counts in entries)
        return _components(facts, work, decoder, head)

    def paper(prompt: tuple[int, ...], entries: list[tuple[int, ...]]) -> dict[str, float]:
        passes = [(1, counts_of(facts.text, [visual + text for visual in prompt]))]
        for counts in entries:
            keys = [visual + text + places for visual in counts]
            passes.append((1, counts_of(facts.text, [places] * len(counts), keys)))
        return _printed(passes)

    work = Work(*record.work)
    return SampleFlops(
        exact=parts(work, prompt, entering),
        exact_full=parts(work.untouched(), full, [full] * steps),
        paper=paper(prompt, entering),
        paper_full=paper(full, [full] * steps),
    )
