"""Positions that predict the next token, as Dream's do; LaViDa-Dream's answers compared with its loop written out."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from transformers import DynamicCache

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord, verify_steps
from espalier.harness.engine.denoising_steps import DenoisingSession
from espalier.harness.errors import Refused
from espalier.harness.specs.catalogue import build_method
from espalier.methods.d3tom import D3ToM
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from tests.diffusion import models, oracle
from tests.diffusion.test_releases import text_and_draft
from tests.diffusion.test_step import LENGTH, answering, plain
from tests.families.llada import DENOISING, adapter_of
from tests.tiny import CHATS

PLACES = 12
#: The release's evaluation: `alg=topk_margin,prefix_lm=True`.
RELEASED = {
    "max_new_tokens": PLACES,
    "schedule": "timesteps",
    "remasking": "margin",
    "prefix_cache": True,
    "stop": "none",
}
ALGS = {"maskgit_plus": "low_confidence", "topk_margin": "margin", "entropy": "entropy"}


# ---------------------------------------------------------------------- steps


def one_step(adapter, method, ratio, path):
    answer, budget, names = answering(3), Budget("kept", ratio), ["0", "1", "2"]
    with DenoisingSession(adapter, method, budget) as session:
        prompt = session.prompt(adapter.encode(CHATS))
        if path == "cached":
            cached = session.cache_prompt(prompt, names, LENGTH)
            return session.denoise_cached(cached, answer, names, budget)[0], cached
        if path == "stored":
            stored = session.store(prompt, answer, names, budget, range(2, 5))
            session.denoise_window(stored, answer)
            return session.logits_of(stored, answer), None
        return session.denoise(prompt, answer, names, budget)[0], None


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *product((NoReduction(), FastV(K=2)), ("whole", "cached", "stored")),
        *product((D3ToM(K=1),), ("whole", "cached")),
    ],
)
def test_a_place_is_predicted_by_the_position_before_it(folder, method, path) -> None:
    """The first place by the prompt's last token."""
    plain_logits, _ = one_step(models.load(folder), method, 0.5, path)
    adapter = models.load(folder, shifted=True)
    shifted, cached = one_step(adapter, method, 0.5, path)
    assert (shifted[:, 1:] - plain_logits[:, :-1]).abs().max() < 1e-12
    assert (shifted[:, 0] - plain_logits[:, 0]).abs().max() > 1e-3
    if cached is not None:
        with torch.inference_mode():
            first = adapter.model.lm_head(cached.last)
        assert (shifted[:, :1] - first).abs().max() < 1e-12


def test_the_prompts_last_token_predicts_the_first_place(folder) -> None:
    """In a merged step as the equations have it, and in the plain model."""
    adapter, method, answer = models.load(folder, shifted=True), D3ToM(K=1), answering(1)
    for chat in CHATS[:2]:
        x, _ = plain(adapter, [chat], answer)
        visual = adapter.layout(adapter.encode([chat])).visual[0].tolist()
        deciders = [x.shape[1] - LENGTH + p for p in answer.deciders[0].nonzero()[:, 0].tolist()]
        for ratio in (0.0, 0.5):
            keep = len(visual) - int(ratio * len(visual))
            expected, _ = oracle.step(
                adapter.model, x[0].clone(), visual, deciders, LENGTH + 1, method, keep
            )
            with DenoisingSession(adapter, method, Budget("kept", ratio)) as session:
                prompt = session.prompt(adapter.encode([chat]))
                logits, _ = session.denoise(prompt, answer, ["0"], Budget("kept", ratio))
            assert (logits[0] - expected[:-1]).abs().max() < 1e-9


# ---------------------------------------------------------------------- answers


def answers(chats, method=None, ratio=0.0, **how):
    every = DENOISING["lavida_dream"].chats
    how = {**RELEASED, **how}
    return models.denoised(adapter_of("lavida_dream"), method, ratio, chats, every, **how)


