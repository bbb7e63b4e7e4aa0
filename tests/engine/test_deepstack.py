"""DeepStack: every token gets its own features after each of the first layers, merged tokens a mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.prefill import FEATURES, MASK, DeepStack, extract_features
from espalier.harness.engine.session import Session
from espalier.methods.base import Assignment, Mixture, Plan, Site, TokenReducer, View
from tests.family_runs import HALF, ROWS, Tiny
from tests.tiny import Scatter

NAMES = ("qwen3_vl", "qwen3_vl_video", "qwen3_vl_mixed", "qwen3_vl_moe_mixed")
#: Features are added after layers 0, 1 and 2.
LAYERS = 3


class Watch:
    """Outputs of the first layers and inputs of the next ones, at the prefill, and the model's features."""

    def __init__(self, adapter: Any) -> None:
        self.features: list[Tensor] = []
        self.mask = torch.zeros(0)
        self.out: dict[int, Tensor] = {}
        self.next: dict[int, Tensor] = {}
        self._handles = [adapter.decoder.register_forward_pre_hook(self._enter, with_kwargs=True)]
        for number in range(LAYERS):
            layer, following = adapter.decoder.layers[number : number + 2]
            self._handles += [
                # Before the engine's own hooks, which are installed when the decoder begins.
                layer.register_forward_hook(self._keep(self.out, number)),
                following.input_layernorm.register_forward_pre_hook(self._keep(self.next, number)),
            ]

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.features:
            self.features, self.mask = list(kwargs[FEATURES]), kwargs[MASK]

    def _keep(self, into: dict[int, Tensor], number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor | None = None) -> None:
            into.setdefault(number, args[0] if output is None else output)

        return hook

    def added(self, number: int) -> Tensor:
        """Return (B, M, D) features added after a layer."""
        return self.next[number] - self.out[number]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def watched(name: str, method: TokenReducer, budget: Budget, *rows: int) -> tuple[Watch, Any]:
    tiny = Tiny(name)
    watch = Watch(tiny.adapter)
    try:
        with Session(tiny.adapter, method, budget) as session:
            done = session.generate(tiny.inputs(*rows), max_new_tokens=1, do_sample=False)
    finally:
        watch.close()
    return watch, done


def by_row(watch: Watch, number: int) -> list[Tensor]:
    """The model's features of a layer, row by row of the batch."""
    return list(watch.features[number].split(watch.mask.sum(1).tolist()))


@pytest.mark.parametrize("name", NAMES)
def test_kept_tokens_get_their_own_features_and_nothing_else_does(name: str) -> None:
    for rows in ((1,), ROWS):
        watch, done = watched(name, Scatter(("prefix",)), HALF, *rows)
        for number in range(LAYERS):
            added = watch.added(number)
            for row, record in enumerate(done.records):
                expected = by_row(watch, number)[row][record.origin]
                row_features = added[row][added[row].abs().sum(-1) > 0]
                assert row_features.shape == expected.shape
                assert (row_features - expected).abs().max() < 1e-9 * expected.abs().max()
                assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("site", [1, 2, 3])
def test_a_site_between_layers_changes_what_is_added_behind_them_alone(site: int) -> None:
    watch, done = watched("qwen3_vl", Scatter((site,)), HALF, 1)
    for number in range(LAYERS):
        features = by_row(watch, number)[0]
        if number + 1 == site:  # the next layer takes in fewer tokens than were put out
            assert watch.next[number].shape[1] < watch.out[number].shape[1]
            continue
        added = watch.added(number)[0]
        expected = features if number < site else features[done.records[0].origin]
        row_features = added[added.abs().sum(-1) > 0]
        assert row_features.shape == expected.shape
        assert (row_features - expected).abs().max() < 1e-9 * expected.abs().max()


@dataclass(frozen=True)
class Pairs(TokenReducer):
    """Merges each token with the next; the first of a pair stays. `matrix` gives the same as a Mixture."""

    where: Site
    matrix: bool = False

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (self.where,)

    def plan(self, view: View, keep: int) -> Plan:
        n_rows, count = view.tokens.shape[:2]
        slot = (torch.arange(count) // 2).clamp(max=keep - 1)
        kept = torch.arange(keep).expand(n_rows, -1) * 2
        if not self.matrix:
            slot = slot.expand(n_rows, -1)
            return Plan(kept, Assignment(slot, torch.full(slot.shape, 0.5)))
        matrix = 0.5 * torch.nn.functional.one_hot(slot, keep).T.expand(n_rows, -1, -1)
        return Plan(kept, Mixture(matrix))


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("site", [Site("prefix"), Site("vision"), Site("layer", 1)])
def test_merged_tokens_get_features_merged_alike(site: Site, matrix: bool) -> None:
    """A layer site merges features not yet added; those added before are part of the merged tokens."""
    for rows in ((0,), ROWS):
        watch, done = watched("qwen3_vl", Pairs(site, matrix), HALF, *rows)
        for number in range(site.layer if site.where == "layer" else 0, LAYERS):
            added = watch.added(number)
            for row, record in enumerate(done.records):
                features = by_row(watch, number)[row]
                assert len(features) % 2 == 0
                expected = features.unflatten(0, (-1, 2)).mean(1)
                assert record.kept == (len(expected),)
                row_features = added[row][added[row].abs().sum(-1) > 0]
                assert (row_features - expected).abs().max() < 1e-6 * expected.abs().max()


def test_a_decoder_without_features_is_left_alone() -> None:
    layout = Tiny("llava").adapter.layout(Tiny("llava").inputs())
    for arguments in ({}, {FEATURES: None, MASK: None}, {FEATURES: [], MASK: None}):
        stack, unchanged = extract_features(arguments, layout)
        assert stack is None
        assert unchanged is arguments


def test_features_of_tokens_that_no_method_sees_are_refused() -> None:
    tiny = Tiny("qwen3_vl")
    layout = tiny.adapter.layout(tiny.inputs())
    with pytest.raises(ValueError, match=rf"for 3 tokens, methods see {sum(layout.counts)}"):
        DeepStack(layout, [torch.zeros(3, 8)])
