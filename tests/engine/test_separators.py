"""Newline and separator tokens of images as candidates, and shares over all positions of an image."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculation import Speculation, with_chats
from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.engine.session import Session
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.compressor import cache_blocks, check_held
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.signal_check import OF_PATCHES, signals_of
from espalier.harness.models.architectures.anyres_views import Pooling
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.harness.specs.run_spec import AnswerSpec, EngineSpec, MethodSpec
from espalier.methods.base import MethodError, TokenReducer
from espalier.methods.composed import Composed
from espalier.methods.none import NoReduction
from espalier.methods.parallelvlm import ParallelVLM
from espalier.methods.std import STD
from tests.engine.test_eviction import noted, places, whole_cache_logits
from tests.families import FAMILIES
from tests.family_runs import NONE, Tiny, adapter_of, generation

#: One model for each kind of separators: rows, rows of frames, the end alone, rows and the end of all views.
NAMES = (
    "llava_next",
    "llava_video",
    "onevision_image",
    "onevision_video",
    "deepseek_ocr",
    "molmo2",
)
STEPS = 4
DOCS = Path(__file__).parents[2] / "docs"


CANDIDATES = EngineSpec(separators="candidates")


def asked_of(name, method, engine=CANDIDATES, **changes):
    model = FAMILIES[name].spec
    return AnswerSpec(model, MethodSpec(method, **changes), Budget("kept", 0.5), engine)


def ran(name, method=None, evicting=None, rows=(0, 1, 2), dtype="float64", budget=NONE, **options):
    tiny = Tiny(name, dtype)
    inputs, ids = tiny.inputs(*rows), [str(row) for row in rows]
    settings = generation(tiny.adapter, inputs, max_new_tokens=STEPS)
    with Session(
        tiny.adapter, method or NoReduction(), budget, evicting=evicting, **options
    ) as session:
        return session.generate(inputs, ids, **settings)


# ------------------------------------------------------------------------------------ compressors


@pytest.mark.sampled
@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_candidates_is_one_of_all_positions(name, ratio):
    evicting = CacheBudget(build_method("aircache", {}), ratio)
    kept = ran(name, evicting=evicting).records
    free = ran(name, evicting=evicting, separators="candidates").records
    for before, record in zip(kept, free, strict=True):
        depth, places_of_image = len(record.held), before.visual + before.special
        assert before.special > 0
        assert (record.visual, record.special) == (places_of_image, 0)
        share = max(math.floor((1 - ratio) * depth * places_of_image + 0.5 + 1e-9), depth)
        assert sum(record.held) == share
        check_held(evicting, record)
        # Separators stay, so the share is one of the other tokens.
        n_left = max(math.floor((1 - ratio) * depth * before.visual + 0.5 + 1e-9), depth)
        assert sum(before.held) == n_left
        block = cache_blocks(evicting, [before])["cache"]
        assert block["share"] == pytest.approx(n_left / (depth * before.visual))
        expected_share = (n_left + depth * before.special) / (depth * places_of_image)
        assert block["positions_share"] == pytest.approx(expected_share)
        block = cache_blocks(evicting, [record])["cache"]
        assert block["share"] == block["positions_share"] == share / (depth * places_of_image)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", ["llava_next", "llava_video", "deepseek_ocr"])
@pytest.mark.parametrize("method", ["aircache", "snapkv"])
def test_steps_equal_the_whole_cache_with_evicted_separators_hidden(monkeypatch, name, method):
    tiny = Tiny(name)
    evicting = CacheBudget(build_method(method, {}), 0.6)
    batch = ran(name, evicting=evicting, separators="candidates")
    n_evicted = 0
    for row in (0, 1, 2):
        inputs = tiny.inputs(row)
        with noted(monkeypatch) as caches:
            generated = ran(name, evicting=evicting, rows=(row,), separators="candidates")
        full_cache = DynamicCache()
        with Session(tiny.adapter, NoReduction(), NONE) as session:
            session.prefill(inputs, full_cache)
        stores = zip(full_cache.layers, caches[0], strict=True)
        masks = [places(layer.keys[0], keys[0]) for layer, (keys, _) in stores]
        expected = whole_cache_logits(tiny.adapter, inputs, generated.ids, masks)
        assert (generated.logits[0] - expected).abs().max() < 2e-6 * expected.abs().max()
        layout = tiny.adapter.layout(inputs)
        is_special = torch.ones(masks[0].shape[1], dtype=torch.bool)
        is_special[layout.visual[0]] = False
        words = torch.zeros_like(is_special).index_fill(0, layout.words[0], True)
        assert all(mask[:, words].all() for mask in masks), "words are never evicted"
        n_evicted += sum(int((~mask[:, is_special & ~words]).sum()) for mask in masks)
        # A row of a padded batch equals the single row.
        assert generated.records[0].held == batch.records[row].held
        assert generated.ids[0].tolist() == batch.ids[row].tolist()
    assert n_evicted > 0, "no separator was evicted"


def test_of_a_whole_prompt_that_may_go_the_separators_left_are_counted(monkeypatch):
    evicting = CacheBudget(build_method("snapkv", {"scope": "prompt", "window": 4}), 0.8)
    tiny = Tiny("llava_next")
    for row in (0, 1, 2):
        inputs = tiny.inputs(row)
        with noted(monkeypatch) as caches:
            (record,) = ran("llava_next", evicting=evicting, rows=(row,)).records
        full_cache = DynamicCache()
        with Session(tiny.adapter, NoReduction(), NONE) as session:
            session.prefill(inputs, full_cache)
        layout = tiny.adapter.layout(inputs)
        special = torch.ones(inputs["input_ids"].shape[1], dtype=torch.bool)
        special[torch.cat([layout.visual[0], layout.words[0]])] = False
        counts = []
        for layer, (keys, _) in zip(full_cache.layers, caches[0], strict=True):
            mask = places(layer.keys[0], keys[0])
            counts.append(int(mask[:, special].sum()) // len(mask))
        assert record.held_special == tuple(counts)
        share = cache_blocks(evicting, [record])["cache"]["positions_share"]
        positions = len(counts) * (record.visual + record.special)
        assert share == pytest.approx((sum(record.held) + sum(counts)) / positions)


@pytest.mark.parametrize("name", NAMES)
def test_ratio_zero_is_bit_identical(name):
    plain = ran(name, dtype="float32")
    for options in (
        {"evicting": CacheBudget(build_method("aircache", {}), 0.0)},
        {"method": build_method("fastv", {"K": 2})},
        {"method": build_method("divprune", {})},
    ):
        generated = ran(name, dtype="float32", separators="candidates", **options)
        assert torch.equal(plain.ids, generated.ids)
        assert torch.equal(plain.logits, generated.logits)


# ------------------------------------------------------------------------------------ reducers


def taking(name):
    """Reducers that may take separators and act on this tiny model, with their budgets."""
    facts = FAMILIES[name].spec.facts
    for label in names_of(TokenReducer):
        method = build_method(label, {})
        if not method.takes_separators or not method.in_one_prefill:
            continue
        with suppress(MethodError):  # a layer that so small a model does not have
            if method.all_sites(facts.tower.layers, facts.text.layers) and label != "fitprune":
                yield label, method


@pytest.mark.slow
@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", NAMES)
def test_dropping_equals_hiding_and_reads_no_grid(monkeypatch, name):
    labels = []
    for label, method in taking(name):
        labels.append(label)
        options = {"method": method, "budget": Budget("kept", 0.4), "separators": "candidates"}
        drop, hidden = ran(name, **options), ran(name, **options, backend="emulate")
        assert torch.equal(drop.ids, hidden.ids), label
        assert (drop.logits - hidden.logits).abs().max() < 2e-6 * hidden.logits.abs().max(), label
        for dropped, emulated in zip(drop.records, hidden.records, strict=True):
            assert dropped.special == 0
            assert dropped.kept == emulated.kept, label
            assert torch.equal(dropped.origin, emulated.origin), label
        if label == "random":  # shares out by image and view, which separators have
            continue
        original = type(adapter_of(name)).layout

        def scrambled(self, inputs, separators="keep", original=original):
            layout = original(self, inputs, separators)
            noise = torch.Generator().manual_seed(0)
            grid = torch.randint(0, 9, layout.grid.shape, generator=noise)
            return replace(layout, grid=grid.to(layout.grid))

        with monkeypatch.context() as patch:
            patch.setattr(type(adapter_of(name)), "layout", scrambled)
            assert torch.equal(ran(name, **options).logits, drop.logits), label
    assert {"fastv", "divprune", "random", "dart", "sparsevlm"} <= set(labels)


def test_separators_leave_like_any_token():
    counts = {"keep": 0, "candidates": 0}
    adapter = adapter_of("llava_next")
    inputs = Tiny("llava_next").inputs()
    layout = adapter.layout(inputs, "candidates")
    plain = adapter.layout(inputs)
    generated = ran(
        "llava_next",
        build_method("divprune", {}),
        budget=Budget("kept", 0.5),
        separators="candidates",
    )
    for row, record in enumerate(generated.records):
        patches = set(plain.visual[row, : plain.counts[row]].tolist())
        every = layout.visual[row, : layout.counts[row]]
        kept = set(every[record.origin].tolist())
        counts["keep"] += len(kept - patches)
        counts["candidates"] += len(set(every.tolist()) - patches - kept)
    assert counts["candidates"] > 0, "no separator left"


@pytest.mark.parametrize("label", names_of(TokenReducer))
def test_who_reads_the_tower_or_the_grid_takes_no_separators(label):
    method, facts = build_method(label, {}), FAMILIES["llava_next"].spec.facts
    if label.startswith(("fitprune", "dycoke")) or not method.all_sites(2, 32):
        return
    reads = signals_of(method, replace(facts, text=replace(facts.text, layers=32))) & OF_PATCHES
    inside = {site.where for site in method.all_sites(24, 32)} & {"tower", "vision"}
    if reads or inside:
        assert not method.takes_separators


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("visionzip", "acts on the vision tower"),
        ("prumerge", "acts on the vision tower"),
        ("fastervlm", "reads cls_attention, tile,"),
        ("hired", "reads cls_attention, tile,"),
        ("uniform", "goes by places in the patch grid"),
        ("pooled", "goes by places in the patch grid"),
    ],
)
def test_methods_of_patches_are_refused_in_one_line(label, why):
    method = build_method(label, {})
    model = FAMILIES["llava_next"].spec
    facts = replace(model.facts, signals=frozenset({*model.facts.signals, "cls_attention", "tile"}))
    spec = replace(asked_of("llava_next", label), model=replace(model, facts=facts))
    for candidate in (method, Composed(method, build_method("aircache", {}), 0.5)):
        with pytest.raises(Refused) as refused:
            kind_of(candidate, spec).normalise(spec, candidate)
        line = str(refused.value)
        assert f"engine.separators='candidates': method='{label}' {why}" in line
        assert "valid: keep" in line
        assert "\n" not in line
    # If separators stay, nothing is refused.
    kind_of(method, spec).normalise(replace(spec, engine=EngineSpec()), method)


def test_a_method_that_drops_nothing_has_no_candidates():
    for label in ("none", "autoregressive", "pearl", "onsd"):
        method = build_method(label, {})
        spec = asked_of("llava_video", label)
        if method.takes_draft:
            spec = replace(spec, method=MethodSpec(label, draft=spec.model))
        assert kind_of(method, spec).normalise(spec, method).engine.separators == "keep", label
    composed = Composed(NoReduction(), build_method("aircache", {}), 0.5)
    spec = asked_of("llava_video", "none")
    assert kind_of(composed, spec).normalise(spec, composed).engine.separators == "candidates"


@pytest.mark.slow
def test_the_key_tells_the_two_apart_and_a_row_without_the_setting_stands_beside_keep():
    method = build_method("aircache", {})
    spec = asked_of("llava_video", "aircache")
    stays = replace(spec, engine=EngineSpec())
    identity = kind_of(method, spec).identity
    assert identity(spec, method).engine["separators"] == "candidates"
    assert identity(stays, method).engine["separators"] is None
    command = read_command(["method=aircache", "engine.separators=candidates"])
    assert build_spec(command.cells[0]).engine.separators == "candidates"
    command = read_command(["method=aircache", "engine.separators=drop"])
    with pytest.raises(
        UserError, match=r"engine\.separators='drop' is unknown; valid: candidates, keep"
    ):
        build_spec(command.cells[0])


# ------------------------------------------------------------------------------------ drafts


@pytest.mark.sampled
@pytest.mark.parametrize("separators", ["keep", "candidates"])
@pytest.mark.parametrize("method", [ParallelVLM(gamma=2), STD(gamma=3)])
def test_what_a_draft_sees_is_a_share_of_all_positions(method, separators):
    name = "llava_video"
    adapter, chat = adapter_of(name), FAMILIES[name].chats[1]
    (plain,) = ran(name, rows=(1,)).records
    draft = adapter.spec if method.source == "model" else None
    engine = EngineSpec(separators=separators, transport="sequential")
    spec = asked_of(name, "parallelvlm", engine, draft=draft)
    spec = replace(spec, model=adapter.spec)
    with Speculation(spec, adapter, method) as both:
        inputs = adapter.to_device(with_chats(adapter, [chat]))
        (record,) = both.generate(inputs, ["0"], max_new_tokens=STEPS, do_sample=False).records
    decoding = DecodingRecord.from_entry(record.decoding)
    assert decoding.mismatch is None
    positions = plain.visual + plain.special
    kind = kind_of(method, spec)
    block = kind.account(kind.normalise(spec, method), method, [record])
    speculative = block.extra["speculative"]
    if separators == "keep":
        assert decoding.draft_visual == math.floor(plain.visual / 2 + 0.5)
        assert speculative["draft_positions"] == decoding.draft_visual + plain.special
    else:
        assert (
            speculative["draft_positions"]
            == decoding.draft_visual
            == math.floor(positions / 2 + 0.5)
        )
    assert block.tokens["positions"] == positions
    assert speculative["draft_positions_share"] == speculative["draft_positions"] / positions


# ------------------------------------------------------------------------------------ rows, pages


def test_a_row_counts_the_positions_that_reducers_leave():
    method = build_method("fastv", {"K": 2})
    budget = Budget("kept", 0.5)
    for separators in ("keep", "candidates"):
        spec = asked_of("llava_next", "fastv", EngineSpec(separators=separators))
        records = ran("llava_next", method, budget=budget, separators=separators).records
        tokens = kind_of(method, spec).account(spec, method, records).tokens
        special = sum(record.special for record in records) / len(records)
        assert tokens["positions_kept"] == pytest.approx(tokens["kept_final"] + special)
        assert tokens["positions"] == pytest.approx(tokens["visual"] + special)
        assert tokens["positions_share"] == tokens["positions_kept"] / tokens["positions"]
        assert (special == 0) == (separators == "candidates")


def test_the_pages_say_what_one_percent_is():
    frames, side = 64, 13
    unit = torch.zeros(side**2, 1, dtype=torch.long)
    video = Pooling(729, side, unit, unit.double()).item(frames, 0, row_newlines=True)
    patches, positions = int(video.prunable.sum()), len(video)
    assert (patches, positions) == (10_816, 11_648)

    def left(patches: int, newlines: int, share: float) -> str:
        return f"{100 * (share * patches + newlines) / (patches + newlines):.1f} %"

    newlines = positions - patches
    figures = {left(patches, newlines, 0.1), left(patches, newlines, 0.01)}
    assert figures == {"16.4 %", "8.1 %"}
    # A page of 1700 x 2200: a whole view of 27 x 27 and a plane of 92 rows of 71, each with a newline.
    page = left(27**2 + 92 * 71, 92, 0.01)
    assert page == "2.2 %"
    for name in ("kv.md", "models.md"):
        text = re.sub(r"\s+", " ", (DOCS / name).read_text())
        for figure in (
            {*figures, page} if name == "kv.md" else {left(patches, newlines, 0.01), page}
        ):
            assert figure in text, f"{name} lacks {figure}"
