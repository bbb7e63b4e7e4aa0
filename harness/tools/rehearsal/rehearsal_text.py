"""A rehearsal in lines, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from espalier.harness.runs.cluster.resources import Span, gpu_kinds, reached
from espalier.harness.tools.rehearsal.rehearse import GIB, Counts, Rehearsal

#: A line's name takes so many columns.
WIDTH = 14


def lines_of(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield the lines of a rehearsal."""
    spec, record, cards = rehearsal.spec, rehearsal.record, rehearsal.cards
    medium = "a picture of 1024 x 768"
    if rehearsal.video_frames is not None:
        medium = f"a video of {rehearsal.video_frames} frames"
    budget = spec.budget
    yield (
        f"{spec.model.name}, {spec.method.title} {spec.method.variant}, ratio {budget.ratio:g} ({budget.rule}), "
        f"{medium}: rehearsed on simulated cards, without weights"
    )
    kept = ", ".join(f"{count:,}" for count in record.kept) or f"{record.visual:,}"
    requested = ", ".join(f"{count:,}" for count in record.requested) or "all"
    tokens = f"{record.visual:,} visual and {record.text:,} others; asked to keep {requested}, kept {kept}"
    yield _line("tokens", tokens)
    room = rehearsal.room / GIB
    for number, card in enumerate(cards):
        weights, between, tower, peak = (f"{size / GIB:.2f}" for size in vars(card).values())
        suffix = "" if card.peak <= rehearsal.room else ": DOES NOT FIT"
        sizes = f"weights {weights}, between steps {between} more, peak of the tower {tower}, of all {peak}"
        yield _line(f"card {number}", f"{sizes} of {room:.0f} GiB{suffix}")
    stack, shares = spec.model.facts.text, reached()
    launch = shares.launch_of(stack).times(stack.layers)
    yield _line("prompt", _work(rehearsal.prompt, shares.products, launch))
    yield _line("each step", _work(rehearsal.step, shares.reads, launch))
    limits = []
    if rehearsal.batch is not None:
        size = f"engine.batch_size={spec.engine.batch_size}"
        limits = [f"{rehearsal.batch:,} rows of this prompt ({size})"]
    if rehearsal.frames is not None:
        limits.append(f"a video of {rehearsal.frames:,} frames")
    yield _line("at most", " or ".join(limits) or "one answer at a time")
    name = next((name for name, kind in gpu_kinds().items() if kind.flops == rehearsal.kind.flops))
    yield (
        f"Times are a range of the roofline by the peaks of {name} and what runs reach of them (conf/gpus.yaml), not "
        "measured. Peaks are of tensors; allocator and libraries take more."
    )


def _line(name: str, text: str) -> str:
    return f"{name:{WIDTH}} {text}"


def _work(counts: Counts, shares: Span, launch: Span) -> str:
    """Return counts, and the time between the best and the worst share of peaks, at least that of the launches."""
    times = [
        max(counts.seconds * share, start) for share, start in zip(shares, launch, strict=True)
    ]
    return (
        f"{counts.kernels:,.0f} kernels; {counts.reads:.3g} reads, {counts.uploads:.3g} uploads, "
        f"{counts.moves:.3g} moves, {counts.waits:.3g} waits; {counts.flops / 1e12:.3g} TFLOPs, "
        f"{counts.traffic / 1e9:.3g} GB; {times[0]:.2g} to {times[1]:.2g} s"
    )
