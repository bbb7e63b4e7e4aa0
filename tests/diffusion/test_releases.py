"""Whole answers compared with the loops of LLaDA-V, LaViDa and Fast-dLLM written out, row by row and place by place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord, verify_steps
from espalier.harness.decoding.diffusion.denoising_settings import Denoising, counts
from espalier.harness.engine.denoising_steps import DenoisingSession
from espalier.harness.errors import UserError
from espalier.harness.specs.generation import settings
from espalier.methods.d3tom import D3ToM
from espalier.methods.d3tom_t import D3ToMT
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from tests import commands
from tests.diffusion import models
from tests.diffusion.oracle import reveal
from tests.tiny import CHATS

LENGTH, BLOCK = 12, 6
#: Texts to fill: strings and numbers of masked places.
TEXTS = ((4, "ab", 2, "c", 3), ("a", 1, "b ", 4, "</s>"))
#: Logits of tokens that stop an answer are raised by this much, so that random weights say them.
LIFT = 4.0


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    loaded = models.load(models.save(tmp_path_factory.mktemp("tiny")))
    head = loaded.model.lm_head
    with torch.no_grad():
        words = loaded.processor.tokenizer.encode("w", add_special_tokens=False)
        head.weight[[models.END, *words]] += LIFT * head.weight.std()
    return loaded


def answers(adapter, chats, method=None, ratio=0.0, **how):
    how = {"max_new_tokens": LENGTH, "block_length": BLOCK, **how}
    return models.denoised(adapter, method, ratio, chats, **how)


class Model:
    """Logits of one row's answer places, over the words that may be said."""

    def __init__(self, adapter, chat) -> None:
        self.adapter = adapter
        with DenoisingSession(adapter, NoReduction(), Budget("kept", 0.0)) as session:
            self.prompt = session.prompt(adapter.encode([chat])).arguments["inputs_embeds"]

    @torch.inference_mode()
    def logits(self, ids):
        words = self.adapter.model.get_input_embeddings()(torch.tensor([ids]))
        states = self.adapter.decoder(
            inputs_embeds=torch.cat([self.prompt, words], 1), use_cache=False
        ).last_hidden_state
        logits = self.adapter.model.lm_head(states[:, -len(ids) :])[0]
        logits[:, [models.MASK, *models.DIFFUSION.forbidden_ids]] = -torch.inf
        return logits


def text_and_draft(adapter, mask, parts) -> tuple[str, list[int]]:
    """A text with marks, and what the release's script passes as `draft_tokens`: its tokens, with masks."""
    encode = adapter.processor.tokenizer.encode
    text = "".join(
        part if isinstance(part, str) else "<mask>" if part == 1 else f"<mask:{part}>"
        for part in parts
    )
    tokens = [
        encode(part, add_special_tokens=False) if isinstance(part, str) else [mask] * part
        for part in parts
    ]
    return text, [token for part in tokens for token in part]


def sequence_at(ids, sequence):
    """The first place of a sequence; None without it."""
    for place in range(len(ids) - len(sequence) + 1):
        if ids[place : place + len(sequence)] == sequence:
            return place
    return None


def llada_v(model, steps, stops):
    """LLaDA-V's `generate_with_embeds`: words, and the states that the model saw."""
    ids, stop, stopped, seen = [models.MASK] * LENGTH, LENGTH, False, []
    per_block = steps // (LENGTH // BLOCK)
    for start in range(0, LENGTH, BLOCK):
        if stopped and stop <= start:
            break
        for count in counts("linear", BLOCK, per_block):
            if stopped and models.MASK not in ids[:stop]:
                break
            if models.MASK not in ids[start : start + BLOCK]:
                break
            seen.append(list(ids))
            reveal(ids, model.logits(ids), range(stop if stopped else start + BLOCK), count)
            for sequence in stops:
                place = sequence_at(ids, sequence)
                if place is not None and (not stopped or place < stop):
                    stop, stopped = place, True
                if stopped:
                    break
    return ids[:stop] if stopped else ids, seen


