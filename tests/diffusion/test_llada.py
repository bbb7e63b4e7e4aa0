"""LaViDa and LLaDA-V in the loop: pictures of other shapes in one batch, plain and with tokens merged at each step."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord
from espalier.methods.d3tom import D3ToM
from espalier.methods.none import NoReduction
from tests.diffusion.models import denoised
from tests.families.llada import DENOISING, adapter_of
from tests.models.test_llada import expected, reference_of


def answers(name: str, method, ratio: float, rows: list[int]):
    every = DENOISING[name].chats
    chats = [every[row] for row in rows]
    how = {"max_new_tokens": 4, "block_length": 4, "steps": 2, "output_logits": True}
    return denoised(adapter_of(name), method, ratio, chats, every, **how)


@pytest.mark.parametrize("name", ["llada_v", "lavida"])
def test_the_first_step_sees_the_description_s_prompt_and_masks(name: str) -> None:
    reference, facts = reference_of(name), adapter_of(name).facts.diffusion
    generated = answers(name, NoReduction(), 0.0, [0, 1])
    for row in (0, 1):
        masks = reference.words([facts.mask_id] * 4)
        logits = reference.text(torch.cat([expected(name)[row], masks]))[-4:]
        first = generated.logits[row].view(-1, *logits.shape)[0]
        assert float((first - logits).abs().max() / logits.abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["llada_v", "lavida", "lavida_video"])
def test_merging_at_each_step_leaves_a_batch_its_rows(name: str) -> None:
    rows = list(range(len(DENOISING[name].chats)))
    together = answers(name, D3ToM(K=1), 0.5, rows)
    for row in rows:
        alone = answers(name, D3ToM(K=1), 0.5, [row])
        assert (together.logits[row] - alone.logits[0]).abs().max() < 1e-4
        record = together.records[row]
        denoising = DenoisingRecord.from_entry(record.denoising)
        # Halves are rounded up.
        assert denoising.kept == ((record.visual,), ((record.visual + 1) // 2,))
        assert record.denoising == alone.records[0].denoising