class Release:
    """Logits of one row's places, shifted, as LaViDa-Dream's `_sample` has them, and its loop, one place at a time."""

    def __init__(self, chat, cached: bool) -> None:
        self.adapter, self.cached = adapter_of("lavida_dream"), cached
        self.facts = self.adapter.facts.diffusion
        with DenoisingSession(self.adapter, NoReduction(), Budget("kept", 0.0)) as session:
            prompt = session.prompt(self.adapter.encode([chat]))
        self.prompt = prompt.arguments["inputs_embeds"]
        self.cache = DynamicCache()
        self.first = self.head(self.run(self.prompt, self.cache))[-1]

    @torch.inference_mode()
    def run(self, embeddings, cache=None):
        stack = self.adapter.decoder
        return stack(inputs_embeds=embeddings, past_key_values=cache, use_cache=cache is not None)

    @torch.inference_mode()
    def head(self, output):
        logits = self.adapter.model.lm_head(output.last_hidden_state)[0]
        logits[:, list(self.facts.silent_ids)] = -torch.inf
        return logits

    def logits(self, ids):
        words = self.adapter.model.get_input_embeddings()(torch.tensor([ids]))
        if self.cached:
            logits = self.head(self.run(words, copy.deepcopy(self.cache)))
            return torch.cat([logits[:1], logits[:-1]])
        logits = self.head(self.run(torch.cat([self.prompt, words], 1)))
        return torch.cat([logits[:1], logits[:-1]])[-len(ids) :]

    def loop(self, steps, alg, draft_ids=None):
        """Return the answer, and the states before every step that unmasks a place."""
        mask = self.facts.mask_id
        ids = [mask] * len(draft_ids or range(PLACES))
        if self.cached:
            ids[0] = int(self.first.argmax())
        # The hook that sets tokens runs after the first word.
        ids = [
            token if token != mask else word
            for token, word in zip(draft_ids or ids, ids, strict=True)
        ]
        times, seen = torch.linspace(1, 1e-3, steps + 1), []
        for i in range(steps):
            masked = [place for place in range(len(ids)) if ids[place] == mask]
            t, s = times[i], times[i + 1]
            count = int(torch.tensor(len(masked)) * (1 - s / t)) if i < steps - 1 else len(masked)
            if count:
                seen.append(list(ids))
            p = self.logits(ids)[masked].softmax(-1)
            ordered = p.sort(-1, descending=True).values
            sure = {
                "maskgit_plus": ordered[:, 0],
                "topk_margin": ordered[:, 0] - ordered[:, 1],
                "entropy": (p * (p + 1e-10).log()).sum(-1),
            }[alg]
            for number in sure.argsort(descending=True, stable=True)[:count].tolist():
                ids[masked[number]] = int(p[number].argmax())
        return ids, seen


