"""Kept tokens of example pictures, by stored hyper-parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from espalier.harness.config.single_section import compose_section
from espalier.harness.reports.html import overlays as module


@pytest.mark.parametrize("method", ["pyramiddrop", "hired", "rtprune"])
def test_hyper_parameters_may_have_names_of_arguments(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    params = compose_section("method", method)["params"]
    curve = {method: (method, params, [0.5])}
    monkeypatch.setattr(module, "_pruning_curves", lambda results: curve)
    monkeypatch.setattr(module, "EXAMPLES", 1)
    dropped: list[tuple[str, str]] = []
    results: Any = SimpleNamespace(drop=lambda *reason: dropped.append(reason))
    (mask,) = module.overlays(results)["curves"][method]["0.5"]
    assert set(mask["mask"]) == {"0", "1"}
    assert len(mask["mask"]) == 144
    assert not dropped
