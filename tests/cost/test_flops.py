"""FLOPs compared with torch's own counter on real modules, and with a published table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from espalier.harness.cost.facts import ModelFacts, StackFacts, Work
from espalier.harness.cost.flops import (
    PAPERS,
    Components,
    SampleFlops,
    counts_of,
    d2pruner,
    flops_block,
    head_flops,
    layer_flops,
    projector_flops,
    quadratic,
    sample_flops,
    text_flops,
    tower_flops,
)

TEXT = StackFacts(3, 64, 176, 8, 2, 8, gated=True, causal=True)
TOWER = StackFacts(2, 48, 96, 4, 4, 12, gated=False, causal=False)
FACTS = ModelFacts(TEXT, TOWER, None, (48, 64, 64), 211, 36, "token", 1, frozenset())
WORK = Work(tokens=37, pairs=37**2, units=36)

LLAVA_NEXT = ModelFacts(
    text=StackFacts(32, 4096, 11008, 32, 32, 128, gated=True, causal=True),
    tower=StackFacts(23, 1024, 4096, 16, 16, 64, gated=False, causal=False),
    stem=None,
    projector=(1024, 4096, 4096),
    vocabulary=32064,
    visual_tokens=2880,
    class_attention="token",
    rotary_axes=1,
    signals=frozenset(),
)


def counted(module: torch.nn.Module, **inputs: torch.Tensor) -> int:
    """Count with torch; eager attention, since the counter always sees its two products in full."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**inputs)
    return counter.get_total_flops()


