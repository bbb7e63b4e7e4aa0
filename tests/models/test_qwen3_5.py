"""Qwen3.5: dropping and eviction against layers run by hand, every method at once, prompts, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from espalier.harness.cost.budget import Budget, frame_of
from espalier.harness.cost.flops import linear_cost, quadratic, text_flops
from espalier.harness.engine.eviction import CacheBudget, ScoredEviction
from espalier.harness.engine.prefill import Prefill
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.runs.admission import admit
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import MethodError, Need, Site
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from tests import commands
from tests.engine.test_eviction import METHODS, built, places
from tests.families import FAMILIES
from tests.family_runs import MOST, NONE, ROWS, Tiny, extended, generated, positions, saved
from tests.linear_attention import delta_rule, in_doubles
from tests.methods.cases import CASES, DEPTH, build, case_id, signals_of
from tests.methods.runs import kept_by
from tests.tiny import Recorder, Scatter, chat, full_model, load_tiny, model_of, save_tiny

NAMES = ("qwen3_5", "qwen3_5_video", "qwen3_5_mixed", "qwen3_5_moe", "minicpm_v")
FULL = FAMILIES["qwen3_5"].full_layers


def by_hand(
    adapter: Any,
    longer: dict[str, Any],
    drops: list[tuple[int, Tensor]] = (),
    seen: dict[int, Tensor] | None = None,
) -> Tensor:
    """Run one prompt with its answer layer by layer, without a cache; return the logits (L', V) of what stays.

    `drops` are layers and the (L,) slots that enter them and the later ones; `seen` (H, L, L) what each query of a
    full layer sees.
    """
    taken: dict[str, Any] = {}

    def stop(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        taken.update(kwargs)
        raise StopIteration

    handle = adapter.decoder.register_forward_pre_hook(stop, with_kwargs=True)
    with torch.inference_mode(), pytest.raises(StopIteration):
        adapter.model(**longer, position_ids=positions(adapter, longer), use_cache=False)
    handle.remove()
    hidden, alive = taken["inputs_embeds"], torch.ones(longer["input_ids"].shape[1]) > 0
    with torch.inference_mode():
        cosines, sines = adapter.decoder.rotary_emb(hidden, taken["position_ids"][-3:])
        for number, layer in enumerate(adapter.decoder.layers):
            for first, kept in drops:
                if first == number:
                    hidden, alive = hidden[:, kept[alive]], alive & kept
            mask = None if seen is None or number not in seen else seen[number][None]
            tables = cosines[:, alive], sines[:, alive]
            hidden = layer(hidden, position_embeddings=tables, attention_mask=mask)
        logits: Tensor = adapter.model.lm_head(adapter.decoder.norm(hidden))[0]
    return logits


def slots(layout: Any, origin: Tensor, length: int) -> Tensor:
    """Return (L,): True for words and the visual tokens `origin`."""
    kept = torch.ones(length, dtype=torch.bool)
    kept[layout.visual[0]] = False
    kept[layout.visual[0][origin]] = True
    return kept


def generate(tiny: Tiny, method: Any, budget: Budget, *rows: int, **changes: Any) -> Any:
    samples = [str(row) for row in rows]
    return generated(tiny.adapter, tiny.inputs(*rows), method, budget, samples, **changes)


def gap(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item() / second.abs().max().item()


@pytest.mark.sampled(42)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("where", [("prefix",), ("vision",), (1,), (2,), (4,)])
@pytest.mark.parametrize("name", NAMES)
def test_dropping_at_a_layer_equals_layers_run_by_hand_on_what_stays(name, where, dtype):
    tiny = Tiny(name, dtype)
    first = where[0] if isinstance(where[0], int) else 0
    for row in ROWS:
        batch = generate(tiny, Scatter(where), MOST, row)
        inputs = tiny.inputs(row)
        longer = extended(inputs, batch.ids[:, :-1])
        length, steps = longer["input_ids"].shape[1], batch.ids.shape[1]
        kept = slots(tiny.adapter.layout(inputs), batch.records[0].origin, length)
        assert not kept.all()
        expected = by_hand(tiny.adapter, longer, [(first, kept)])[-steps:]
        assert gap(batch.logits[0], expected) < (1e-6 if dtype == "float64" else 2e-5)
        assert gap(batch.logits[0, :1], by_hand(tiny.adapter, longer)[-steps:][:1]) > 1e-3


def test_hiding_tokens_from_linear_layers_is_not_dropping_them():
    """So emulation is refused: a token whose input is masked still fades states and fills the convolution."""
    tiny = Tiny("qwen3_5")
    inputs = tiny.inputs(0)
    kept = slots(tiny.adapter.layout(inputs), torch.arange(4), inputs["input_ids"].shape[1])
    with torch.inference_mode():
        masked = tiny.adapter.model(
            **{**inputs, "attention_mask": kept.long()[None]},
            position_ids=positions(tiny.adapter, inputs),
            use_cache=False,
        ).logits[0, -1]
    assert gap(masked, by_hand(tiny.adapter, inputs, [(0, kept)])[-1]) > 1e-2


def test_the_library_s_chunks_are_the_rule_token_by_token():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 150, heads, width, generator=generator)
        for heads, width in ((2, 8), (2, 8), (4, 12))
    )
    g = -torch.rand(2, 150, 4, generator=generator)
    settings = {"g": g, "beta": torch.rand(2, 150, 4, generator=generator)}
    outputs, state = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        query, key, value, **settings, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    slow_outputs, slow_state = delta_rule(query.double(), key.double(), value.double(), **settings)
    assert gap(outputs.double(), slow_outputs) < 1e-5
    assert gap(state.double(), slow_state) < 1e-5


#: What the tiny model of six layers, with every other one linear, refuses.
REFUSALS = (
    r"layer [024] has linear attention, .* the nearest (1, 3|3, 5) \(.* acts before (2, 4|4, 6)\)",
    "needs model.facts.patch_tokens=true",
    "chooses entries at each step, and layers 0, 2, 4 do not hold the whole prompt",
    "must know where the crops lie in the image, and this model does not stitch them",
)


ALWAYS = {
    *("aim", "autoprune", "btp", "dycoke", "feather", "fitprune", "flowcut", "ivtp"),
    *("pact", "pixelprune", "prunevid", "pyramiddrop", "sparsevlm", "specvlm", "tome"),
}
#: Cases that act in the tower, at each step, or on the attention of such a layer; by default, or by their settings.
REFUSED = {
    *(case_id(case) for case in CASES if case[0] in ALWAYS),
    "d2pruner-alpha=0.5-K=5",
    "nuwa-salience=attention-pillars=attention-quantile=0.55-guide=attention",
    "uvprune-criterion=attention_variation",
    "uvprune-criterion=attention-L=3",
}
#: Those that place crops on one plane.
REFUSED_IN_VIEWS = {case_id(case) for case in CASES if case[0] in {"globalcom2", "hired"}}


@cache
def deep_adapter(name: str) -> Any:
    """A tiny model as deep as the cases are meant for."""
    spec = FAMILIES[name].spec
    facts = replace(spec.facts, text=replace(spec.facts.text, layers=DEPTH))
    with TemporaryDirectory() as folder:
        adapter = load_tiny(
            replace(spec, facts=facts), save_tiny(replace(spec, facts=facts), Path(folder))
        )
    in_doubles(adapter.decoder)
    return adapter


@pytest.mark.sampled(96)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "minicpm_v"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_reducer_drops_as_by_hand_or_names_the_layers_that_it_could_read(
    case, family, monkeypatch
):
    method = build(case)
    name = "qwen3_5_video" if method.needs_frames() else family
    adapter, chats = deep_adapter(FAMILIES[name].spec.adapter), FAMILIES[name].chats
    full = adapter.facts.text.full_layers
    drops: list[tuple[int, Any]] = []
    original = Prefill.advance

    def advance(self: Any, first: int, decision: Any) -> Any:
        index = original(self, first, decision)
        drops.append((first, None if decision.merged else self.stage.origin[0]))
        return index

    monkeypatch.setattr(Prefill, "advance", advance)
    prior = tuple(torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) + 0.1)
    changes = {"prior": prior} if "prior" in signals_of(method) else {}
    samples = [str(row) for row in ROWS]
    if case_id(case) in (REFUSED if name != "minicpm_v" else REFUSED | REFUSED_IN_VIEWS):
        with pytest.raises((MethodError, UserError), match="|".join(REFUSALS)):
            kept_by(adapter, method, chats, 0.5, samples, **changes)
        return
    batch = kept_by(adapter, method, chats, 0.5, samples, **changes)
    for row in ROWS:
        drops.clear()
        alone = kept_by(adapter, method, [chats[row]], 0.5, samples[row], **changes)
        record = alone.records[0]
        assert record.kept == batch.records[row].kept == record.requested
        assert gap(batch.logits[row], alone.logits[0]) < 1e-4
        assert record.kv_entries == sum(record.held) == sum(record.entering[n] for n in full)
        # Merged values are the method's, and so are pictures of less detail.
        if method.shrinks_pictures or any(origin is None for _, origin in drops):
            continue
        inputs = adapter.encode([chats[row]])
        longer = extended(inputs, alone.ids[:, :-1])
        length, layout = longer["input_ids"].shape[1], adapter.layout(inputs)
        kept = [(first, slots(layout, origin, length)) for first, origin in drops]
        assert gap(alone.logits[0], by_hand(adapter, longer, kept)[-alone.ids.shape[1] :]) < 1e-6


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", ["qwen3_5_mixed", "qwen3_5_moe_mixed", "minicpm_v"])
@pytest.mark.parametrize("label", METHODS)
def test_every_compressor_evicts_from_full_layers_as_if_the_rest_were_hidden(
    label, name, monkeypatch
):
    tiny, method = Tiny(name), built(label)
    adapter, inputs = tiny.adapter, tiny.inputs(0)
    keys: dict[int, tuple[Tensor, Tensor]] = {}
    original = ScoredEviction.shorten

    def shorten(self: Any, cache: Any) -> Any:
        whole = {number: cache.layers[number].keys.clone() for number in FULL}
        stages = original(self, cache)
        keys.update({number: (whole[number], cache.layers[number].keys) for number in FULL})
        return stages

    monkeypatch.setattr(ScoredEviction, "shorten", shorten)
    batch = generated(adapter, inputs, NoReduction(), NONE, evicting=CacheBudget(method, 0.6))
    record = batch.records[0]
    longer, prompt = extended(inputs, batch.ids[:, :-1]), inputs["input_ids"].shape[1]
    length, heads = longer["input_ids"].shape[1], adapter.facts.text.heads
    seen = {}
    for number, (whole, left) in keys.items():
        copies = left.shape[1] // whole.shape[1]
        stays = places(whole[0].repeat_interleave(copies, 0), left[0])
        mask = torch.ones(heads, length, length, dtype=torch.bool).tril()
        mask[:, prompt:, :prompt] &= stays.repeat_interleave(heads // len(stays), 0)[:, None]
        seen[number] = mask
        visual = adapter.layout(inputs).visual[0]
        assert record.held[number] == int(stays[:, visual].sum()) // len(stays)
    assert gap(batch.logits[0], by_hand(adapter, longer, seen=seen)[-batch.ids.shape[1] :]) < 1e-6
    assert gap(batch.logits[0, 1:], by_hand(adapter, longer)[prompt:]) > 1e-5
    assert all(record.held[number] == 0 for number in set(range(5)) - set(FULL))
    if method.scope == "visual":
        assert sum(record.held) == int(0.4 * record.visual * len(FULL) + 0.5)
    left_bytes = sum(2 * left.numel() * 8 for _, left in keys.values())
    assert record.kv_bytes == left_bytes + FAMILIES["qwen3_5"].states


USER, END, ANSWER = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"
SYSTEM = [{"role": "system", "content": [{"type": "text", "text": " Be brief. "}]}]
LATER = [{"role": "assistant", "content": [{"type": "text", "text": " Two. "}]}, *chat("Why?")]
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("thinking", "lead"),
    [(None, "<think>\n"), ("budget:99", "<think>\n"), ("off", "<think>\n\n</think>\n\n")],
)
@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (chat(" w1 ", 0), f"{USER}{PICTURE} w1{END}"),
        (chat("w1", 0, 1), f"{USER}{2 * PICTURE}w1{END}"),
        ([*SYSTEM, *chat(" w1")], f"<|im_start|>system\nBe brief.{END}{USER}w1{END}"),
        ([*chat("w1"), *LATER], f"{USER}w1{END}{ANSWER}Two.{END}{USER}Why?{END}"),
    ],
)
def test_prompts_are_those_of_the_released_template(turns, text, thinking, lead):
    spec = FAMILIES["qwen3_5"].spec
    settings = {} if thinking is None else {"thinking": thinking}
    adapter = load_tiny(replace(spec, generation=settings), saved("qwen3_5"))
    assert adapter.render(turns) == f"{text}{ANSWER}{lead}"


def random_spec(file: str) -> ModelSpec:
    return model_of(f"model={file}", "model.weights=random", "method=none", "ratio=0")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file", "parameters"),
    [
        ("qwen3_5_4b", 4_539_265_536),
        ("qwen3_5_9b", 9_409_813_744),
        # Of the mixtures of experts, the hub's names state billions alone.
        ("qwen3_5_35b_a3b", 35_107_181_936),
        ("qwen3_5_122b_a10b", 122_562_817_776),
        ("qwen3_5_397b_a17b", 396_802_360_816),
    ],
)
def test_config_files_build_as_many_parameters_as_the_hub_counts(file, parameters):
    """Without the extra layer that predicts several tokens, which transformers does not load."""
    spec = random_spec(file)
    model = full_model(spec)
    assert sum(item.numel() for item in model.parameters()) == parameters
    types = ["linear_attention"] * 3 + ["full_attention"]
    assert model.config.text_config.layer_types == types * (spec.facts.text.layers // 4)


@pytest.mark.parametrize("backend", ["emulate", "drop"])
def test_sessions_refuse_what_a_state_cannot_do(backend):
    adapter = Tiny("qwen3_5").adapter
    method = Recorder((Site("layer", 3),), (Need("last_attention"),))
    line = "layer 2 has linear attention" if backend == "drop" else "still fade the states"
    with pytest.raises((UserError, MethodError), match=line):
        Session(adapter, method, MOST, backend=backend)


def test_the_flops_rule_counts_layers_of_both_kinds():
    """Dropped before layer 4 to 128 of 576 tokens, all in whole chunks: as costly as so many from the start."""
    facts = random_spec("qwen3_5_9b").facts
    frame = frame_of(FastV(K=4), facts, 576, 64)
    spent = text_flops(facts, frame.entering((128,)), 64)
    tokens = frame.equivalent("flops", (128,)) + 64
    linear, square = quadratic(facts.text)
    layer = 8 * (linear * tokens + square * tokens**2) + 24 * linear_cost(facts.text) * tokens
    assert layer == pytest.approx(spent, rel=1e-12)
    assert 128 + 64 < tokens < 576 + 64


def admitted(overrides: str) -> None:
    settings = ("model=qwen3_5_9b", "model.weights=random", "benchmark=seedling_vqa")
    admit(commands.spec_of(*settings, *overrides.split()), Digests())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("method=fastv ratio=0.5", "decoder layer 1 has linear attention"),
        ("method=fastv ratio=0.5 method.params.K=8 engine.backend=emulate", "valid: drop"),
        ("method=pyramiddrop ratio=0.5", "decoder layer 8 has linear attention"),
        ("method=divprune ratio=0.5 budget=kv_bytes", "24 of 32 decoder layers"),
        ("method=h2o ratio=0.5 budget=kv_bytes", "24 of 32 decoder layers"),
        ("method=vanilla_sd method.draft=qwen3_5_9b", "24 of 32 decoder layers"),
        ("method=fastv ratio=0.5 model.scale.layers=3", "one in 4 does; valid: 4 and more"),
        ("method=tome ratio=0.5", "acts inside the vision tower"),
    ],
)
def test_what_cannot_work_is_refused_before_loading(overrides, line):
    with pytest.raises(UserError, match=re.escape(line)):
        admitted(overrides)


@pytest.mark.parametrize(
    "overrides",
    ["method=fastv ratio=0.5 method.params.K=4 budget=flops", "method=divprune ratio=0.5"],
)
def test_what_reads_full_layers_is_admitted(overrides):
    admitted(overrides)
