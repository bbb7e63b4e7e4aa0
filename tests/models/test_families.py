"""Every model family is exact: against the plain model, the slow reference, an oracle of full forwards, and singles.

The models are tiny and random, but of the real architectures, saved to disk with processor and tokenizer, and loaded
through the same path as a real checkpoint.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from espalier.harness.engine.prefill import Decision
from espalier.harness.engine.session import Session
from espalier.methods.base import Need, Site
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.families.onevision import video, watch
from tests.family_runs import (
    MOST,
    NONE,
    ROWS,
    Tiny,
    answered,
    calls_of,
    extended,
    generated,
    generation,
    layers_given,
    plain,
    positions,
    shown,
    span,
)
from tests.tiny import DEPTH, Scatter, chat

PLACES = [("prefix",), ("vision",), (0,), (1,), (2,), (1, 3)]
NAMES = list(FAMILIES)
#: To hide tokens from linear attention is not to drop them (tests/models/test_qwen3_5.py).
MASKED = [name for name in NAMES if FAMILIES[name].spec.facts.text.linear is None]


def run(tiny, method, budget, *rows, backend="drop", decode="loop", samples=None, **changes):
    adapter, inputs = tiny.adapter, tiny.inputs(*rows)
    with Session(adapter, method, budget, backend=backend, decode=decode) as session:
        return session.generate(inputs, samples, **generation(adapter, inputs, **changes))


@pytest.mark.sampled(192)
@pytest.mark.parametrize("gather", [False, True], ids=["skipped", "gathered"])
@pytest.mark.parametrize("kind", ["float32-sdpa", "float32-eager"])
@pytest.mark.parametrize("name", NAMES)
def test_ratio_zero_is_bit_identical(name, kind, gather, monkeypatch):
    """Nothing is gathered when every token stays; gathering them all must change no bit either."""
    tiny = Tiny(name, *kind.split("-"))
    if gather:
        monkeypatch.setattr(Decision, "keeps_all", lambda decision, stage: False)
    for rows in ((1,), ROWS):
        ids, logits = plain(tiny, *rows)
        # The loop says what `generate` says and adds up in another order behind the prompt, method or not.
        loop = run(tiny, NoReduction(), NONE, *rows)
        assert torch.equal(loop.ids, ids)
        assert torch.equal(loop.logits[:, 0], logits[:, 0])
        assert span(loop.logits - logits) <= 2e-6 * span(logits)
        counts = tiny.adapter.layout(tiny.inputs(*rows)).counts
        for number, where in enumerate(PLACES):
            decode = ("loop", "generate")[number % 2]
            batch = run(tiny, Scatter(where), NONE, *rows, decode=decode)
            assert torch.equal(batch.ids, ids)
            assert torch.equal(batch.logits, loop.logits if decode == "loop" else logits)
            assert [r.kept for r in batch.records] == [(n,) * len(where) for n in counts]


@pytest.mark.sampled(144)
@pytest.mark.parametrize("merge", [False, True], ids=["pruned", "merged"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", MASKED)
def test_dropping_equals_emulation(name, where, merge):
    """Prefill and six decoding steps in fp64: nothing but the summation order may differ."""
    tiny = Tiny(name)
    fast = run(tiny, Scatter(where, merge), MOST)
    slow = run(tiny, Scatter(where, merge), MOST, backend="emulate")
    _, untouched = plain(tiny, *ROWS)
    assert torch.equal(fast.ids, slow.ids)
    assert span(fast.logits - slow.logits) < FAMILIES[name].exact * span(slow.logits)
    assert span(fast.logits[:, 0] - untouched[:, 0]) > 1e-2  # the test is not vacuous
    for a, b in zip(fast.records, slow.records, strict=True):
        assert (a.kept, a.entering) == (b.kept, b.entering)
        assert torch.equal(a.origin, b.origin)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MASKED)
def test_dropping_equals_emulation_in_single_precision(name, attention):
    tiny = Tiny(name, "float32", attention)
    for where in PLACES:
        fast = run(tiny, Scatter(where), MOST)
        slow = run(tiny, Scatter(where), MOST, backend="emulate")
        assert torch.equal(fast.ids, slow.ids)
        assert span(fast.logits - slow.logits) <= 5e-6 * span(slow.logits)


@pytest.mark.sampled(108)
@pytest.mark.parametrize(
    ("where", "merge"), [*((place, False) for place in PLACES), (("vision",), True)]
)
@pytest.mark.parametrize("name", NAMES)
def test_padded_batch_equals_single_rows_and_caches_are_as_planned(name, where, merge):
    tiny, method = Tiny(name), Scatter(where, merge)
    batch = run(tiny, method, MOST, samples=["a", "b", "c"])
    for row in ROWS:
        single = run(tiny, method, MOST, row, samples=["abc"[row]])
        record = single.records[0]
        assert torch.equal(batch.ids[row], single.ids[0])
        assert span(batch.logits[row] - single.logits[0]) < 1e-6
        assert batch.records[row].kept == record.kept == record.requested
        assert batch.records[row].entering == record.entering
        assert torch.equal(batch.records[row].origin, record.origin)
        # The cache of every layer holds what the plan left there and the text, and nothing else.
        first = [place if isinstance(place, int) else 0 for place in where]
        kept = [
            min(
                [record.visual, *(k for k, f in zip(record.kept, first, strict=True) if f <= layer)]
            )
            for layer in range(DEPTH)
        ]
        most = FAMILIES[name].most
        lengths = [min(k + record.text, limit) for k, limit in zip(kept, most, strict=True)]
        assert list(single.cache_lengths) == lengths
        assert record.kv_entries == sum(kept if record.held is None else record.held)
        text = tiny.adapter.facts.text
        entries = sum(single.cache_lengths) * 2 * text.kv_heads * text.head_dim * 8
        assert record.kv_bytes == entries + FAMILIES[name].states


@pytest.mark.sampled(72)
@pytest.mark.parametrize("where", [("prefix",), ("vision",), (2,)])
@pytest.mark.parametrize("name", NAMES)
def test_beams_equal_beams_of_single_rows(name, where):
    tiny, beams = Tiny(name), {"num_beams": 3, "output_logits": False}
    batch = run(tiny, Scatter(where), MOST, **beams)
    for row in ROWS:
        assert torch.equal(batch.ids[row], run(tiny, Scatter(where), MOST, row, **beams).ids[0])


@pytest.mark.sampled(36)
@pytest.mark.parametrize("where", [("prefix",), (1,), (2,)])
@pytest.mark.parametrize("name", MASKED)
def test_dropping_equals_a_full_forward_with_handwritten_masks(name, where):
    """An oracle that shares no code with the engine: one uncached forward, a mask a layer."""
    tiny, adapter = Tiny(name), Tiny(name).adapter
    first = 0 if where == ("prefix",) else where[0]
    for row in ROWS:
        inputs = tiny.inputs(row)
        batch = run(tiny, Scatter(where), MOST, row)
        longer = extended(inputs, batch.ids[:, :-1])
        length = longer["input_ids"].shape[1]
        visual = adapter.layout(inputs).visual[0]
        gone = torch.ones(len(visual), dtype=torch.bool)
        gone[batch.records[0].origin] = False
        seen = torch.ones(length, dtype=torch.bool)
        seen[visual[gone]] = False
        itself = torch.eye(length, dtype=torch.bool)
        marked = torch.zeros(length, dtype=torch.bool).scatter(0, visual, True)

        def masked(layer, marked=marked, seen=seen, itself=itself):
            sees = FAMILIES[name].sees(marked, layer)
            mask = (sees & seen) | itself if layer >= first else sees
            return {"attention_mask": mask[None, None]}

        with layers_given(adapter, masked), torch.inference_mode():
            where_at = positions(adapter, longer)
            logits = adapter.model(**longer, position_ids=where_at, use_cache=False).logits
        assert span(batch.logits - logits[:, inputs["input_ids"].shape[1] - 1 :]) < 1e-6


@pytest.mark.sampled(36)
@pytest.mark.parametrize("name", NAMES)
def test_text_probes_equal_eager(name):
    """The last row and the mean received attention of two layers, computed next to the fused kernel."""
    full = FAMILIES[name].full_layers
    layers = [layer for layer in (0, 2) if layer in full] or full[:1]
    needs = tuple(
        Need(signal, layer) for signal in ("last_attention", "mean_attention") for layer in layers
    )
    sdpa, eager = Tiny(name, "float32"), Tiny(name, "float32", "eager").adapter
    chats = FAMILIES[name].chats
    for row in ROWS:
        inputs = sdpa.inputs(row)
        with torch.inference_mode():
            at = positions(eager, inputs)
            maps = eager.model(**inputs, position_ids=at, output_attentions=True).attentions
        visual = eager.layout(inputs).visual[0]
        signals = shown(sdpa.adapter, [Site("layer", 3)], needs, chats[row : row + 1])[0].signals
        marked = torch.zeros(len(maps[0][0, 0]), dtype=torch.bool).scatter(0, visual, True)
        for layer in layers:
            mean = maps[full.index(layer)][0].mean(0)
            received = mean[:, visual].sum(0) / FAMILIES[name].sees(marked, layer)[:, visual].sum(0)
            assert span(signals[f"last_attention@{layer}"][0] - mean[-1, visual]) <= 5e-6
            assert span(signals[f"mean_attention@{layer}"][0] - received) <= 5e-6


def named(view, row):
    """Return one row's signals by name, layers left out."""
    return {key.partition("@")[0]: value[row] for key, value in view.signals.items()}


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", NAMES)
def test_states_and_places_give_the_attention_of_words_to_visual_tokens(name):
    """Queries of the words and keys of the visual tokens rebuild eager attention up to each row's constant."""
    needs = tuple(
        Need(signal, 1) if signal in ("visual_keys", "text_queries") else Need(signal)
        for signal in (
            "visual_keys",
            "text_queries",
            "text_positions",
            "visual_positions",
            "projected",
        )
    )
    sdpa, eager = Tiny(name, "float32"), Tiny(name, "float32", "eager").adapter
    chats = FAMILIES[name].chats
    together = shown(sdpa.adapter, [Site("layer", 2)], needs, chats)
    for number in ROWS:
        inputs = sdpa.inputs(number)
        signals = named(
            shown(sdpa.adapter, [Site("layer", 2)], needs, chats[number : number + 1])[0], 0
        )
        with calls_of(eager.decoder.layers[0]) as calls, torch.inference_mode():
            at = positions(eager, inputs)
            maps = eager.model(**inputs, position_ids=at, output_attentions=True).attentions
        layout = eager.layout(inputs)
        visual, words = layout.visual[0], layout.words[0]
        assert torch.equal(signals["visual_positions"], visual)
        assert torch.equal(signals["text_positions"], words)
        entered = calls[0].args[0][0, visual]
        assert span(signals["projected"] - entered) <= 5e-6 * span(entered)
        query, key = signals["text_queries"], signals["visual_keys"]
        key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
        scaling = query.shape[-1] ** -0.5
        scores = (query @ key.transpose(1, 2) * scaling).masked_fill(
            visual[None, :] > words[:, None], -torch.inf
        )
        after = words > visual.max()  # earlier words do not see every visual token
        read = FAMILIES[name].full_layers.index(1)
        expected = maps[read][0][:, words[after]][:, :, visual]
        expected = expected / expected.sum(-1, keepdim=True)
        assert span(scores[:, after].softmax(-1) - expected) <= 2e-5
        # The same in the padded batch, where rows of fewer words are padded on the right.
        row = next(
            named(view, n)
            for view in together
            for n in range(len(view.tokens))
            if view.tokens.shape[1] == len(visual)
            and int((view.signals["text_positions"][n] >= 0).sum()) == len(words)
            and span(view.signals["projected"][n] - signals["projected"]) <= 1e-5
        )
        assert torch.equal(row["text_positions"][: len(words)], words)
        assert span(row["text_queries"][:, : len(words)] - query) <= 1e-4
        assert not row["text_queries"][:, len(words) :].any()
        assert span(row["visual_keys"] - signals["visual_keys"]) <= 1e-4


#: Families that take chats without pictures through code of their own.
WITHOUT = (
    *("gemma3", "qwen3_5", "qwen3_5_moe", "minicpm_v", "molmo2", "paddleocr_vl", "hunyuan_ocr"),
)
TEXTS = ([chat("w1 w2")], [chat("w1 w2"), chat("w3", 1, 2), chat("w4")])


@pytest.mark.sampled(18, 1)
@pytest.mark.parametrize("decode", ["loop", "generate"])
@pytest.mark.parametrize(
    ("name", "chats"),
    [*product(WITHOUT, TEXTS), ("molmo2", [chat("w1 w2"), watch("w3", video(1))])],
)
def test_chats_without_pictures_are_answered_as_by_the_library(name, chats, decode):
    adapter = Tiny(name).adapter
    inputs = adapter.encode(chats)
    ids, logits = answered(adapter, inputs)
    for where in (("prefix",), ("vision",), (1,)):
        batch = generated(adapter, inputs, Scatter(where), NONE, decode=decode)
        assert torch.equal(batch.ids, ids)
        # One chat is exact; the layers of a padded batch add up in another order.
        assert span(batch.logits - logits) <= 1e-6 * span(logits) * (len(chats) > 1)
        assert batch.records[0].visual == 0