def test_llama_layers_and_head_agree_with_torch() -> None:
    config = LlamaConfig(
        vocab_size=FACTS.vocabulary,
        hidden_size=TEXT.hidden,
        intermediate_size=TEXT.intermediate,
        num_hidden_layers=TEXT.layers,
        num_attention_heads=TEXT.heads,
        num_key_value_heads=TEXT.kv_heads,
        head_dim=TEXT.head_dim,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    n = 53
    ids = torch.arange(n)[None]
    full = text_flops(FACTS, (n,) * TEXT.layers, 0, causal=False)
    assert counted(model.model, input_ids=ids) == pytest.approx(full, rel=0.01)
    with_head = counted(model, input_ids=ids, logits_to_keep=torch.tensor([n - 1]))
    assert with_head - counted(model.model, input_ids=ids) == head_flops(FACTS)


def test_clip_layers_agree_with_torch() -> None:
    config = CLIPVisionConfig(
        hidden_size=TOWER.hidden,
        intermediate_size=TOWER.intermediate,
        num_hidden_layers=TOWER.layers,
        num_attention_heads=TOWER.heads,
        image_size=24,
        patch_size=4,
        attn_implementation="eager",
    )
    model = CLIPVisionModel(config)
    patches = 2 * 36 * (3 * 4 * 4) * TOWER.hidden  # the patch embedding, which facts leave out
    flops = counted(model, pixel_values=torch.zeros(1, 3, 24, 24)) - patches
    assert flops == pytest.approx(tower_flops(FACTS, WORK), rel=0.01)


def test_projector_agrees_with_torch() -> None:
    maps = torch.nn.Sequential(
        torch.nn.Linear(TOWER.hidden, TEXT.hidden), torch.nn.Linear(TEXT.hidden, TEXT.hidden)
    )
    assert counted(maps, input=torch.zeros(30, TOWER.hidden)) == projector_flops(FACTS, 30)


@pytest.mark.parametrize("stack", [TEXT, TOWER])
def test_one_layer_is_a_quadratic_of_its_tokens(stack: StackFacts) -> None:
    a, b = quadratic(stack)
    for n in (1, 2, 7, 576):
        assert a * n + b * n * n == layer_flops(stack, n)


def test_causal_attention_counts_each_visible_pair_once() -> None:
    n, width = 10, TEXT.heads * TEXT.head_dim
    hidden = n * (n - 1) // 2  # pairs above the diagonal
    assert layer_flops(TEXT, n, causal=False) - layer_flops(TEXT, n) == 4 * width * hidden


# Source: D2Pruner (arXiv 2512.19443), Table 4, LLaVA-NeXT-7B on POPE, column "FLOPs (T)": 2880
# visual tokens, two dense layers; 33 text tokens are fitted. It counts multiply-adds.
@pytest.mark.parametrize(
    ("kept", "printed", "residual"), [(2880, 16.9, -0.014), (962, 6.0, -0.006), (323, 2.8, -0.034)]
)
def test_published_table_follows_the_papers_formula(
    kept: int, printed: float, residual: float
) -> None:
    tera = d2pruner(LLAVA_NEXT.text, [2913] * 2 + [kept + 33] * 30) / 1e12
    assert round(tera, 1) == printed
    assert tera - printed == pytest.approx(residual, abs=5e-4)


def test_exact_count_of_that_table_is_more_than_twice_the_printed_one() -> None:
    # Two FLOPs for each multiply-add and a third MLP matrix, less the masked half of attention.
    exact = text_flops(LLAVA_NEXT, (2880,) * 32, 33) / 1e12
    by_hand = 32 * (2913 * (8 * 4096**2 + 6 * 4096 * 11008) + 2 * 4096 * 2913 * 2914) / 1e12
    assert exact == pytest.approx(by_hand, rel=1e-12)
    assert 39 < exact < 41


def test_sample_keeps_parts_and_conventions_apart() -> None:
    done = sample_flops(FACTS, (36, 9, 9), n_visual=36, n_text=10, work=WORK)
    head = 2 * 64 * 211
    assert done.exact == Components(
        tower=2 * layer_flops(TOWER, 37),
        projector=2 * 36 * (48 * 64 + 64 * 64),
        text=layer_flops(TEXT, 46) + 2 * layer_flops(TEXT, 19),
        head=head,
    )
    assert done.exact.language == done.exact.text + head
    assert done.exact_full.text == 3 * layer_flops(TEXT, 46)
    assert done.paper["d2pruner"] == sum(
        4 * n * 64**2 + 2 * n**2 * 64 + 2 * n * 64 * 176 for n in (46, 19, 19)
    )
    assert done.paper == counts_of(TEXT, (46, 19, 19))
    assert done.paper_full == counts_of(TEXT, (46,) * 3)
    assert done.share_of_full < done.exact.total / done.exact_full.total < 1


def test_full_sample_has_share_one_and_merged_features_are_projected_twice() -> None:
    full = sample_flops(FACTS, (36,) * 3, 36, 10, WORK)
    assert full.share_of_full == full.exact.total / full.exact_full.total == 1
    merged = sample_flops(FACTS, (9,) * 3, 36, 10, WORK._replace(reprojected=9))
    assert merged.exact.projector == full.exact.projector * 45 // 36
    assert merged.exact_full.projector == full.exact.projector
    assert merged.exact.tower == full.exact.tower


def test_every_unit_goes_once_through_the_projectors_of_deepstack() -> None:
    stacked = replace(FACTS, deepstack=(0, 1, 2))
    once = projector_flops(FACTS, 36)
    assert projector_flops(stacked, 36) == 4 * once
    merged = sample_flops(stacked, (9,) * 3, 36, 10, WORK._replace(reprojected=9))
    assert merged.exact.projector == 4 * once + once * 9 // 36
    assert merged.exact_full.projector == 4 * once


def test_two_images_cost_the_tower_twice() -> None:
    assert tower_flops(FACTS, WORK.plus(WORK)) == 2 * tower_flops(FACTS, WORK)


def test_windows_count_in_the_layers_that_have_them() -> None:
    facts = replace(FACTS, tower=replace(TOWER, window_layers=1), stem=TOWER)
    work = Work(tokens=32, pairs=32**2, window_pairs=4 * 8**2, stem_tokens=16, stem_pairs=16**2)
    pair = 4 * 4 * 12
    by_hand = 2 * layer_flops(TOWER, 32) - pair * (32**2 - 4 * 8**2) + 2 * layer_flops(TOWER, 16)
    assert tower_flops(facts, work) == by_hand


def test_a_dense_first_layer_and_a_router_are_counted() -> None:
    facts = replace(FACTS, text=replace(TEXT, intermediate=100, first_intermediate=300, experts=8))
    dense = layer_flops(replace(TEXT, intermediate=300), 20)
    sparse = layer_flops(replace(TEXT, intermediate=100), 20) + 2 * 20 * 64 * 8
    assert text_flops(facts, (15,) * 3, 5) == dense + 2 * sparse


def test_block_of_a_row_averages_counts_before_it_divides() -> None:
    samples = [sample_flops(FACTS, (k,) * 3, n, 10, WORK) for n, k in ((36, 9), (360, 90))]
    block = flops_block(samples)
    spent = sum(s.exact.language for s in samples)
    assert block["prefill_exact"] == spent / 2
    assert block["share_of_full"] == spent / sum(s.exact_full.language for s in samples)
    assert block["prefill_paper"] == sum(s.paper["d2pruner"] for s in samples) / 2
    for name in PAPERS:
        assert block["paper"][name] == sum(s.paper[name] for s in samples) / 2
        assert block["paper_full"][name] == sum(s.paper_full[name] for s in samples) / 2
    full = [SampleFlops(s.exact_full, s.exact_full, s.paper_full, s.paper_full) for s in samples]
    whole = flops_block(full)
    assert whole["share_of_full"] == whole["share_with_tower"] == 1