def lavida(model, steps, remasking="low_confidence", schedule="linear", draft=None):
    """LaViDa's `generate`: all places get words, and nothing stops; `draft` is filled as one block."""
    ids, seen = list(draft or [models.MASK] * LENGTH), []
    size = BLOCK if draft is None else len(draft)
    per_block = steps // (len(ids) // size)
    for start in range(0, len(ids), size):
        to_fill = ids[start : start + size].count(models.MASK)
        for count in counts(schedule, to_fill, min(per_block, to_fill)):
            seen.append(list(ids))
            p = model.logits(ids).softmax(-1)
            word = p.argmax(-1)
            two = p.topk(2, -1).values
            sure = {
                "low_confidence": two[:, 0],
                "entropy": (p * (p + 1e-10).log()).sum(-1),
                "margin": two[:, 0] - two[:, 1],
            }[remasking]
            masked = [p for p in range(start, start + size) if ids[p] == models.MASK]
            for place in sorted(masked, key=lambda p: -float(sure[p]))[:count]:
                ids[place] = int(word[place])
    return ids, seen


def fast_dllm(model, threshold):
    """Fast-dLLM's `get_transfer_index` with a threshold: the surest place, and all others that reach it."""
    ids, seen = [models.MASK] * LENGTH, []
    for start in range(0, LENGTH, BLOCK):
        while models.MASK in ids[start : start + BLOCK]:
            seen.append(list(ids))
            sure, word = model.logits(ids).softmax(-1).max(-1)
            masked = [p for p in range(start, start + BLOCK) if ids[p] == models.MASK]
            ranked = sorted(masked, key=lambda p: -float(sure[p]))
            for place in [ranked[0], *(p for p in ranked[1:] if sure[p] >= threshold)]:
                ids[place] = int(word[place])
    return ids, seen


def states_of(monkeypatch):
    """Record the words of all rows before each step."""
    seen = []
    denoise = DenoisingSession.denoise

    def watched(self, prompt, answer, samples, budget):
        seen.append(answer.ids.clone())
        return denoise(self, prompt, answer, samples, budget)

    monkeypatch.setattr(DenoisingSession, "denoise", watched)
    return seen


def compare(adapter, monkeypatch, loop, **how):
    """Compare a batch and each row alone with a loop, step by step; return the rows' steps and answers."""
    rows = []
    states = states_of(monkeypatch)
    together = answers(adapter, CHATS, **how)
    batch_states = list(states)
    for row, chat in enumerate(CHATS):
        expected, seen = loop(Model(adapter, chat))
        states.clear()
        alone = answers(adapter, [chat], **how)
        assert [state[0].tolist() for state in states] == seen
        assert [state[row].tolist() for state in batch_states[: len(seen)]] == seen
        for generated, number in ((alone, 0), (together, row)):
            length = generated.records[number].new_tokens
            # The end token itself counts as a token of the answer.
            assert generated.ids[number, : len(expected)].tolist() == expected
            assert length - len(expected) in (0, 1)
            denoising = DenoisingRecord.from_entry(generated.records[number].denoising)
            assert len(denoising.kept) == len(denoising.reveals) == len(seen)
        assert alone.records[0].denoising == together.records[row].denoising
        rows.append((seen, expected))
    return rows


@pytest.mark.sampled
@pytest.mark.parametrize("words", [(), ("w",), ("w", "ww")])
@pytest.mark.parametrize("steps", [12, 6])
def test_places_behind_a_stop_freeze_as_in_llada_v(adapter, monkeypatch, words, steps) -> None:
    tokenizer = adapter.processor.tokenizer
    stops = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    rows = compare(
        adapter,
        monkeypatch,
        lambda model: llada_v(model, steps, [*stops, [models.END]]),
        stop="freeze",
        steps=steps,
        **({"stop_words": list(words)} if words else {}),
    )
    assert any(len(seen) < steps for seen, _ in rows)  # Some answer is complete early.


@pytest.mark.parametrize(
    ("remasking", "schedule"),
    [
        ("low_confidence", "linear"),
        ("entropy", "shift"),
        ("margin", "cosine"),
        ("low_confidence", "logit_normal"),
    ],
)
def test_nothing_stops_lavida(adapter, monkeypatch, remasking, schedule) -> None:
    rows = compare(
        adapter,
        monkeypatch,
        lambda model: lavida(model, 4, remasking, schedule),
        stop="none",
        steps=4,
        remasking=remasking,
        schedule=schedule,
    )
    assert any(models.END in expected[:-1] for _, expected in rows)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["linear", "shift"])
