"""Drafting on a part of the target's own cache: lossless, nothing computed twice, and the right entries."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.decoding.speculative.cached_model import SparseDrafter
from espalier.harness.decoding.speculative.drafts import Draft, Greedy
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from tests.decoding.models import (
    LIMIT,
    NAMES,
    encoded,
    fed_counts,
    in_doubles,
    known_side,
    plain,
    side,
    some,
    sparse,
)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("gamma", range(1, 10))
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", NAMES)
def test_sparse_drafts_change_nothing(name: str, ratio: float, gamma: int) -> None:
    target = known_side(name)
    drafter = sparse(name, target, ratio)
    trace = Machine(drafter, target, Greedy(), SequentialTransport(), gamma).run(LIMIT)
    assert trace.tokens == plain(name)
    if ratio == 0:
        assert trace.acceptance == 1


def test_some_sparse_drafts_are_refused() -> None:
    """Or the tests above would say little."""
    for name in NAMES:
        target = side(name)
        trace = Machine(sparse(name, target, 0.99), target, Greedy(), SequentialTransport(), 3).run(
            LIMIT
        )
        assert trace.rollbacks > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_draft_holds_all_words_and_each_layers_own_visual_tokens(name: str) -> None:
    target = side(name)
    drafter = sparse(name, target, 0.5)
    drafter.draft([], 1)
    visual = in_doubles(name).layout(encoded(name)).visual[0]
    length = encoded(name)["input_ids"].shape[1]
    for layer, kept in enumerate(some(name, 0.5)):
        dropped = set(visual.tolist()) - set(visual[kept].tolist())
        slots = [slot for slot in range(length) if slot not in dropped]
        mine, theirs = drafter.cache.layers[layer], target.cache.layers[layer]
        assert torch.equal(mine.keys, theirs.keys[:, :, slots])
        assert torch.equal(mine.values, theirs.values[:, :, slots])


def test_verified_tokens_are_copied_and_refused_ones_dropped() -> None:
    """After each round the draft's entries of the answer are the target's, bit by bit, but for its own new ones."""
    target = side("llava")
    drafter = sparse("llava", target, 0.9)
    prompt = 0
    tokens: list[int] = []
    for drafted, accepted in ((3, 0), (4, 2), (2, 2), (5, 1)):
        draft = drafter.draft(tokens, drafted)
        prompt = prompt or drafter.cache.lengths[0] - (drafted - 1)
        length = drafter.cache.lengths[0] - prompt
        assert length == len(tokens) + drafted - 1
        dense = max(len(tokens) - 1, 0)
        for mine, theirs in zip(drafter.cache.layers, target.cache.layers, strict=True):
            start = target.prompt_lengths[0]
            copied = theirs.keys[:, :, start : start + dense]
            assert torch.equal(mine.keys[:, :, prompt : prompt + dense], copied)
        rows = target.rows(tokens, draft)
        tokens += [*draft.tokens[:accepted], (rows[accepted] + 1) % 200]


def test_only_what_the_target_does_not_hold_is_fed(monkeypatch) -> None:
    target = side("llava")
    drafter = sparse("llava", target, 0.9)
    fed = fed_counts(drafter._side.stack, monkeypatch)
    trace = Machine(drafter, target, Greedy(), SequentialTransport(), 4).run(LIMIT)
    assert fed == [1] * 3 + [1] * 4 * (len(trace.rounds) - 1)


def test_what_the_target_has_verified_as_a_tree_is_taken_too() -> None:
    """A chain that the target holds in front of a tree's nodes is where it was."""
    target = side("llava")
    drafter = sparse("llava", target, 0.0)
    target.rows([4, 5], Draft((6, 7, 8), parents=(-1, -1, 1)))
    assert drafter.draft([4, 5, 9], 3).tokens == known_side("llava").draft([4, 5, 9], 3).tokens


def test_kept_tokens_of_other_depth_are_refused() -> None:
    with pytest.raises(ValueError, match="layers"):
        SparseDrafter(side("llava"), torch.zeros(2, 3, dtype=torch.long), torch.arange(16))
