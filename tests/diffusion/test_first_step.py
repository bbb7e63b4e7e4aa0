"""RedVTP and FastV of the first step, written out over several steps: one sample, layer by layer, no mask."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.diffusion.answer_flops import run_flops
from espalier.harness.decoding.diffusion.denoising_record import verify_steps
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.errors import Refused
from espalier.methods.base import MethodError
from espalier.methods.fastv_first_step import FastVFirstStep
from espalier.methods.none import NoReduction
from espalier.methods.redvtp import RedVTP
from tests.diffusion import dropping, models
from tests.diffusion.oracle import attention, mlp, reveal
from tests.tiny import CHATS

PLACES, STEPS = 6, 4
REVEALS = (2, 2, 1, 1)


def answers(adapter, method, ratio=0.6, **how):
    how = {"max_new_tokens": PLACES, "steps": STEPS, "output_logits": True, **how}
    return models.denoised(adapter, method, ratio, **how)


@torch.no_grad()
def mean_map(model, x):
    """Return the attention map (L, L) of a whole sequence, mean over layers and heads."""
    stack, maps = model.model.language_model, []
    for layer in stack.layers:
        tables = stack.rotary_emb(x, torch.arange(len(x))[None])
        put_out, a = attention(layer, stack.config, x, tables)
        maps.append(a)
        x = x + put_out
        x = x + mlp(layer, x)
    return sum(maps) / len(maps)


def written_out(adapter, chat, method, keep, renumber):
    """Return the logits of every step, and the visual tokens that later steps see."""
    model = adapter.model
    with DenoisingSession(adapter, NoReduction(), Budget("kept", 0.0)) as session:
        prompt = session.prompt(adapter.encode([chat])).arguments["inputs_embeds"][0]
    visual = adapter.layout(adapter.encode([chat])).visual[0].tolist()
    ids, steps, alive = [models.MASK] * PLACES, [], list(range(len(prompt) + PLACES))
    kept = list(range(len(visual)))
    for count in REVEALS:
        x = torch.cat([prompt, model.get_input_embeddings()(torch.tensor(ids)).detach()])
        last, drops = [len(prompt) - 1], {}
        if not steps and isinstance(method, FastVFirstStep):
            drops = {method.K or len(model.model.language_model.layers) // 2: keep}
        at = list(range(len(alive))) if renumber else alive
        staying = [at[alive.index(visual[j])] for j in kept]
        logits, chosen, _ = dropping.step(model, x[alive].clone(), staying, PLACES, last, drops, at)
        first = not steps
        steps.append(logits)
        reveal(ids, logits, range(PLACES), count)
        if first:
            if isinstance(method, RedVTP):
                a, left = mean_map(model, x), [p for p in range(PLACES) if ids[p] == models.MASK]
                scores = [sum(float(a[len(prompt) + p, j]) for p in left) for j in visual]
                ranks = sorted(range(len(visual)), key=lambda j: (-scores[j], j))
                chosen = sorted(ranks[:keep])
            kept = chosen
            gone = set(visual) - {visual[j] for j in kept}
            alive = [place for place in alive if place not in gone]
    return torch.cat(steps), kept


@pytest.mark.sampled(18)
@pytest.mark.parametrize("positions", ["original", "method"])
@pytest.mark.parametrize("method", [RedVTP(), FastVFirstStep(), FastVFirstStep(K=1)])
def test_every_step_is_the_loop_written_out(adapter, method, positions) -> None:
    """In a batch of prompts of different lengths, and alone."""
    together = answers(adapter, method, positions=positions)
    renumber = positions == "method" and isinstance(method, RedVTP)
    for row, chat in enumerate(CHATS):
        record = together.records[row]
        keep = record.denoising["kept"][-1][-1]
        assert keep == (int(0.4 * record.visual + 1e-9) if renumber else keep) > 0
        expected, kept = written_out(adapter, chat, method, keep, renumber)
        assert record.origin.tolist() == kept
        assert [len(origin) for origin in record.origins[1:]] == [keep] * (STEPS - 1)
        assert (together.logits[row] - expected).abs().max() < 1e-9
        alone = answers(adapter, method, chats=[chat], positions=positions)
        assert torch.equal(alone.ids[0], together.ids[row])


@pytest.mark.parametrize(("method", "first"), [(RedVTP(), [16]), (FastVFirstStep(K=2), [16, 8])])
def test_what_a_ratio_and_a_count_mean(adapter, method, first) -> None:
    """The first step keeps all tokens before the decoder; later ones have the choice at every site."""
    for budget in (Budget("kept", 0.5), Budget.of_count("kept", 8, adapter.facts)):
        (record,) = answers(adapter, method, chats=CHATS[:1], budget=budget).records
        assert record.visual == 16
        assert record.denoising["kept"] == [first] + [[8] * len(first)] * (STEPS - 1)
        assert verify_steps(method, budget, adapter.facts, record)["kept"] == 8
        flops = run_flops(method, adapter.facts, record)
        entering = [(16 + 16 + 8 * 3) / 5 if len(first) == 2 else 16.0, *[8.0] * (STEPS - 1)]
        assert record.denoising["entering"] == pytest.approx(entering)
        assert flops.exact.text < flops.exact_full.text


def test_an_answer_by_confidence_keeps_the_first_choice(adapter) -> None:
    for method in (RedVTP(), FastVFirstStep()):
        generated = answers(adapter, method, threshold=0.02, steps=None, output_logits=False)
        for record in generated.records:
            assert len({tuple(origin.tolist()) for origin in record.origins[1:]}) <= 1


def test_what_the_first_steps_choice_cannot_do(adapter) -> None:
    with pytest.raises(Refused, match=r"leaves no states .* for RedVTP to act on"):
        answers(adapter, RedVTP(), prefix_cache=True)
    with pytest.raises(Refused, match=r"prompt_interval=2 leaves no states .* for FastVFirstStep"):
        answers(adapter, FastVFirstStep(), prompt_interval=2)
    with pytest.raises(Refused, match=r"budget='average' cannot be followed by FastVFirstStep"):
        step_budgets(FastVFirstStep(K=2), Budget("average", 0.5), adapter.facts, 4)
    with DenoisingSession(adapter, RedVTP(), Budget("kept", 0.5)) as session:
        prompt = session.prompt(adapter.encode(CHATS[:1]))
        ids = torch.full((1, PLACES), models.MASK)
        answer = AnswerState(ids, ids != models.MASK, 3)
        with pytest.raises(MethodError, match="available after a first denoising step"):
            session.denoise(prompt, answer, ["0"], Budget("kept", 0.5))
