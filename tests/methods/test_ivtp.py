"""IVTP: where its groups end, what it keeps in the tower and in the decoder, and what the words count."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.methods.base import Need, Site, View
from espalier.methods.ivtp import IVTP
from tests import commands
from tests.family_runs import adapter_of
from tests.methods.cases import SQUARE, make_view, replaced
from tests.methods.runs import kept_by, left_by, watched
from tests.methods.towers import TOWERS, chats_of
from tests.methods.twins import best, check_method, slow_highest
from tests.tiny import CHATS, DEPTH, load_llava, save_llava

INSIDE = Site("layer", 3)


def inside(tilings=SQUARE, seed: int = 0) -> View:
    """A view in the decoder: 144 visual tokens behind three words, and six words behind them."""
    return make_view(IVTP(), tilings, seed, INSIDE)


# ---------------------------------------------------------------- sites and schedule


def test_equal_ratios_down_to_the_root_and_from_there_on():
    shares = IVTP().fractions(1 / 16, 7 + 4)
    ratios = [a / b for a, b in pairwise((1, *shares))]
    assert shares[6] == pytest.approx(1 / 4)
    assert ratios[:7] == pytest.approx([4 ** (1 / 7)] * 7)
    assert shares[7:] == pytest.approx((2**-2.5, 2**-3, 2**-3.5, 2**-4))
    # A shallow decoder has fewer sites, and the tower one at least.
    assert IVTP().fractions(1 / 16, 3) == pytest.approx((1 / 4, 1 / 8, 1 / 16))
    assert IVTP().fractions(1 / 16, 1) == pytest.approx((1 / 16,))


@pytest.mark.parametrize("ratio", [0.5, 0.889])
def test_llava_meets_its_budget(ratio: float):
    facts = commands.spec_of("model=llava15_7b").model.facts
    kept = Budget("kept", ratio).keep(IVTP(), facts, 576, 32)
    assert (len(kept), kept[-1]) == (7 + 4, round(576 * (1 - ratio)))
    assert kept[6] == pytest.approx(576 * math.sqrt(1 - ratio), abs=1)


# ---------------------------------------------------------------- decoder


def slow_scores(view: View, row: int) -> list[float]:
    """Word by word, in Python floats."""
    tokens = view.tokens[row].tolist()
    n, width = len(tokens), len(tokens[0])
    image = [sum(token[axis] for token in tokens) / n for axis in range(width)]
    words = view.signals["text_states"][row].tolist()
    places = view.signals["text_positions"][row].tolist()
    last = max(view.signals["all_positions"][row].tolist())
    weight = {}
    for t, word in enumerate(words):
        if places[t] > last:
            dot = sum(a * b for a, b in zip(word, image, strict=True))
            weight[t] = math.exp(dot / (math.hypot(*word) * math.hypot(*image)))
    total = sum(weight.values())
    rows = view.signals["text_rollout"][row].tolist()
    return [sum(weight[t] / total * rows[t][j] for t in weight) for j in range(n)]


test_ivtp = check_method(
    "ivtp",
    lambda _method, view, row, keep: best(slow_scores(view, row), keep),
    views=lambda _method, keep: inside(SQUARE * 3, seed=keep),
    keeps=(1, 20, 143, 144),
)

test_ivtp_in_the_tower = check_method("ivtp", partial(slow_highest, "rollout"), keeps=(20,))


def test_weights_of_words_by_hand():
    """Two words behind the image, one as the mean of its tokens, one its opposite: e to e^-1; the third is padding."""
    tokens = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
    signals = {
        "text_states": torch.tensor([[[9.0, 9.0], [3.0, 3.0], [-1.0, -1.0], [0.0, 0.0]]]),
        "text_positions": torch.tensor([[0, 3, 4, -1]]),
        "all_positions": torch.tensor([[1, 2]]),
        "text_rollout": torch.tensor([[[0.0, 0.0], [0.2, 0.1], [0.1, 0.3], [0.0, 0.0]]]),
    }
    view = View(INSIDE, tokens, torch.zeros(1, 2, 4, dtype=torch.long), signals)
    high = math.e / (math.e + 1 / math.e)
    assert IVTP().weights(view)[0].tolist() == pytest.approx([0, high, 1 - high, 0])
    assert IVTP().plan(view, 1).kept.tolist() == [[0]]  # 0.188 to 0.124
    even = replaced(view, text_states=signals["text_states"].abs())
    assert IVTP().weights(even)[0].tolist() == pytest.approx([0, 0.5, 0.5, 0])
    assert IVTP().plan(even, 1).kept.tolist() == [[1]]  # 0.15 to 0.2


# ---------------------------------------------------------------- engine


class Placed(IVTP):
    """Reads the places of visual tokens in the decoder, too."""

    def needs(self, site: Site) -> tuple[Need, ...]:
        places = (Need("visual_positions"),) if site.where == "layer" else ()
        return (*super().needs(site), *places)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", TOWERS)
def test_each_site_keeps_the_highest_of_what_is_left(name: str):
    """One site in a tower of two blocks, then one before each decoder layer but the first."""
    adapter, chats = adapter_of(name), chats_of(name)
    for chat in chats:
        method, seen = watched(Placed())
        record = kept_by(adapter, method, [chat], 0.7).records[0]
        first = [(view, keep) for view, keep, _ in seen if view.site.where == "tower"]
        rest = [shown for shown in seen if shown[0].site.where == "layer"]
        assert {view.site for view, _ in first} == {Site("tower", 1)}
        assert sum(keep * len(view.tokens) for view, keep in first) == record.kept[0]
        assert [view.site.layer for view, *_ in rest] == list(range(1, DEPTH))
        assert tuple(keep for _, keep, _ in rest) == record.kept[1:]
        left = left_by(rest, lambda view: slow_scores(view, 0))
        signals = {key: value[0].tolist() for key, value in rest[0][0].signals.items()}
        places = [signals["visual_positions"][place] for place in left]
        assert [signals["all_positions"].index(place) for place in places] == record.origin.tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("chat", CHATS)
def test_the_decoders_rollout_is_the_product_of_its_maps(chat, tmp_path):
    """Two groups of two layers, with everything kept: each site sees the maps of its own group."""
    folder = save_llava(tmp_path)
    method, seen = watched(IVTP(group=2, layers=4, depth=DEPTH))
    kept_by(load_llava(folder), method, [chat], 0.0)
    eager = load_llava(folder, attention="eager")
    inputs = eager.encode([chat])
    with torch.inference_mode():
        maps = eager.model(**inputs, output_attentions=True).attentions
    layout = eager.layout(inputs)
    visual, words = layout.visual[0], layout.words[0]
    views = [view for view, *_ in seen]
    assert [view.site.layer for view in views] == [2, 4]
    for view, (lower, upper) in zip(views, ((0, 1), (2, 3)), strict=True):
        low, high = (0.5 * maps[n][0].mean(0) for n in (lower, upper))
        identity = 0.5 * torch.eye(len(low))
        product = (high + identity) @ (low + identity)
        rollout = view.signals["text_rollout"][0]
        assert (rollout - product[words][:, visual]).abs().max() < 1e-6
        assert (rollout > 0).any()
