"""Answers after eviction equal those of the full cache with the evicted entries hidden."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, StaticLayer

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.eviction import CacheBudget, ScoredEviction, _replace
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.methods.compressor import CacheCompressor
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.family_runs import generation
from tests.tiny import DEPTH, Scatter

NAMES = (
    "llava",
    "llava_next",
    "qwen2_5_vl",
    "qwen3_vl_mixed",
    "qwen3_vl_moe",
    "glm4v_moe",
    "onevision_video",
    "internvl",
    "gemma3",
    "paddleocr_vl",
    "hunyuan_ocr",
    "molmo2",
    "llava_onevision1_5",
    "deepseek_ocr2",
)
STEPS = 5

#: Every score, both ways of choosing by head, uneven layers, and the whole prompt as candidates; merging is below.
METHODS = {
    **{name: (name, {}) for name in names_of(CacheCompressor)},
    "elastic": ("elastic", {"merged": 0.0}),
    "lookm": ("lookm", {"merging": "none"}),
    "aircache by head": ("aircache", {"per_head": True}),
    "h2o, strength": ("h2o", {"allocation": "strength"}),
    "snapkv, the whole prompt": ("snapkv", {"scope": "prompt", "window": 4}),
    "h2o, a copy for each query head": ("h2o", {"repeated": True}),
    "snapkv, a copy for each query head": ("snapkv", {"repeated": True}),
}


def built(label):
    name, params = METHODS[label]
    return build_method(name, params)


def run(adapter, method, chats, ratio=0.6, reducer=None, budget=0.0, **changes):
    inputs = adapter.encode(list(chats))
    evicting = None if method is None else CacheBudget(method, ratio)
    reducer = reducer or NoReduction()
    with Session(adapter, reducer, Budget("kept", budget), evicting=evicting) as session:
        return session.generate(
            inputs, None, **generation(adapter, inputs, max_new_tokens=STEPS, **changes)
        )


@contextmanager
def noted(monkeypatch):
    """Yield the layers' keys and values after eviction."""
    caches, original = [], ScoredEviction.shorten

    def shorten(self, cache):
        stages = original(self, cache)
        caches.append([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers])
        return stages

    with monkeypatch.context() as patch:
        patch.setattr(ScoredEviction, "shorten", shorten)
        yield caches


def places(full, shortened):
    """Return (H, L) booleans of the remaining slots of (H, L, D) keys: random keys are all different."""
    equal = (full.unsqueeze(2) == shortened.unsqueeze(1)).all(-1)
    assert (equal.sum(1) == 1).all(), "something is left that was not there, or twice"
    return equal.any(-1)


def prefilled(adapter, inputs):
    """Return the whole cache of a prompt, its logits, and the position of the first token."""
    cache = DynamicCache()
    with Session(adapter, NoReduction(), Budget("kept", 0)) as session:
        logits, following = session.prefill(inputs, cache)
    return cache, logits, following