@pytest.mark.parametrize("steps", [9, 4])
@pytest.mark.parametrize("parts", TEXTS)
def test_a_text_is_filled_as_with_lavidas_draft(
    adapter, monkeypatch, parts, steps, schedule
) -> None:
    """`predict_fim.py`; the text is the whole answer, whatever `max_new_tokens`."""
    text, draft = text_and_draft(adapter, models.MASK, parts)
    masked = draft.count(models.MASK)
    rows = compare(
        adapter,
        monkeypatch,
        lambda model: lavida(model, min(steps, masked), schedule=schedule, draft=draft),
        stop="none",
        infill=text,
        schedule=schedule,
        steps=min(steps, masked),
    )
    for _, expected in rows:
        assert all(
            token in (word, models.MASK) for token, word in zip(draft, expected, strict=True)
        )


@pytest.mark.parametrize("how", [{"threshold": 0.2}, {"block_cache": True}, {"prefix_cache": True}])
def test_a_text_is_filled_with_every_way_to_run_steps(adapter, how) -> None:
    text, draft = text_and_draft(adapter, models.MASK, TEXTS[0])
    method = FastV(K=2) if "block_cache" in how else D3ToM(K=1)
    together = answers(adapter, CHATS, method, 0.5, infill=text, stop="none", **how)
    for words in together.ids.tolist():
        assert models.MASK not in words
        assert all(token in (word, models.MASK) for token, word in zip(draft, words, strict=True))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("threshold", [0.02, 0.2, 1.0])
def test_a_threshold_unmasks_what_is_sure(adapter, monkeypatch, threshold) -> None:
    """Rows take different numbers of steps, and go on to their next block by themselves."""
    rows = compare(
        adapter,
        monkeypatch,
        lambda model: fast_dllm(model, threshold),
        stop="none",
        threshold=threshold,
    )
    assert {len(seen) for seen, _ in rows} == {LENGTH} or threshold < 1


def test_a_cut_answer_is_the_first_words_of_one_that_nothing_stops(adapter) -> None:
    for row, chat in enumerate(CHATS):
        whole = answers(adapter, [chat], stop="none", steps=6).ids[0].tolist()
        cut = answers(adapter, CHATS, stop="cut", steps=6)
        length = cut.records[row].new_tokens
        assert cut.ids[row, :length].tolist() == whole[:length]
        assert length == (whole.index(models.END) + 1 if models.END in whole else LENGTH)


