"""Which places of an answer get their word at a step: rows of a batch that end at other steps, as each alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.decoding.diffusion.denoising_loop import AnswerProgress
from espalier.harness.decoding.diffusion.denoising_settings import Denoising

MASK, END = 99, 7
FACTS = DiffusionFacts(mask_id=MASK, end_ids=(END,))


def finished(
    settings: Denoising, words: Tensor, confidences: Tensor, rows: list[int]
) -> list[list[list[int]]]:
    """Return the words of each row after each of its steps, until it is complete, for the rows together."""
    ids = torch.full((len(rows), settings.length), MASK)
    progress = AnswerProgress(ids, settings, FACTS, [(END,)], [torch.Generator() for _ in rows])
    seen: list[list[list[int]]] = [[] for _ in rows]
    for step in range(settings.length):
        left = list(progress.remaining)
        if not any(left):
            break
        places = progress.places()
        confidence = confidences[rows, step].gather(1, places)
        counts = progress.unmask(places, words[rows].gather(1, places), confidence)
        progress.advance(counts[0].tolist(), counts[1].tolist())
        for row, remaining in enumerate(left):
            if remaining:
                seen[row].append(progress.ids[row].tolist())
    return seen


@pytest.mark.parametrize("threshold", [None, 0.95])
def test_a_row_takes_the_steps_that_it_takes_alone(threshold: float | None) -> None:
    settings = Denoising(4, 4, 4, stop="freeze", threshold=threshold)
    words = torch.tensor([[1, 2, 3, 4], [5, END, 5, 5]])
    confidences = torch.tensor(
        [
            [[0.5, 0.4, 0.3, 0.2]] * 4,
            # Its stop comes first; then its decided and frozen places are surer than the open one.
            [[0.1, 0.9, 0.3, 0.2], *[[0.1, 0.9, 0.8, 0.7]] * 3],
        ]
    )
    together = finished(settings, words, confidences, [0, 1])
    assert together == [finished(settings, words, confidences, [row])[0] for row in (0, 1)]
    assert together[1] == [[MASK, END, MASK, MASK], [5, END, MASK, MASK]]
