"""Folded heads: exactly the attention that they replace, without a copy of the cache in any step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.draft_model import TreeDrafter
from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.samplers import resolved_config, sampler_of
from espalier.harness.engine import text_stack as stack
from espalier.harness.engine.kv_cache import (
    NAME,
    attention_configs,
    chain_mask,
    fold_heads,
    folded_attention,
    window_mask,
)
from tests.decoding.models import in_doubles, side

PROMPT = 3000


def tensors(heads: int, key_heads: int, new: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(new)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return drawn(1, heads, new, 8), drawn(1, key_heads, keys, 8), drawn(1, key_heads, keys, 8)


def module(heads: int, key_heads: int) -> nn.Module:
    """What sdpa asks of an attention module."""
    attention = nn.Module()
    attention.num_key_value_groups = heads // key_heads
    attention.is_causal = True
    return attention


MASKS = {
    "causal": torch.ones(5, 5).tril().bool(),
    "tree": torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    ).bool(),
}


@pytest.mark.parametrize("form", ["bool", "added", "folded", "by head"])
@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (7, 1)])
def test_windows_and_trees_attend_as_under_sdpa(heads, key_heads, which, form) -> None:
    query, key, value = tensors(heads, key_heads, 5, 23)
    visible = torch.cat([torch.ones(5, 18).bool(), MASKS[which]], dim=1)[None, None]
    mask = visible
    if form == "added":
        mask = window_mask(MASKS[which], 23, 1, torch.float64)
    elif form == "folded":
        mask = window_mask(MASKS[which], 23, heads // key_heads, torch.float64)
    elif form == "by head":
        mask = visible.repeat(1, heads, 1, 1)
        mask[:, 0, :, :9] = False
        visible = mask
    attention = module(heads, key_heads)
    expected, _ = sdpa_attention_forward(attention, query, key, value, visible, scaling=0.3)
    output, _ = folded_attention(attention, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert output.is_contiguous()


@pytest.mark.parametrize("new", [1, 23])
def test_steps_and_prefills_attend_as_under_sdpa(new: int) -> None:
    query, key, value = tensors(6, 2, new, 23)
    attention = module(6, 2)
    expected, _ = sdpa_attention_forward(attention, query, key, value, None, scaling=0.3)
    output, _ = folded_attention(attention, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_one_mask_serves_layers_of_different_lengths() -> None:
    """A mask as wide as the longest layer is cut to what a shorter one holds."""
    query, key, value = tensors(6, 2, 5, 23)
    attention = module(6, 2)
    wide = window_mask(MASKS["tree"], 40, 3, torch.float64)
    narrow = window_mask(MASKS["tree"], 23, 3, torch.float64)
    output, _ = folded_attention(attention, query, key, value, wide)
    expected, _ = folded_attention(attention, query, key, value, narrow)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_chains_mask_is_that_of_a_window(count: int, groups: int) -> None:
    visible = torch.ones(count, count).tril().bool()
    expected = window_mask(visible, 23, groups, torch.bfloat16)
    computed = chain_mask(count, 23, groups, torch.bfloat16, torch.device("cpu"))
    assert computed.shape == (1, 1, groups * count, 23)
    assert torch.equal(computed, expected)


def test_the_model_is_put_back_and_others_are_never_touched() -> None:
    mine, untouched = in_doubles("llava").decoder, in_doubles("internvl").decoder
    configs = attention_configs(mine)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with fold_heads(configs) as strong:
        assert strong
        assert mine.layers[0].self_attn.config._attn_implementation == NAME
        assert untouched.config._attn_implementation == "sdpa"
        with fold_heads(configs) as nested:
            assert nested
        assert mine.config._attn_implementation == NAME
    assert mine.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="stop"), fold_heads(configs):
        raise RuntimeError("stop")
    assert mine.layers[0].self_attn.config._attn_implementation == "sdpa"
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa
    eager = in_doubles("llava", "eager").decoder
    with fold_heads(attention_configs(eager)) as strong:
        assert not strong
        assert eager.config._attn_implementation == "eager"


def test_threads_may_share_a_model_inside_one_opening() -> None:
    """Each side's own opening does nothing then, so neither ends the other's."""
    expected = side("llava").rows([], Draft(tuple(range(6))))
    sides = side("llava"), side("llava")
    together = Barrier(2, timeout=60)

    def work(number: int) -> list:
        together.wait()
        drafts = []
        for length in range(7):
            drafts = sides[number].rows([], Draft(tuple(range(length))))
            sides[number].cut(0)
        return drafts

    # A prompt runs through a session with hooks for one thread at a time; steps do not.
    for model_side in sides:
        model_side.start()
    with sides[0].stack.folding(), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    drafted = side("llava").rows([], Draft(tuple(range(6))))
    assert results == [expected[:7]] * 2 == [drafted] * 2


# ------------------------------------------------------------------ what moves


def long_side() -> CachedModel:
    """A side with a cache that dwarfs everything else of a tiny model."""
    adapter = in_doubles("llava")
    ids = torch.arange(PROMPT)[None] % 200

    def prefill(cache):
        hidden = adapter.decoder(
            inputs_embeds=adapter.model.get_input_embeddings()(ids),
            position_ids=torch.arange(PROMPT)[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits = adapter.model.get_output_embeddings()(hidden[0, -1])
        return logits, torch.tensor([[PROMPT]])

    sampler = sampler_of(adapter, resolved_config(adapter, {"max_new_tokens": 20}), ids[:, :4])
    return CachedModel(adapter, sampler, 40, prefill)


def moved(work) -> list[str]:
    """Names of the operations that allocate, or write to, as much as one layer's keys."""
    text = in_doubles("llava").facts.text
    large = PROMPT * text.kv_heads * text.head_dim
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        work()
    shapes = []
    for event in profiler.events():
        sizes = [torch.Size(shape).numel() for shape in event.input_shapes or [] if shape]
        writes = event.name in ("aten::copy_", "aten::index_copy_", "aten::scatter_")
        if event.self_cpu_memory_usage >= large * 8 or (writes and max(sizes, default=0) >= large):
            shapes.append(event.name)
    return shapes


@pytest.mark.slow
def test_no_operation_of_a_step_is_as_large_as_the_cache() -> None:
    model_side = long_side()
    model_side.start()
    tree = TreeDrafter(model_side, (-1, -1, 0, 0, 1))
    assert moved(lambda: model_side.draft([], 3)) == []
    assert moved(lambda: model_side.rows([5], Draft((6, 7, 8, 9)))) == []
    assert moved(lambda: tree.draft([5, 6], 1)) == []
    drafted = Draft((6, 7, 8, 9, 3), parents=(-1, -1, 0, 1, 1))
    assert moved(lambda: model_side.rows([5], drafted)) == []
    assert moved(lambda: model_side.rows([5, 7, 3, 2], drafted)) == []


@pytest.mark.slow
def test_repeated_heads_alone_are_seen_too(monkeypatch) -> None:
    """Under transformers' own attention our cache is not copied, but its heads are, as soon as there is a mask."""
    model_side = long_side()
    model_side.start()
    monkeypatch.setattr(stack, "fold_heads", lambda configs: nullcontext(False))
    names = moved(lambda: model_side.rows([5], Draft((6, 7, 8, 9))))
    assert names
    assert "aten::cat" not in names
