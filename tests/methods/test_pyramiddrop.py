"""PyramidDrop: where its stages end, what they keep, and what they look at."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from espalier.harness.config.build_spec import build_spec
from espalier.harness.cost.budget import Budget, BudgetError, equivalent_tokens
from espalier.harness.engine.signals.next_layer_attention import NextRow
from espalier.methods.base import Need, Site
from espalier.methods.pyramiddrop import PyramidDrop
from tests import commands
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.engine import NAMES
from tests.methods.twins import check_method, slow_highest
from tests.tiny import DEPTH, load_tiny, model_of, save_tiny


def layers_of(method: PyramidDrop, depth: int) -> list[int]:
    return [site.layer for site in method.sites(depth)]


test_pyramiddrop = check_method(
    "pyramiddrop",
    partial(
        slow_highest,
        lambda method: (
            "next_last_attention" if method.ranking == "next_layer" else "last_attention"
        ),
    ),
    settings=({}, {"ranking": "next_layer"}),
    keeps=(1, 20, 47),
)


def test_the_published_schedule():
    """576, 288, 144 and 72 tokens over eight layers each: 270 on average."""
    facts = model_of("model=llava15_7b").facts
    kept = Budget("kept", 0.875).keep(PyramidDrop(), facts, 576, 32)
    assert kept == (288, 144, 72)
    assert equivalent_tokens(PyramidDrop(), facts, 576, 32, kept).average == 270


@pytest.mark.parametrize(
    ("tokens", "first", "share"), [(192, 4, 0.547), (128, 2, 0.515), (64, 2, 0.307)]
)
def test_averages_below_a_quarter_need_earlier_layers(tokens: int, first: int, share: float):
    facts, budget = model_of("model=llava15_7b").facts, Budget("average", 1 - tokens / 576)
    method = PyramidDrop(ratio=budget.ratio)
    assert layers_of(method, 32) == [first, 2 * first, 3 * first]
    kept = budget.keep(method, facts, 576, 32)
    assert equivalent_tokens(method, facts, 576, 32, kept).average == pytest.approx(tokens, abs=1)
    assert kept[0] / 576 == pytest.approx(share, abs=2e-3)
    assert kept[1] / 576 == pytest.approx(share**2, abs=2e-3)
    if tokens < 144:  # what layers 0 to 7 alone amount to
        with pytest.raises(
            BudgetError, match=r"before layer 8, 16, 24 of 32 reaches 0 <= ratio < 0\.7"
        ):
            budget.keep(PyramidDrop(), facts, 576, 32)


def test_what_the_earliest_stages_cannot_reach_is_refused_with_the_range():
    budget = Budget("average", 0.95)
    with pytest.raises(
        BudgetError, match=r"before layer 2, 4, 6 of 32 reaches 0 <= ratio < 0\.937"
    ):
        budget.keep(PyramidDrop(ratio=0.95), model_of("model=llava15_7b").facts, 576, 32)


@pytest.mark.sampled
@pytest.mark.parametrize("depth", [4, 6, 12, 27, 28, 32, 80])
@pytest.mark.parametrize("S", [2, 3, 4])
def test_stages_are_as_late_as_half_of_each_allows(depth: int, S: int):
    """Against the mean written out layer by layer, for every layout there is."""

    def mean(ends: tuple[int, ...]) -> float:
        return sum(0.5 ** sum(end <= layer for end in ends) for layer in range(depth)) / depth

    equal = depth // S
    layouts = [tuple(stage * depth // S for stage in range(1, S))]
    layouts += [
        tuple(stage * first for stage in range(1, S))
        for first in range(equal, min(2, equal) - 1, -1)
    ]
    assert layers_of(PyramidDrop(S=S), depth) == list(layouts[0])
    for percent in range(100):
        stages = tuple(layers_of(PyramidDrop(S=S, ratio=percent / 100), depth))
        fitting = [layout for layout in layouts if mean(layout) <= 1 - percent / 100 + 1e-9]
        assert stages == (fitting[0] if fitting else layouts[-1])


def test_the_layout_follows_the_ratio_of_the_command_line():
    params = [
        build_spec(cell).method.params
        for cell in commands.cells_of(
            "-m",
            "method=pyramiddrop",
            "budget=average",
            "ratio=0.5,0.8",
            "method.params.ratio=${ratio}",
        )
    ]
    assert [param["ratio"] for param in params] == [0.5, 0.8]


# ---------------------------------------------------------------- attention of a layer that has not run yet


def ranked_by(adapter, chats, places, ratio=0.0, **options):
    """What a method that ranks by the layer to come would be shown at some layers."""
    sites = [Site("layer", place) for place in places]
    return shown(adapter, sites, [Need("next_last_attention")], chats, ratio, **options)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [*NAMES, "deepseek_ocr"])
def test_the_row_of_the_next_layer_equals_eager(name: str, tmp_path: Path):
    spec = FAMILIES[name].spec
    folder = save_tiny(spec, tmp_path)
    sdpa, eager = load_tiny(spec, folder), load_tiny(spec, folder, attention="eager")
    places = (1, DEPTH - 1)
    for chat in FAMILIES[name].chats:
        views = ranked_by(sdpa, [chat], places)
        inputs = eager.encode([chat])
        rest = {key: value for key, value in inputs.items() if key != "input_ids"}
        at = eager.model._prepare_position_ids_for_generation(inputs["input_ids"], rest)
        with torch.inference_mode():
            maps = eager.model(**inputs, position_ids=at, output_attentions=True).attentions
        visual = eager.layout(inputs).visual[0]
        for place, view in zip(places, views, strict=True):
            wanted = maps[place][0, :, -1, visual].mean(0)
            # Eager attention takes its softmax in fp32.
            assert (view.signals["next_last_attention"][0] - wanted).abs().max() < 1e-6
        # It is another row than that of the layer before.
        assert (maps[places[0]] - maps[places[0] - 1])[0, :, -1, visual].mean(0).abs().max() > 1e-3


def test_rows_of_a_batch_and_of_what_is_left_are_those_alone_and_emulated():
    adapter, chats = adapter_of("llava_next"), FAMILIES["llava_next"].chats
    together = ranked_by(adapter, chats, (1, 3), ratio=0.5)
    hidden = ranked_by(adapter, chats, (1, 3), ratio=0.5, backend="emulate")
    assert len(together) == len(hidden)
    rows = [row for view in together for row in view.signals["next_last_attention"]]
    for fast, slow in zip(together, hidden, strict=True):
        difference = fast.signals["next_last_attention"] - slow.signals["next_last_attention"]
        assert difference.abs().max() < 1e-9
    for chat in chats:
        for view in ranked_by(adapter, [chat], (1, 3), ratio=0.5):
            row = view.signals["next_last_attention"][0]
            assert any(len(r) == len(row) and torch.allclose(r, row, atol=1e-9) for r in rows)


def test_a_layer_that_never_attends_is_an_error():
    row = NextRow(SimpleNamespace(forward=lambda hidden, **kwargs: hidden))
    with pytest.raises(RuntimeError, match="without calling its attention"):
        row.last(torch.zeros(1, 2, 4), (), torch.ones(1, 2, dtype=torch.bool))
    row.watch(
        torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 1.0
    )  # outside `last` it lets the layer run