def whole_cache_logits(adapter, inputs, ids, masks, stored=None, most=(math.inf,) * DEPTH):
    """Return the logits of an answer (1, T) with the full cache and (H, L) masks of its slots for each layer.

    A token sees itself and `most` entries before it.
    """
    cache, first, following = prefilled(adapter, inputs)
    if stored is not None:
        stored(cache)
    n_new = ids.shape[1] - 1
    order = torch.arange(n_new)
    among = (order[:, None] >= order).expand(1, 1, -1, -1)
    heads = adapter.decoder.config.num_attention_heads

    def hook(layer):
        def hide(module, args, kwargs):
            visible = masks[layer].repeat_interleave(heads // len(masks[layer]), 0)
            visible = visible[None, :, None].expand(1, heads, n_new, -1)
            mask = torch.cat([visible, among.expand(1, heads, -1, -1)], -1)
            back = mask.shape[-1] - n_new + order[:, None] - torch.arange(mask.shape[-1])
            mask &= back <= most[layer]
            return args, {**kwargs, "attention_mask": mask}

        return hide

    handles = [
        layer.register_forward_pre_hook(hook(number), with_kwargs=True)
        for number, layer in enumerate(adapter.decoder.layers)
    ]
    try:
        with torch.inference_mode():
            output = adapter.model(
                input_ids=ids[:, :-1], position_ids=following + order, past_key_values=cache
            )
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([first[None], output.logits[0]])


@pytest.mark.sampled(72)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", METHODS)
def test_steps_equal_the_whole_cache_with_the_rest_hidden(load, monkeypatch, name, label):
    adapter, method, most = load(name), built(label), FAMILIES[name].most
    sample_chat = FAMILIES[name].chats[0]
    inputs = adapter.encode([sample_chat])
    with noted(monkeypatch) as caches:
        generated = run(adapter, method, [sample_chat])
    full_cache, *_ = prefilled(adapter, inputs)
    masks = [
        places(
            layer.keys[0].repeat_interleave(max(keys.shape[1] // layer.keys.shape[1], 1), 0),
            keys[0],
        )
        for layer, (keys, _) in zip(full_cache.layers, caches[0], strict=True)
    ]
    expected = whole_cache_logits(adapter, inputs, generated.ids, masks, most=most)
    # The models normalise in single precision regardless of their own.
    assert (generated.logits[0] - expected).abs().max() < 2e-6 * expected.abs().max()
    hidden = [torch.ones_like(mask) for mask in masks]
    plain = whole_cache_logits(adapter, inputs, generated.ids, hidden, most=most)
    assert (generated.logits[0, 1:] - plain[1:]).abs().max() > 1e-4, "nothing was evicted"
    # The first token sees the full prompt.
    assert (generated.logits[0, 0] - plain[0]).abs().max() < 2e-6 * plain.abs().max()

    layout, record = adapter.layout(inputs), generated.records[0]
    visual = layout.visual[0, : layout.counts[0]]
    if method.scope == "visual":
        words = torch.ones(masks[0].shape[1], dtype=torch.bool).index_fill(0, visual, False)
        whole = [layer for layer, limit in enumerate(most) if limit == math.inf]
        assert all(masks[layer][:, words].all() for layer in whole), "words are never evicted"
        held = sum(record.held[layer] for layer in whole)
        assert held == int((1 - 0.6) * layout.counts[0] * len(whole) + 0.5)
    assert record.held == tuple(int(mask[:, visual].sum()) // len(mask) for mask in masks)
    assert record.kv_entries == sum(record.held)
    size = sum(tensor.numel() * tensor.element_size() for pair in caches[0] for tensor in pair)
    assert (record.kv_bytes, record.entering) == (size, (layout.counts[0],) * len(masks))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "label",
    [
        *("aircache", "aircache by head", "prefixkv", "random_kv", "elastic"),
        *("h2o, a copy for each query head", "snapkv, a copy for each query head"),
    ],
)
def test_a_padded_batch_equals_its_rows(load, name, label):
    adapter, chats, method = load(name), FAMILIES[name].chats, built(label)
    ids = [str(number) for number in range(len(chats))]
    inputs = adapter.encode(list(chats))
    settings = generation(adapter, inputs, max_new_tokens=STEPS)
    with Session(
        adapter, NoReduction(), Budget("kept", 0), evicting=CacheBudget(method, 0.7)
    ) as session:
        batch = session.generate(inputs, ids, **settings)
        for row, row_chat in enumerate(chats):
            single = adapter.encode([row_chat])
            alone = session.generate(
                single, [ids[row]], **generation(adapter, single, max_new_tokens=STEPS)
            )
            assert alone.records[0].held == batch.records[row].held
            assert alone.ids[0].tolist() == batch.ids[row].tolist()
            gap = (alone.logits[0] - batch.logits[row]).abs().max()
            assert gap < 2e-6 * alone.logits.abs().max()


def test_the_allocator_lets_the_whole_cache_go(load, monkeypatch):
    adapter, sizes, original = load("llava"), [], ScoredEviction.shorten

    def shorten(self, cache):
        stages = original(self, cache)
        stores = {
            store.untyped_storage()
            for layer in cache.layers
            for store in (layer.keys, layer.values)
        }
        sizes.append(sum(store.nbytes() for store in stores))
        return stages

    monkeypatch.setattr(ScoredEviction, "shorten", shorten)
    generated = run(adapter, built("aircache"), FAMILIES["llava"].chats[:1], ratio=0.8)
    text, record = adapter.decoder.config, generated.records[0]
    slots = record.kv_entries + record.text * len(record.held)
    entry = 2 * text.num_key_value_heads * text.head_dim * 8
    assert sizes == [slots * entry] == [record.kv_bytes]


def test_a_copy_for_each_query_head_costs_a_group_of_them(load):
    adapter, chats = load("llava"), FAMILIES["llava"].chats[:1]
    text = adapter.decoder.config
    group = text.num_attention_heads // text.num_key_value_heads
    grouped, copied = (
        run(adapter, built(label), chats).records[0]
        for label in ("h2o", "h2o, a copy for each query head")
    )
    assert group > 1
    assert (copied.held, copied.kv_bytes) == (grouped.held, group * grouped.kv_bytes)


def test_beams_do_not_read_a_copy_for_each_query_head(load):
    method = built("h2o, a copy for each query head")
    with pytest.raises(
        UserError, match=r"only be read by the engine.s own loop; valid: engine\.decode=loop"
    ):
        run(load("llava"), method, FAMILIES["llava"].chats[:1], num_beams=2)


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_ratio_zero_is_bit_identical(load, name):
    adapter, chats = load(name, "float32"), FAMILIES[name].chats
    plain, generated = run(adapter, None, chats), run(adapter, built("aircache"), chats, ratio=0.0)
    assert torch.equal(plain.ids, generated.ids)
    assert torch.equal(plain.logits, generated.logits)
    assert [record.kv_bytes for record in plain.records] == [
        record.kv_bytes for record in generated.records
    ]


@pytest.mark.parametrize(
    ("name", "params"), [("elastic", {"merged": 1.0}), ("aircache", {"merged": 1.0})]
)
def test_what_goes_is_averaged_into_what_stays(load, monkeypatch, name, params):
    adapter = load("llava")
    sample_chat = FAMILIES["llava"].chats[0]
    inputs = adapter.encode([sample_chat])
    method = build_method(name, params)
    with noted(monkeypatch) as caches:
        run(adapter, method, [sample_chat], ratio=0.75)
    full_cache, *_ = prefilled(adapter, inputs)
    visual = adapter.layout(inputs).visual[0].tolist()
    for layer, stores in zip(full_cache.layers, caches[0], strict=True):
        for full, short in zip((layer.keys[0], layer.values[0]), stores, strict=True):
            # Words are unchanged; the kept entries are means of neighbours that make up all visual ones.
            n_kept = short.shape[2] - (full.shape[1] - len(visual))
            kept = short[0, :, visual[0] : visual[0] + n_kept]
            sums = full[:, visual]
            groups = [0]
            for place in range(n_kept):
                for end in range(groups[-1] + 1, len(visual) + 1):
                    mean = sums[:, groups[-1] : end].mean(1)
                    if torch.allclose(mean, kept[:, place], atol=1e-12):
                        groups.append(end)
                        break
            assert (len(groups), groups[-1]) == (n_kept + 1, len(visual))


def test_the_released_merge_averages_the_slot_before_each_that_goes(load, monkeypatch):
    adapter, chats = load("llava"), FAMILIES["llava"].chats
    official = {"argsort_as_rank": True, "shifted_merge": True}
    for sample_chat in chats:
        inputs = adapter.encode([sample_chat])
        full_cache, *_ = prefilled(adapter, inputs)
        with noted(monkeypatch) as caches:
            for merged in (0.0, 1.0):
                method = build_method("elastic", {**official, "merged": merged})
                run(adapter, method, [sample_chat], ratio=0.6)
        visual = adapter.layout(inputs).visual[0].tolist()
        for layer, plain, averaged in zip(full_cache.layers, *caches, strict=True):
            mask = places(layer.keys[0], plain[0][0])[0].tolist()
            kept = [slot for slot in visual if mask[slot]]
            groups = {slot: [slot] for slot in kept}
            for slot in visual:
                if not mask[slot]:
                    before = slot - 1
                    nearest = min(kept, key=lambda index: (abs(index - before), index))
                    groups[nearest].append(before)
            slots = [slot for slot in range(len(mask)) if mask[slot]]
            for full, short in zip((layer.keys[0], layer.values[0]), averaged, strict=True):
                means = [full[:, groups.get(slot, [slot])].mean(1) for slot in slots]
                torch.testing.assert_close(short[0], torch.stack(means, 1), rtol=0, atol=1e-12)


def test_a_reducer_and_a_compressor_act_one_behind_the_other(load):
    adapter, chats = load("llava"), FAMILIES["llava"].chats
    generated = run(adapter, built("aircache"), chats, ratio=0.5, reducer=Scatter((2,)), budget=0.5)
    reducer_only = run(adapter, None, chats, reducer=Scatter((2,)), budget=0.5)
    for record, reduced in zip(generated.records, reducer_only.records, strict=True):
        assert (record.entering, record.kept) == (reduced.entering, reduced.kept)
        assert reduced.kv_entries == sum(reduced.entering)
        assert sum(record.held) == int(sum(reduced.entering) / 2 + 0.5)
        assert all(
            n_held <= entered for n_held, entered in zip(record.held, record.entering, strict=True)
        )


def test_the_model_is_left_as_it_was_and_answers_text_alone(load):
    adapter = load("llava")
    before = [len(layer.self_attn._forward_hooks) for layer in adapter.decoder.layers]
    text = [[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]]
    plain, generated = run(adapter, None, text), run(adapter, built("h2o"), text, ratio=0.9)
    assert torch.equal(plain.ids, generated.ids)
    assert generated.records[0].kv_entries == 0
    assert before == [len(layer.self_attn._forward_hooks) for layer in adapter.decoder.layers]


def test_every_layer_keeps_an_entry_however_high_the_ratio(load):
    adapter, chats = load("llava"), FAMILIES["llava"].chats[:1]
    generated = run(adapter, built("h2o, strength"), chats, ratio=0.999)
    assert generated.records[0].held == (1,) * len(generated.records[0].entering)


def test_a_window_that_leaves_nothing_to_evict_is_refused(load):
    chats = FAMILIES["llava"].chats[:1]
    method = build_method("snapkv", {"scope": "prompt", "window": 1000})
    with pytest.raises(UserError, match=r"none of its \d+ prompt tokens may be evicted.* valid: "):
        run(load("llava"), method, chats)


@pytest.mark.parametrize("params", [{"window": "continuous"}, {"window": "visual"}])
def test_a_window_longer_than_what_it_looks_from_is_all_of_it(load, params):
    chats = FAMILIES["llava"].chats[:1]
    long = run(load("llava"), build_method("aircache", {**params, "size": 1000}), chats)
    assert sum(long.records[0].held) == int(0.4 * sum(long.records[0].entering) + 0.5)
    if params["window"] == "continuous":
        every = run(load("llava"), build_method("aircache", {"window": "all"}), chats)
        assert torch.equal(long.logits, every.logits)


def test_a_prompt_that_ends_in_a_picture_is_refused(load):
    adapter = load("llava")
    inputs = adapter.encode(list(FAMILIES["llava"].chats[:1]))
    last = int(adapter.layout(inputs).visual[0].max()) + 1
    cut = {
        key: value[:, :last] if key in ("input_ids", "attention_mask") else value
        for key, value in inputs.items()
    }
    evicting = CacheBudget(built("h2o"), 0.5)
    with (
        Session(adapter, NoReduction(), Budget("kept", 0), evicting=evicting) as session,
        pytest.raises(UserError, match="no word follows the image"),
    ):
        session.generate(cut, None, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("layer", [StaticLayer(max_cache_len=8), DynamicSlidingWindowLayer(8), 0])
def test_a_cache_layer_of_another_class_is_refused(layer):
    with pytest.raises(UserError, match=f"class {type(layer).__name__} cannot be shortened; valid"):
        _replace(layer, torch.zeros(1), torch.zeros(1))


def test_emulation_and_eager_attention_are_refused(load):
    with pytest.raises(UserError, match=r"engine\.backend='emulate'"):
        Session(
            load("llava"),
            NoReduction(),
            Budget("kept", 0),
            backend="emulate",
            evicting=CacheBudget(built("h2o"), 0.5),
        )
    with pytest.raises(UserError, match="eager"):
        run(load("llava", "float64", "eager"), built("h2o"), FAMILIES["llava"].chats[:1])


@pytest.mark.parametrize("name", ["llava", "llava_next"])
def test_what_goes_is_folded_into_the_entries_that_stay(load, monkeypatch, name):
    """Every sample of a batch: the whole cache, folded by the method at the places where the others dropped theirs."""
    adapter, chats = load(name), FAMILIES[name].chats
    stored = {}
    for merging in ("none", "pivot"):
        with noted(monkeypatch) as caches:
            run(adapter, build_method("lookm", {"merging": merging}), chats, ratio=0.7)
        stored[merging] = caches[0]
    for row, chat in enumerate(chats):
        inputs = adapter.encode([chat])
        full_cache, *_ = prefilled(adapter, inputs)
        visual = adapter.layout(inputs).visual[0]
        for layer, dropped, folded in zip(
            full_cache.layers, stored["none"], stored["pivot"], strict=True
        ):
            length = layer.keys.shape[2]
            stays = torch.stack(
                [
                    (full[:, None] - left[None]).abs().amax(-1).amin(1) < 1e-9
                    for full, left in zip(layer.keys[0], dropped[0][row], strict=True)
                ]
            )
            slots = torch.stack([head.nonzero()[:, 0] for head in stays])
            expected = build_method("lookm", {}).fold(layer.keys[0], layer.values[0], slots, visual)
            count = int(stays[0].sum())
            assert len(visual) * 0.2 < length - count < len(visual)
            for entries, whole in zip(folded, expected, strict=True):
                left = torch.stack([head[kept] for head, kept in zip(whole, stays, strict=True)])
                assert (entries[row][:, -count:] - left).abs().max() < 1e-9
            assert (folded[1][row][:, -count:] - dropped[1][row][:, -count:]).abs().max() > 1e-3
