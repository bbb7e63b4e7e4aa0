"""Rows of earlier layouts: variant and label in the words of conf/method, so that a cell stays one cell."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest

from espalier.harness.config.composer import compose_section
from espalier.harness.config.method_names import setting_names
from espalier.harness.config.resolvers import register
from espalier.harness.cost.budget import Budget
from espalier.harness.kinds.kind import label
from espalier.harness.specs.catalogue import build_method
from espalier.harness.store import SCHEMA
from espalier.harness.store.schema import upgraded


def second(method: str, variant: str | None, words: str, /, **params: Any) -> dict[str, Any]:
    """Return a row as the second version of the layout had it."""
    settings = {"method": {"params": params}}
    names = {"schema": 2, "method": method, "variant": variant, "settings": settings}
    return {**names, "extra": {"label": words, "n": 1}}


@pytest.mark.parametrize(
    ("row", "variant", "words"),
    [
        (second("vispruner", "paper", "", r=0.5), "official", ""),
        (second("divprune", "paper", "layer=2", layer=2), "paper", "layer=2"),
        (second("mine", "paper", "K=3", K=3), "paper", "K=3"),
        (second("fastv", None, "K=3", K=3), None, "K=3"),
        (second("fastv", "official", "official", K=2, queries="last"), "official", "official"),
        (second("fastv", "paper", "K=3 queries=last", K=3, queries="last"), "official", "K=3 official"),
        (second("fastv", "paper", "queries=mean", K=2, queries="mean"), "paper", "paper"),
        (
            second("dycoke", "official", "layers=(2, 3) reading=official official", reading="official"),
            "official",
            "layers=(2, 3) official",
        ),
        (
            second("visionzip", "official", "contextual=target_plus_mean official", contextual="target_plus_mean"),
            "official",
            "official",
        ),
        (second("visionzip", "paper", "", contextual="mean"), "paper", "paper"),
        (
            second("holov", "official", "alpha=0.5 cut=runs ranking=attention missing=each official",
                   alpha=0.5, cut="runs", ranking="attention", missing="each"),
            "official",
            "alpha=0.5 official",
        ),
        (
            second("visionzip+h2o", "official",
                   "VisionZip(contextual=target_plus_mean) H2O(repeated=True) cache_ratio=0.9 official",
                   VisionZip={"contextual": "target_plus_mean"}, H2O={"repeated": True}),
            "official",
            "H2O(repeated=True) cache_ratio=0.9 official",
        ),
    ],
)  # fmt: skip
def test_an_older_row_has_the_variant_and_the_label_of_today(
    row: dict[str, Any], variant: str | None, words: str
) -> None:
    lifted = upgraded(row)
    assert (lifted["variant"], lifted["extra"]) == (variant, {"label": words, "n": 1})
    assert lifted["schema"] == SCHEMA
    assert upgraded(lifted) == lifted


@pytest.mark.sampled
@pytest.mark.parametrize("name", setting_names())
def test_a_setting_of_an_older_row_is_the_same_curve_today(name: str) -> None:
    register()
    section = compose_section("method", name)
    method, budget = build_method(section["name"], section["params"]), Budget("kept", 0.5)
    values = ((field.name, getattr(method, field.name), field.default) for field in fields(method))
    words = [f"{key}={value}" for key, value, default in values if value != default]
    variants = section.get("variants") or {}
    # Rows of the second version called the one reading of a method `paper`.
    former = section["variant"] if variants else "paper"
    words += [former] * (former == "official")
    lifted = upgraded(second(section["name"], former, " ".join(words), **asdict(method)))
    assert lifted["variant"] == section["variant"]
    assert lifted["extra"]["label"] == label(method, section["variant"], variants, budget)
