"""Kept tokens of example pictures, by stored hyper-parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from espalier.harness.config.composer import compose_section
from espalier.harness.errors import UserError
from espalier.harness.reports.html import overlays as module


@pytest.mark.parametrize("method", ["pyramiddrop", "hired", "rtprune"])
def test_hyper_parameters_may_have_names_of_arguments(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    params = compose_section("method", method)["params"]
    row = {"method": method, "settings": {"method": {"params": params}}}
    curve = {method: (row, [0.5])}
    monkeypatch.setattr(module, "_pruning_curves", lambda results: curve)
    monkeypatch.setattr(module, "EXAMPLES", 1)
    dropped: list[tuple[str, str]] = []
    results: Any = SimpleNamespace(drop=lambda *reason: dropped.append(reason))
    (mask,) = module.overlays(results, lambda row, name: None)["curves"][method]["0.5"]
    assert (set(mask["mask"]), len(mask["mask"])) == ({"0", "1"}, 144)
    assert not dropped


def test_code_that_is_not_the_row_s_is_one_line_for_all_ratios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(row: Any, name: str) -> str | None:
        raise UserError(f"the code of {name} has changed")

    curve = {"Mine p=2": ({"method": "Mine", "settings": {"method": {"params": {}}}}, [0.5, 0.9])}
    monkeypatch.setattr(module, "_pruning_curves", lambda results: curve)
    dropped: list[tuple[str, str]] = []
    results: Any = SimpleNamespace(drop=lambda *reason: dropped.append(reason))
    assert module.overlays(results, refuse)["curves"] == {}
    assert dropped == [("no picture of kept tokens", "Mine p=2: the code of Mine has changed")]
