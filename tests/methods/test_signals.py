"""Every method with a score of importance keeps what was planted in it, and less than chance with the score turned.

What a method reads says what carries its score: attention that each token gets. Where it is something else, a line of
CARRIERS says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from espalier.harness.engine.signals.table import SIGNALS
from espalier.methods.base import TokenReducer, View
from tests.methods.cases import BLOCKS, CASES, DEPTH, build, case_id, make_view, replaced
from tests.methods.runs import recall
from tests.methods.test_all import Case

N_TOKENS = 144
Plant = Callable[[View, Tensor], View]


def scores_in(*keys: str, **flat: float) -> Plant:
    """The score stands in these signals, (B, N) or the same in each row of (B, T, N); others are made `flat`."""

    def plant(view: View, scores: Tensor) -> View:
        def carry(key: str) -> Tensor:
            signal = view.signals[key]
            return scores if signal.dim() == 2 else scores.unsqueeze(1).expand_as(signal)

        level = {key: torch.full_like(view.signals[key], value) for key, value in flat.items()}
        return replaced(view, **{key: carry(key) for key in keys}, **level)

    return plant


def towards_words(*, words: tuple[str, ...]) -> Plant:
    """Words point along the first axis, and tokens the further along it the higher their score."""

    def plant(view: View, scores: Tensor) -> View:
        tokens = torch.cat([scores.unsqueeze(2), view.tokens[:, :, 1:]], dim=2)
        along = {key: torch.zeros_like(view.signals[key]) for key in words}
        for value in along.values():
            value[:, :, 0] = 1.0
        return replaced(view, tokens, **along)

    return plant


def long_ones(view: View, scores: Tensor) -> View:
    """Tokens are as long as their score is high."""
    return replaced(view, torch.nn.functional.normalize(view.tokens, dim=2) * scores.unsqueeze(2))


def attention_read(method: TokenReducer) -> list[str]:
    """Keys of what a method reads at its first site that gives each token the attention it gets."""
    keys = [need.key for need in method.needs(method.all_sites(BLOCKS, DEPTH)[0])]
    return [key for key in keys if key.partition("@")[0] in ATTENTION]


#: Signals that say how much each visual token is attended to, by their documented shape and words.
ATTENTION = {
    name
    for name, words in SIGNALS.items()
    if words.startswith(("(B, N) ", "(B, T, N) ", "(P, N) "))
    and ("attention" in words or "softmax" in words)
} - {"prior"}

TO_WORDS = towards_words(words=("text_states",))
BEHIND_PRIOR = scores_in("last_attention", prior=1.0)

#: What carries the score where it is not the attention that is read: name, or case as in the test's name.
CARRIERS: dict[str, Plant] = {
    "cdpruner": towards_words(words=("text_embeddings",)),
    "uvprune": TO_WORDS,
    "uvprune-criterion=attention_variation": scores_in("text_attention"),
    "uvprune-criterion=attention-L=3": scores_in("text_attention"),
    "rtprune": long_ones,
    "d2pruner": BEHIND_PRIOR,
}
#: Cases of these that leave the score out, or give most places to something else.
UNSCORED = {
    "cdpruner-relevance=none",
    "fastvid-c=2-tau=-1.0-p=2-d=0.8",
    "pact",
    "pact-cutoff=0.4-keep=0.8",
    "btp",
    "btp-attention=(0.0, 0.5, 1.0)-places=(0.0, 0.2, 0.0)",
}
#: Cases that choose half of their tokens by likeness, so that turned scores keep some of what was planted.
HALF_SCORED = {"vispruner"}


def carrier_of(case: Case) -> Plant | None:
    """What plants the score of a case; None: it has none, but goes by places, by chance or by likeness alone."""
    if case_id(case) in UNSCORED:
        return None
    stated = CARRIERS.get(case_id(case)) or CARRIERS.get(case[0])
    read = attention_read(build(case))
    return stated or (scores_in(*read) if read else None)


SCORED = [case for case in CASES if carrier_of(case) is not None]


def test_these_have_no_score():
    unscored = {
        "random",
        "uniform",
        "pooled",
        "center",
        "downsample",
        "divprune",
        "dart",
        "dycoke",
        "tome",
        *UNSCORED,
    }
    scored = {case[0] for case in SCORED}
    without = {case[0] for case in CASES if case not in SCORED} - scored | UNSCORED
    assert unscored <= without
    assert not unscored & {case[0] for case in SCORED}
    for name in without - unscored:  # others have none to read
        assert not attention_read(build((name, {})))


@pytest.mark.sampled
@pytest.mark.parametrize("case", SCORED, ids=case_id)
def test_what_was_planted_is_kept_and_the_canary_is_not(case: Case):
    method, plant = build(case), carrier_of(case)
    view = make_view(method, [((0, 0, 12, 12),)] * 16)
    share, chance, turned = recall(method, N_TOKENS, lambda scores: plant(view, scores))
    assert share > 0.95
    # A method that kept the worst tokens falls below chance, so that the line above can fail.
    assert turned < (0.5 if case_id(case) in HALF_SCORED else chance)


@pytest.mark.parametrize(
    ("case", "layer", "plant"),
    [
        (
            ("ivtp", {}),
            2,
            lambda view, scores: replaced(
                view, text_rollout=scores.unsqueeze(1).expand_as(view.signals["text_rollout"])
            ),
        ),
        (("nuwa", {}), 3, TO_WORDS),
        (("nuwa", {"guide": "attention"}), 3, scores_in("last_attention")),
    ],
    ids=["ivtp-words", "nuwa-words", "nuwa-attention"],
)
def test_later_sites_with_scores_of_their_own(case: Case, layer: int, plant: Plant):
    method = build(case)
    (site,) = [
        place
        for place in method.all_sites(BLOCKS, DEPTH)
        if place.where == "layer" and place.layer == layer
    ]
    view = make_view(method, [((0, 0, 12, 12),)] * 16, site=site)
    share, chance, turned = recall(method, N_TOKENS, lambda scores: plant(view, scores))
    assert share > 0.95
    assert turned < chance
