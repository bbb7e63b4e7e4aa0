"""Time of a single-token step, with separate kernel launches and as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter

import torch

from espalier.harness.decoding.speculative.state_machine import Meter
from espalier.harness.engine.text_stack import CudaGraphs, Graphs, TextStack, prefill_words
from espalier.harness.models.adapter import Adapter
from lab.bench.bench_setup import Figure, paired

PART = "graphs"

#: Steps launched before waiting, as in a draft of this many tokens; and repetitions.
AHEAD, REPEATS = 8, 20


@torch.inference_mode()
def steps_with_and_without_graphs(
    adapter: Adapter, lengths: Iterable[int], graphs: Graphs | None = None, repeats: int = REPEATS
) -> list[Figure]:
    """Time steps after prompts of several lengths, both ways in turns.

    Args:
        adapter: a model entirely on one GPU.
        lengths: prompt lengths in tokens.
        graphs: graph recorder; None: CUDA graphs.
        repeats: repetitions per way and length.

    Returns:
        Four figures per length: a step in each way and the first recorded step including recording, in ms; and
        the speed-up of a step as a graph.

    Cost: a prefill each of two caches, and 2 x 8 x `repeats` steps, for each length.
    """
    recorder = graphs or CudaGraphs(adapter.device)
    figures: list[Figure] = []
    for length in lengths:
        plain, recorded = (
            _drafting(adapter, length, graph_recorder) for graph_recorder in (None, recorder)
        )
        start = perf_counter()
        recorded()
        first = 1000 * (perf_counter() - start)
        pair = paired(plain, recorded, repeats)
        ways = ("launched one by one", pair.first), ("as a graph", pair.second)
        context = f"behind {length} tokens"
        figures += [
            Figure(PART, f"a step {context}, {way}", 1000 * median(times) / AHEAD, "ms")
            for way, times in ways
        ]
        figures.append(Figure(PART, f"recording {context}, and {AHEAD} steps", first, "ms"))
        figures.append(pair.figure(PART, f"a graph's gain {context}"))
    return figures


def _drafting(adapter: Adapter, length: int, graphs: Graphs | None) -> Callable[[], None]:
    """Return a function that runs `AHEAD` steps after a prompt, waits for them, and rolls back."""
    stack = TextStack(adapter, AHEAD, graphs)
    ids = torch.arange(length, device=stack.device)[None] % adapter.facts.vocabulary
    _, stack.following = prefill_words(adapter, ids, stack.cache)
    meter, token = Meter.of(adapter.devices), ids[0, :1]
    meter.wait()

    def draft() -> None:
        with stack.folding():
            for place in range(AHEAD):
                stack.run(token, [place])
        meter.wait()
        stack.cache.cut(AHEAD)

    return draft