def test_random_places_are_those_of_the_sample(adapter) -> None:
    how = {"remasking": "random", "steps": 6, "stop": "none"}
    together = answers(adapter, CHATS, **how)
    for row, chat in enumerate(CHATS):
        assert answers(adapter, [chat], **how).ids[0].tolist() == together.ids[row].tolist()
    assert any(
        not torch.equal(answers(adapter, CHATS, seed=seed, **how).ids, together.ids)
        for seed in (1, 2)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_that_ends_early_keeps_to_its_budgets(adapter, temperature) -> None:
    method, budget = D3ToMT(K=1), Budget("kept", 0.5)
    how = {"stop": "freeze", "steps": 12, "temperature": temperature}
    together = answers(adapter, CHATS, method, 0.5, **how)
    for row, chat in enumerate(CHATS):
        alone = answers(adapter, [chat], method, 0.5, **how)
        assert (
            alone.ids[0].tolist()[: alone.records[0].new_tokens]
            == (together.ids[row].tolist()[: alone.records[0].new_tokens])
        )
        assert alone.records[0].denoising == together.records[row].denoising
        verify_steps(method, budget, adapter.facts, together.records[row])


@pytest.mark.parametrize(
    ("method", "ratio", "prefix_cache", "rows"),
    [
        (NoReduction(), 0.0, True, 3),
        (NoReduction(), 0.0, False, 1),
        (D3ToM(K=1), 0.6, True, 3),
        (FastV(), 0.6, True, 3),
    ],
)
def test_each_step_reads_the_device_once(
    adapter, monkeypatch, method, ratio, prefix_cache, rows
) -> None:
    """Whatever the layers and rows; layouts, records and a first choice are read once a run."""
    reads = []
    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__"):
        read = getattr(torch.Tensor, name)

        def counted(self, *args, read=read, **kwargs):
            reads.append(read)
            return read(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    per_run = []
    for steps in (4, 12):
        reads.clear()
        how = {"stop": "none", "steps": steps, "prefix_cache": prefix_cache}
        answers(adapter, CHATS[:rows], method, ratio, **how)
        per_run.append(len(reads))
    assert per_run[1] - per_run[0] == 8


def test_a_prompt_and_its_answer_fit_the_positions(adapter) -> None:
    limit = adapter.decoder.config.max_position_embeddings
    with pytest.raises(UserError, match=f"max_new_tokens={limit}: a prompt has .* valid: at most"):
        answers(adapter, CHATS, max_new_tokens=limit, block_length=limit, steps=limit)


def test_the_released_share_starts_again_with_each_block() -> None:
    shares = D3ToMT(direction="released").block_ratios(0.75, 8, 2)
    assert shares == (0.0, 0.875, 0.75, 0.625, 1.0, 0.875, 0.75, 0.625)


# ---------------------------------------------------------------------- settings of the releases


def denoising_of(*argv: str) -> Denoising:
    spec = commands.spec_of("model.weights=random", *argv)
    return Denoising.of(spec.generation, spec.model.facts.diffusion)


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("model", "benchmark", "expected"),
    [
        ("llada_v_8b", "mmmu", (2, 2, 2, "freeze", ())),
        ("llada_v_8b", "mme", (2, 2, 2, "freeze", ())),
        ("llada_v_8b", "chartqa", (16, 16, 16, "freeze", ("\n",))),
        ("llada_v_8b", "infovqa", (32, 32, 16, "freeze", ())),
        ("llada_v_8b", "vqav2", (128, 128, 128, "freeze", ())),
        ("lavida_llada_8b", "mmmu", (16, 16, 16, "none", ())),
        ("lavida_llada_8b", "mmbench_en", (100, 100, 100, "none", ())),
        ("lavida_llada_8b", "mmstar", (256, 128, 256, "none", ())),
        ("lavida_llada_8b", "mathvision", (1024, 128, 1024, "none", ())),
        ("lavida_llada_8b", "mathvision_testmini", (1024, 2, 1024, "none", ())),
        ("lavida_dream_7b", "mmmu", (16, 16, 16, "none", ())),
        ("lavida_dream_7b", "mmstar", (256, 256, 256, "none", ())),
        ("lavida_dream_7b", "mathvision", (1024, 1024, 512, "none", ())),
        ("lavida_dream_7b", "mathvision_testmini", (1024, 1024, 512, "none", ())),
        ("seedling_diffusion", "seedling_caption", (16, 16, 16, "cut", ())),
    ],
)
def test_lengths_are_those_of_the_releases(model, benchmark, expected) -> None:
    how = denoising_of(f"model={model}", f"benchmark={benchmark}")
    assert (how.length, how.block, how.steps, how.stop, how.stop_words) == expected
    dream = model == "lavida_dream_7b"
    assert (how.schedule, how.temperature) == ("timesteps" if dream else "linear", 0.0)
    assert (how.remasking, how.prefix_cache) == (
        ("margin", True) if dream else ("low_confidence", False)
    )


def test_the_set_of_d3tom_is_its_call_and_its_table() -> None:
    model = ("model=lavida_llada_8b", "model.prompt=d3tom")
    call = denoising_of(*model, "benchmark=chartqa")
    assert call == Denoising(128, 128, 64, "shift", 3.0, 0.3, stop="none")
    assert denoising_of(*model, "benchmark=mathvision") == Denoising(100, 100, 50, stop="none")


def test_a_tasks_limit_of_words_is_no_number_of_places() -> None:
    task = {"max_new_tokens": 16384, "num_beams": 5, "top_p": 0.9, "until": ["\n"], "steps": 4}
    read = settings(task, {"repetition_penalty": 1.0}, {}, denoises=True)
    assert read.until == ("\n",)
    how = Denoising.of(read.generate, replace(models.DIFFUSION, length=32, block=8))
    assert (how.length, how.block, how.steps) == (32, 8, 4)
    assert settings(task).generate["max_new_tokens"] == 16384
