"""Drafted trees on loaded models: lossless, and accepted nodes are moved into place instead of recomputed."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.decoding.speculative.draft_model import TreeDrafter
from espalier.harness.decoding.speculative.drafts import Draft, Greedy
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from espalier.harness.engine.text_stack import text_only_prefill
from espalier.harness.errors import UserError
from espalier.methods.base import TokenReducer
from espalier.methods.uniform import Uniform
from tests.decoding.models import LIMIT, NAMES, fed_counts, in_doubles, known_side, plain, side

#: Two first tokens; the first has two children, the second one; one chain goes five deep.
BUSHY = (-1, -1, 0, 0, 1, 2, 2, 3, 5, 8)
SHAPES = {"bushy": BUSHY, "chain": (-1, 0, 1), "leaves": (-1, -1, -1), "mixed": (-1, -1, 1, 0, 1)}
WAYS: dict[str, tuple[TokenReducer | None, float]] = {
    "whole": (None, 0.0),
    "half": (Uniform(), 0.5),
    "tenth": (Uniform(), 0.9),
    "hundredth": (Uniform(), 0.99),
    "ragged": (Uniform(layer=2), 0.9),
}


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*NAMES, "internvl_phi3", "deepseek_ocr"])
def test_trees_change_nothing(name: str, way: str) -> None:
    drafter = TreeDrafter(known_side(name, *WAYS[way]), BUSHY)
    trace = Machine(drafter, known_side(name), Greedy(), SequentialTransport()).run(LIMIT)
    assert trace.tokens == plain(name)
    if way == "whole":
        assert trace.acceptance == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_holds_the_likeliest_tokens_in_order(shape: str) -> None:
    """Each node's children against a side that is fed the way to it as a chain."""
    model_side, reference = side("qwen2_5_vl"), known_side("qwen2_5_vl")
    tokens, parents = [7, 8], SHAPES[shape]
    tree = TreeDrafter(model_side, parents).draft(tokens, 1)
    assert (tree.parents, tree.rows) == (parents, ())
    lengths = model_side.cache.lengths
    for node in range(-1, len(parents)):
        children = tree.children(node)
        way = [tree.tokens[above] for above in tree.path_to(node)] if node >= 0 else []
        best = reference.sampler.best(
            reference.logits_after([*tokens, *way])[None], [], len(children) + 1
        )[0]
        assert [tree.tokens[child] for child in children] == best[: len(children)].tolist()
    assert model_side.fed == tokens
    assert lengths == tuple(length + len(tokens) for length in model_side.prompt_lengths)


def test_a_verified_tree_says_what_chains_say() -> None:
    target, reference = side("llava"), known_side("llava")
    tree = Draft((5, 6, 7, 8, 9, 3), parents=(-1, -1, 0, 0, 1, 3))
    rows = target.rows([4], tree)
    assert rows[0] == reference.rows([4], Draft(()))[0]
    for node in range(len(tree.tokens)):
        way = [tree.tokens[above] for above in tree.path_to(node)]
        assert rows[node + 1] == reference.rows([4, *way], Draft(()))[0]


@pytest.mark.parametrize("path", [(), (0,), (1,), (0, 3), (0, 3, 5), (1, 4), (0, 2)])
def test_the_accepted_path_is_kept_and_only_news_are_fed(
    path: tuple[int, ...], monkeypatch
) -> None:
    """Keys and values are those of a chain, and one pass feeds just the token after the path."""
    target, reference = side("internvl"), side("internvl")
    tree = Draft((5, 6, 7, 8, 9, 3), parents=(-1, -1, 0, 0, 1, 3))
    target.rows([4], tree)
    tokens = [4, *(tree.tokens[node] for node in path), 11]
    fed = fed_counts(target.stack, monkeypatch)
    assert target.rows(tokens, Draft(())) == reference.rows(tokens, Draft(()))
    assert fed == [1]
    for mine, theirs in zip(target.cache.layers, reference.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


def test_siblings_save_rounds_where_the_first_guess_is_wrong() -> None:
    """Or a tree would be no more than a chain: the short-sighted draft's second guesses are right now and then."""
    rounds = {}
    for parents in ((-1,), (-1,) * 12):
        drafter = TreeDrafter(known_side("llava", Uniform(), 0.9), parents)
        trace = Machine(drafter, known_side("llava"), Greedy(), SequentialTransport()).run(12)
        assert trace.tokens == plain("llava", limit=12)
        rounds[len(parents)] = len(trace.rounds)
    assert rounds[12] < rounds[1]


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}], ids=str
)
def test_processors_hear_each_nodes_own_way(settings: dict) -> None:
    drafter = TreeDrafter(side("llava", Uniform(), 0.5, **settings), BUSHY)
    target = side("llava", **settings)
    trace = Machine(drafter, target, Greedy(), SequentialTransport()).run(LIMIT)
    assert trace.tokens == plain("llava", **settings)


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}], ids=str
)
def test_a_tree_of_one_way_is_the_chain_that_the_same_side_drafts(settings: dict) -> None:
    drafting, reference = (side("llava", Uniform(), 0.5, **settings) for _ in range(2))
    tree = TreeDrafter(drafting, (-1, 0, 1, 2, 3)).draft([7, 8], 1)
    assert tree.tokens == reference.draft([7, 8], 5).tokens
    assert tree.tokens != side("llava", Uniform(), 0.5).draft([7, 8], 5).tokens  # they listen


def test_a_draft_of_words_drafts_trees() -> None:
    blind = side("qwen2_5_vl", prefill=lambda a, i: lambda cache: text_only_prefill(a, i, cache))
    machine = Machine(
        TreeDrafter(blind, BUSHY), known_side("qwen2_5_vl"), Greedy(), SequentialTransport()
    )
    assert machine.run(LIMIT).tokens == plain("qwen2_5_vl")


def test_eager_attention_takes_trees() -> None:
    target, drafter = side("llava", attention="eager"), side("llava", attention="eager")
    trace = Machine(TreeDrafter(drafter, BUSHY), target, Greedy(), SequentialTransport()).run(LIMIT)
    assert trace.tokens == plain("llava")
    assert trace.acceptance == 1


def test_attention_without_masks_is_refused(monkeypatch) -> None:
    model_side = side("llava", attention="eager")
    model_side.start()
    config = in_doubles("llava", "eager").decoder.config
    monkeypatch.setattr(config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(UserError, match=r"model.attention='flash_attention_2'.*valid: sdpa"):
        model_side.rows([], Draft((1, 2), parents=(-1, -1)))


@pytest.mark.parametrize("parents", [(), (0,), (-1, 0, -1), (-1, 3)])
def test_shapes_that_are_no_trees_by_level_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parents"):
        TreeDrafter(known_side("llava"), parents)
