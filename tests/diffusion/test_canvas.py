"""DiffusionGemma: the class's own answers, dropping against masks by hand, FLOPs, steps, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

import espalier
from espalier.harness.cost.budget import Budget
from espalier.harness.cost.flops import text_flops
from espalier.harness.decoding.diffusion.answer_flops import canvas_flops
from espalier.harness.engine.finite_logits import NonFiniteLogits
from espalier.harness.engine.prefill import Decision
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.diffusion_gemma import DiffusionGemmaAdapter
from espalier.methods.none import NoReduction
from tests.families.diffusion_gemma import CANVAS, CHATS, SPEC, WINDOW, loaded, saved
from tests.methods.cases import CASES, DEPTH, build, case_id, signals_of
from tests.tiny import Scatter, chat, load_tiny, picture

NONE, MOST = Budget("kept", 0.0), Budget("kept", 0.6)
PLACES = [("prefix",), ("vision",), (0,), (2,), (1, 3)]
ROWS = [(0, 1, 2), (0,), (1,)]
#: Three canvases of four steps at most.
LONG = {"max_new_tokens": 3 * CANVAS, "max_denoising_steps": 4}
#: D2Pruner's prior of one view.
PRIOR = (torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) + 0.1,)
#: Two canvases that may end early: a threshold at which the rows end at different steps.
SOON = {
    **{"max_new_tokens": 2 * CANVAS, "max_denoising_steps": 12},
    **{"stability_threshold": 0, "confidence_threshold": 4.8},
}


def batch_of(adapter, rows):
    return adapter.encode([CHATS[row] for row in rows])


def class_answers(adapter, inputs, seed=3, **changes):
    """The class's answers with settings that the engine did not write: new tokens (B, T), and tokens per step (B,)."""
    settings = {"max_denoising_steps": 48, "t_min": 0.4, "t_max": 0.8, **changes}
    settings = {"stability_threshold": 1, "confidence_threshold": 0.005, **settings}
    bound = EntropyBoundSamplerConfig(settings.pop("entropy_bound", 0.1))
    ends = adapter.model.generation_config
    tokens = {"eos_token_id": ends.eos_token_id, "pad_token_id": ends.pad_token_id}
    config = DiffusionGemmaGenerationConfig(sampler_config=bound, **tokens, **settings)
    torch.manual_seed(seed)
    output = adapter.model.generate(**inputs, generation_config=config)
    return output.sequences[:, inputs["input_ids"].shape[1] :], output.tokens_per_forward


def run(adapter, inputs, method=None, budget=NONE, backend="drop", seed=3, **settings):
    torch.manual_seed(seed)
    with Session(adapter, method or NoReduction(), budget, backend=backend, prior=PRIOR) as session:
        return session.generate(inputs, **settings)


@pytest.fixture
def adapter():
    return loaded("float32")


@pytest.mark.slow
def test_answers_are_those_of_the_class_and_steps_are_counted(adapter):
    texts = adapter.encode([chat("w1 w2"), chat("w3 w4 w5 w6 w7")])
    for inputs in (*(batch_of(adapter, rows) for rows in ROWS[:2]), texts):
        for settings in (SOON, LONG):
            ids, each = class_answers(adapter, inputs, **settings)
            generated = run(adapter, inputs, **settings)
            assert torch.equal(generated.ids, ids)
            steps = [sum(record.canvases["steps"]) for record in generated.records]
            assert steps == [round(count) for count in (ids.shape[1] / each).tolist()]
            if settings is SOON:
                assert min(steps) < 2 * 12
            for record in generated.records:
                assert record.canvases["visible"] == record.canvases["full_visible"]
                assert record.canvases["pairs"] == record.canvases["full_pairs"]
    assert generated.records[0].visual == 0
    assert not torch.equal(run(adapter, texts, seed=4, **settings).ids, ids)