@pytest.mark.sampled(30)
@pytest.mark.parametrize("alg", ALGS)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("steps", [PLACES, PLACES // 2])
def test_greedy_answers_are_those_of_the_release(monkeypatch, alg, cached, steps) -> None:
    """Step by step, in a batch and alone; the release's steps that unmask nothing are not run."""
    states = []
    for name in ("denoise", "denoise_cached"):
        step = getattr(DenoisingSession, name)

        def watched(self, prompt, answer, *rest, step=step):
            states.append(answer.ids.clone())
            return step(self, prompt, answer, *rest)

        monkeypatch.setattr(DenoisingSession, name, watched)
    how = {"remasking": ALGS[alg], "prefix_cache": cached, "steps": steps}
    chats = DENOISING["lavida_dream"].chats
    together = answers(chats, **how)
    of_batch = list(states)
    for row, chat in enumerate(chats):
        ids, seen = Release(chat, cached).loop(steps, alg)
        states.clear()
        alone = answers([chat], **how)
        assert alone.ids[0].tolist() == together.ids[row].tolist() == ids
        assert [state[0].tolist() for state in states] == seen
        assert [state[row].tolist() for state in of_batch] == seen
        denoising = DenoisingRecord.from_entry(alone.records[0].denoising)
        assert denoising == DenoisingRecord.from_entry(together.records[row].denoising)
        assert denoising.planned == len(seen) < steps + (steps < PLACES)
        assert sum(denoising.reveals) == PLACES - cached


@pytest.mark.slow
def test_places_of_origin_have_their_own_steps() -> None:
    """Rows take different numbers of steps for a block, the same alone as in a batch."""
    chats = DENOISING["lavida_dream"].chats
    how = {"schedule": "origin", "remasking": "random", "block_length": 6, "steps": 8}
    together = answers(chats, prefix_cache=False, **how)
    counts = []
    for row, chat in enumerate(chats):
        alone = answers([chat], prefix_cache=False, **how)
        assert alone.ids[0].tolist() == together.ids[row].tolist()
        assert alone.records[0].denoising == together.records[row].denoising
        counts.append(tuple(alone.records[0].denoising["reveals"]))
        assert min(counts[-1]) > 0
        assert sum(counts[-1]) == PLACES
        assert len(counts[-1]) <= alone.records[0].denoising["planned"] == 8
    assert len(set(counts)) > 1
    with pytest.raises(Refused, match=r"schedule='origin'.* engine\.batch_size=1"):
        answers(chats, prefix_cache=False, block_cache=True, **how)


@pytest.mark.sampled
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("parts", [(3, "ab", 2), ("a", 4, "b", 1, "c")])
def test_texts_are_filled_as_with_the_hook_that_sets_tokens(parts, cached) -> None:
    """Dream's `generation_tokens_hook_func`, in the release's loop; other tokens stay."""
    adapter, chats = adapter_of("lavida_dream"), DENOISING["lavida_dream"].chats
    mask = adapter.facts.diffusion.mask_id
    text, draft_ids = text_and_draft(adapter, mask, parts)
    assert draft_ids.count(mask) == 5
    together = answers(chats, infill=text, prefix_cache=cached)
    for row, chat in enumerate(chats):
        ids, seen = Release(chat, cached).loop(5, "topk_margin", draft_ids)
        alone = answers([chat], infill=text, prefix_cache=cached)
        assert alone.ids[0].tolist() == together.ids[row].tolist() == ids
        assert all(token in (word, mask) for token, word in zip(draft_ids, ids, strict=True))
        denoising = DenoisingRecord.from_entry(alone.records[0].denoising)
        assert (denoising.length, len(denoising.reveals)) == (len(draft_ids), len(seen))
        assert denoising.says_first == (cached and draft_ids[0] == mask)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("label", "cached"),
    [
        *product(("d3tom", "d3tom_t", "fastv"), (True, False)),
        *product(("fastv_denoising", "redvtp", "fastv_first_step"), (False,)),
    ],
)
def test_reducers_keep_to_their_budgets(label, cached) -> None:
    """At ratio 0 to the bit the plain model; in a batch as alone."""
    adapter, chats = adapter_of("lavida_dream"), DENOISING["lavida_dream"].chats
    method = build_method(label, {"K": 2} if label == "fastv_first_step" else {})
    how = {"prefix_cache": cached, "output_logits": True}
    whole, none = answers(chats, method, 0.0, **how), answers(chats, **how)
    assert torch.equal(whole.ids, none.ids)
    assert torch.equal(whole.logits, none.logits)
    together = answers(chats, method, 0.5, **how)
    assert not torch.equal(together.logits, none.logits)
    for row, chat in enumerate(chats):
        alone = answers([chat], method, 0.5, **how)
        assert (together.logits[row] - alone.logits[0]).abs().max() < 1e-10
        assert together.ids[row].tolist() == alone.ids[0].tolist()
        assert together.records[row].denoising == alone.records[0].denoising
        verify_steps(method, Budget("kept", 0.5), adapter.facts, together.records[row])
