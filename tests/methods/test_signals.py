"""Every method with a score of importance keeps what was planted in it, and less than chance with the score turned.

One line a method: what carries the score. Methods without a score are listed, so that a new one is on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.base import View
from tests.methods.cases import BLOCKS, CASES, DEPTH, build, case_id, make_view, replaced
from tests.methods.runs import recall

#: Methods that go by places, by chance or by likeness alone.
SCORELESS = {"random", "uniform", "pooled", "divprune", "dart", "dycoke", "tome"}
#: Cases of scored methods that leave the score out.
UNSCORED = {"cdpruner-relevance=none"}

N_TOKENS = 144
Plant = Callable[[View, Tensor], View]
Case = tuple[str, dict[str, Any]]


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


LAST, NEXT, CLASS = (
    scores_in("last_attention"),
    scores_in("next_last_attention"),
    scores_in("cls_attention"),
)
WIDE = scores_in("wide_cls_attention@-1")
WORDS = scores_in("text_attention")

#: Case, as in the test's name: what carries its score.
CARRIERS: dict[str, Plant] = {
    "fastv": LAST,
    "fastv-queries=mean": scores_in("mean_attention"),
    "fitprune-scheme=((0.7, 0.5, 0.4, 0.4, 0.2),)": scores_in(
        "text_received_max", "visual_received_max"
    ),
    "fastervlm": CLASS,
    "hired": CLASS,
    "hired-alpha=0.2-budget=stripes": CLASS,
    "globalcom2": scores_in("cls_logits@-1"),
    "globalcom2-scores=attention-normalise=False": CLASS,
    "nuwa": CLASS,
    "nuwa-salience=attention-pillars=attention-quantile=0.55-guide=attention": CLASS,
    "pyramiddrop": LAST,
    "pyramiddrop-layers=(1, 2)": LAST,
    "pyramiddrop-ranking=next_layer": NEXT,
    "cdpruner": towards_words(words=("text_embeddings",)),
    "sparsevlm": WORDS,
    "sparsevlm-raters=above-assignment=euclidean-cluster=mean": WORDS,
    "sparsevlm-tau=0.0": WORDS,
    "specvlm": scores_in("text_attention@0", "text_attention@1"),
    "specvlm-guidance=last-layer=3-mass=0.8": scores_in("text_attention@2"),
    "prumerge": WIDE,
    "prumerge-merging=sum": WIDE,
    "prumerge-uniform=True": WIDE,
    "prumerge-merging=sum-uniform=True-k=3": WIDE,
    "uvprune": towards_words(words=("text_states",)),
    "uvprune-L=4": towards_words(words=("text_states",)),
    "uvprune-criterion=similarity": towards_words(words=("text_states",)),
    "uvprune-criterion=attention_variation": WORDS,
    "uvprune-criterion=attention-L=3": WORDS,
    "ivtp": scores_in("rollout"),
    "visionzip": CLASS,
    "visionzip-contextual=target_plus_mean": CLASS,
    **{
        f"rtprune{merging}": long_ones
        for merging in (
            "",
            "-merging=none",
            "-merging=visionzip",
            "-merging=sparsevlm",
            "-merging=nuwa",
            "-merging=gtp",
        )
    },
    "d2pruner": scores_in("last_attention", prior=1.0),
    "d2pruner-alpha=0.5-K=5": scores_in("last_attention", prior=1.0),
    "d2pruner-selection=importance": scores_in("last_attention", prior=1.0),
    "d2pruner-pivot_exclusion=True": scores_in("last_attention", prior=1.0),
}
SCORED = [case for case in CASES if case[0] not in SCORELESS and case_id(case) not in UNSCORED]


def test_every_method_is_planted_or_has_no_score():
    assert {case_id(case) for case in SCORED} == set(CARRIERS)
    assert {name for name, _ in CASES} >= SCORELESS


@pytest.mark.parametrize("case", SCORED, ids=case_id)
def test_what_was_planted_is_kept_and_the_canary_is_not(case: Case):
    method = build(case)
    view = make_view(method, [((0, 0, 12, 12),)] * 16)
    found, chance, turned = recall(
        method, N_TOKENS, lambda scores: CARRIERS[case_id(case)](view, scores)
    )
    assert found > 0.95
    # A method that kept the worst tokens falls below chance, so that the line above can fail.
    assert turned < chance


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
        (("nuwa", {}), 3, towards_words(words=("text_states",))),
        (("nuwa", {"guide": "attention"}), 3, LAST),
    ],
    ids=["ivtp-words", "nuwa-words", "nuwa-attention"],
)
def test_later_sites_with_scores_of_their_own(case: Case, layer: int, plant: Plant):
    method = build(case)
    (site,) = [
        one
        for one in method.all_sites(BLOCKS, DEPTH)
        if one.where == "layer" and one.layer == layer
    ]
    view = make_view(method, [((0, 0, 12, 12),)] * 16, site=site)
    found, chance, turned = recall(method, N_TOKENS, lambda scores: plant(view, scores))
    assert found > 0.95
    assert turned < chance