@pytest.mark.slow
def test_rows_end_at_their_own_canvas(adapter, monkeypatch):
    inputs = batch_of(adapter, ROWS[0])
    answers, _ = class_answers(adapter, inputs, **LONG)
    # The first row's answer has this token in its first canvas; others may have it later.
    monkeypatch.setattr(adapter.model.generation_config, "eos_token_id", int(answers[0, 5]))
    ids, _ = class_answers(adapter, inputs, **LONG)
    generated = run(adapter, inputs, **LONG)
    assert torch.equal(generated.ids, ids)
    record = generated.records[0]
    assert (record.ended, record.new_tokens) == (
        True,
        (answers[0] == answers[0, 5]).nonzero()[0] + 1,
    )
    assert record.canvases["steps"] == [4]
    assert [len(record.canvases[name]) for name in ("visible", "pairs", "full_pairs")] == [1, 0, 0]
    assert len(generated.records[1].canvases["steps"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("gather", [False, True], ids=["skipped", "gathered"])
def test_ratio_zero_is_bit_identical(adapter, gather, monkeypatch):
    if gather:
        monkeypatch.setattr(Decision, "keeps_all", lambda decision, stage: False)
    for rows in ROWS[:2]:
        inputs = batch_of(adapter, rows)
        ids, _ = class_answers(adapter, inputs, **LONG)
        for where in PLACES:
            assert torch.equal(run(adapter, inputs, Scatter(where), **LONG).ids, ids)


@pytest.mark.slow
@pytest.mark.sampled(36)
@pytest.mark.parametrize("merge", [False, True], ids=["pruned", "merged"])
@pytest.mark.parametrize("where", PLACES)
def test_dropping_equals_emulation(where, merge):
    adapter = loaded()
    inputs = batch_of(adapter, ROWS[0])
    method = Scatter(where, merge)
    (fast, dropped), (slow, hidden), (_, whole) = (
        with_states(adapter, partial(run, adapter, inputs, *arguments, **LONG))
        for arguments in ((method, MOST), (method, MOST, "emulate"), ())
    )
    assert torch.equal(fast.ids, slow.ids)
    assert (dropped - hidden).abs().max() < 1e-9 * hidden.abs().max()
    assert (dropped - whole).abs().max() > 1e-2
    for a, b in zip(fast.records, slow.records, strict=True):
        assert (a.kept, a.entering, a.canvases) == (b.kept, b.entering, b.canvases)
        assert torch.equal(a.origin, b.origin)


def with_states(adapter, call):
    """Return what a call returns, and the states of all steps before the head."""
    states = []
    handle = adapter.model.lm_head.register_forward_hook(
        lambda module, args, output: states.append(args[0])
    )
    answer = call()
    handle.remove()
    return answer, torch.cat(states)


def by_hand(adapter, inputs, dropped, first):
    """Hooks with masks written out: dropped tokens are hidden from layer `first` on."""
    visual = adapter.layout(inputs).visual[0]
    marked = torch.zeros(inputs["input_ids"].shape[1] + 3 * CANVAS, dtype=torch.bool)
    marked[visual] = True
    place = torch.arange(len(marked))
    group = (~marked).long().cumsum(0)  # equal inside a picture
    together = (group[:, None] == group) & marked[:, None] & marked
    types = adapter.decoder.config.layer_types

    def mask(number, places, canvas):
        sliding = types[number] == "sliding_attention"
        end = int(places[0, -1]) + 1
        visible = place[None, :end] <= place[:end, None]
        if sliding:
            visible = visible & (place[:end, None] - place[None, :end] < WINDOW)
        visible = (visible | together[:end, :end])[places[0].long()]
        if canvas:
            start = int(places[0, 0])
            held = place[:end] >= (start - WINDOW + 1 if sliding else 0)
            visible = held.expand(places.shape[1], -1).clone()
        if number >= first:
            visible[:, visual[dropped]] = False
            visible |= torch.eye(len(marked), dtype=torch.bool)[places[0].long(), :end]
        before = end - places.shape[1]
        if sliding:  # what the cache has lost
            visible = visible[:, max(0, before - WINDOW + 1) :]
        return visible[None, None]

    def hook(number, canvas):
        return lambda module, args, kwargs: (
            args,
            {**kwargs, "attention_mask": mask(number, kwargs["position_ids"], canvas)},
        )

    return [
        layer.register_forward_pre_hook(hook(number, canvas), with_kwargs=True)
        for canvas, stack in enumerate((adapter.decoder, adapter.canvas))
        for number, layer in enumerate(stack.layers)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(20, 28), (28, 28), (60, 20)])
@pytest.mark.parametrize("where", [("prefix",), (2,)])
def test_dropping_equals_handwritten_masks(where, size):
    """An oracle that shares no code with the engine: the class's loop, a mask for each layer of both stacks."""
    adapter = loaded()
    # A short text, so that windows reach into the picture.
    inputs = adapter.encode([chat("w", picture(0, *size))])
    generated, states = with_states(
        adapter, partial(run, adapter, inputs, Scatter(where), MOST, **LONG)
    )
    dropped = torch.ones(generated.records[0].visual, dtype=torch.bool)
    dropped[generated.records[0].origin] = False
    handles = by_hand(adapter, inputs, dropped, 0 if where == ("prefix",) else where[0])
    (ids, _), expected = with_states(adapter, partial(class_answers, adapter, inputs, **LONG))
    for handle in handles:
        handle.remove()
    assert torch.equal(generated.ids, ids)
    assert (states - expected).abs().max() < 1e-9 * expected.abs().max()
    _, whole = with_states(adapter, partial(class_answers, adapter, inputs, **LONG))
    assert (states - whole).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_flops_are_those_that_torch_counts(ratio):
    adapter = load_tiny(SPEC, saved(), "float32")
    # Torch counts the products of these implementations.
    adapter.model.set_attn_implementation("eager")
    adapter.model.set_experts_implementation("eager")
    facts, inputs = adapter.facts, batch_of(adapter, (1,))
    with FlopCounterMode(display=False) as counter:
        batch = run(adapter, inputs, Scatter(("prefix",)), Budget("kept", ratio), **LONG)
    record = batch.records[0]
    counted = sum(counter.get_flop_counts()["Global"].values())
    pictures, patches = inputs["pixel_values"].shape[:2]
    hidden, edge = facts.tower.hidden, 4
    # Left out: cutting into patches, and their average by a product.
    counted -= 2 * pictures * patches * hidden * (3 * edge**2 + patches // 4)
    # Torch counts whole products of the prompt and of canvases that are read, also what masks hide.
    text = facts.text
    whole = text_flops(facts, record.entering, record.text, causal=False)
    counted -= whole - text_flops(facts, record.entering, record.text, pairs=record.pairs)
    canvases = record.canvases
    for visible, read_pairs in zip(canvases["visible"], canvases["pairs"], strict=False):
        for layer, (places, pairs) in enumerate(zip(visible, read_pairs, strict=True)):
            heads = text.heads * text.heads_of(layer).head_dim
            counted -= 4 * heads * (CANVAS * places - pairs)
    flops = canvas_flops(facts, record)
    assert counted == flops.exact.total
    assert (flops.share_of_full < 1) == bool(ratio)


def test_pairs_are_those_of_masks_by_hand(adapter):
    record = run(adapter, batch_of(adapter, (0,)), Scatter(("prefix",)), MOST, **LONG).records[0]
    full = record.entering[0] + record.text
    slides = [name == "sliding_attention" for name in adapter.decoder.config.layer_types]
    for number, (visible, full_visible) in enumerate(
        zip(record.canvases["visible"], record.canvases["full_visible"], strict=True)
    ):
        # The text after the picture is longer than the window.
        assert visible == [
            WINDOW - 1 + CANVAS if s else full + (number + 1) * CANVAS for s in slides
        ]
        n_dropped = record.visual - record.entering[0]
        assert full_visible == [
            n if s else n + n_dropped for n, s in zip(visible, slides, strict=True)
        ]


@pytest.mark.sampled(144)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_method_in_the_prompt(case):
    method = build(case)
    if signals_of(method) & set(DiffusionGemmaAdapter.data.lacking) or method.tower_sites(2):
        pytest.skip("reads or changes the tower")
    if method.shrinks_pictures or method.needs_frames() or method.decode_site(DEPTH) is not None:
        pytest.skip("refused on such models, or needs videos")
    adapter = loaded(layers=DEPTH)
    inputs = batch_of(adapter, ROWS[0])
    settings = {"max_new_tokens": 2 * CANVAS, "max_denoising_steps": 3}
    ids, _ = class_answers(adapter, inputs, **settings)
    assert torch.equal(run(adapter, inputs, method, **settings).ids, ids)
    fast = run(adapter, inputs, method, MOST, **settings)
    assert torch.equal(fast.ids, run(adapter, inputs, method, MOST, "emulate", **settings).ids)
    for record in fast.records:
        MOST.verify(method, adapter.facts, record)


def test_logits_that_are_not_finite_fail_the_sample(adapter):

    def spoil(module, args, output):
        output[:, 2] = float("nan")
        return output

    handle = adapter.model.lm_head.register_forward_hook(spoil)
    with pytest.raises(NonFiniteLogits, match="hold NaN or infinity in the prefill"):
        run(adapter, batch_of(adapter, (0,)), **LONG)
    handle.remove()


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_attention_without_masks_is_refused(attention):
    with pytest.raises(UserError, match="makes for one kind; valid: sdpa"):
        DiffusionGemmaAdapter.check_settings(replace(SPEC, attention=attention))


def test_facts_that_the_model_does_not_confirm_are_refused():
    facts = replace(SPEC.facts, text=replace(SPEC.facts.text, wide=None))
    with pytest.raises(UserError, match=r"text.wide=null, the loaded model has \{interval: 2"):
        load_tiny(replace(SPEC, facts=facts), saved())


@pytest.mark.slow
def test_a_folder_answers_with_its_steps_and_the_cost_of_all():
    model = espalier.load(saved(), device="cpu")
    settings = {"max_new_tokens": 2 * CANVAS, "max_denoising_steps": 3}
    question = picture(0, 60, 40), "w1 w2"
    with espalier.apply(model, "random", ratio=0.75) as pruned:
        answer = pruned.ask(*question, **settings)
        assert pruned.ask(*question, **settings).text == answer.text
    assert answer.record.canvases["steps"] == [3, 3]
    assert answer.ratio == pytest.approx(0.75, abs=0.02)
    assert 0 < answer.flops.share < 1
    with espalier.apply(model, "none") as plain:
        assert plain.ask(*question, **settings).flops.share == 1.0
