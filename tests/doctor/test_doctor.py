"""The doctor finds what is wrong with a machine, and says what it could not look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.cli.doctor import checks, main
from espalier.harness.tools.doctor import exactness
from espalier.harness.tools.doctor import machine_report as machine
from espalier.harness.tools.doctor.machine_report import NotHere, examine


@pytest.mark.slow
def test_this_machine_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", str(tmp_path)]) == 0
    report = capsys.readouterr().out
    assert "0 failed" in report
    for name, _ in checks(tmp_path):
        assert name in report


def test_each_ending_has_its_word() -> None:
    def broken() -> str:
        raise RuntimeError("no kernel\nfor this device")

    def missing() -> str:
        raise NotHere("needs a CUDA device")

    results = [examine("a", check) for check in (lambda: "fine", missing, broken)]
    assert [(result.status, result.detail) for result in results] == [
        ("ok", "fine"),
        ("not here", "needs a CUDA device"),
        ("failed", "RuntimeError: no kernel for this device"),
    ]


def test_a_package_outside_its_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.installed_version
    monkeypatch.setattr(
        machine, "installed_version", lambda n: "1.13.0" if n == "torch" else real(n)
    )
    result = examine("packages", machine.packages)
    assert result.status == "failed"
    assert "torch" in result.detail
    assert "1.13.0" in result.detail
    assert "transformers" not in result.detail


def test_a_store_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert examine("store", lambda: machine.store(tmp_path / "file")).status == "failed"


@pytest.mark.slow
def test_one_bit_of_one_logit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exactness.reduced

    def off(*arguments: Any) -> Any:
        done = real(*arguments)
        logits = done.logits.clone()
        logits[0, 0, 0] = torch.nextafter(logits[0, 0, 0], torch.tensor(torch.inf))
        return replace(done, logits=logits)

    monkeypatch.setattr(exactness, "reduced", off)
    result = examine("ratio 0", lambda: exactness.ratio_zero("cpu"))
    assert result.status == "failed"
    assert "visionzip" in result.detail


def test_a_token_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path keeps one other token than the slow reference."""
    real = exactness.reduced

    def off(adapter: Any, method: str, ratio: float, backend: str) -> Any:
        return real(adapter, method, 0.9 if backend == "drop" else ratio, backend)

    monkeypatch.setattr(exactness, "reduced", off)
    assert examine("drop", lambda: exactness.drop_as_emulated("cpu")).status == "failed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_checks_are_not_here(tmp_path: Path) -> None:
    results = [
        examine(*check) for check in checks(tmp_path) if "stream" in check[0] or check[0] == "GPUs"
    ]
    assert [result.status for result in results] == ["not here"] * 3


def test_overrides_replace_all_checks_by_the_longest_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["model=seedling"]) == 1
    printed = capsys.readouterr().out
    assert "states no model.architecture" in " ".join(printed.split())
    assert "0 ok, 1 failed" in printed


@pytest.mark.slow
def test_the_longest_prompt_is_answered_on_random_weights() -> None:
    text = "{hidden: 64, intermediate: 64, heads: 4, kv_heads: 4, head_dim: 16}"
    overrides = ["model=llava15_7b", "model.device=cpu", "model.dtype=float32"]
    overrides += ["model.scale.layers=1", "model.scale.tower_layers=1"]
    overrides += [f"model.facts.text={text}", "model.facts.projector=[1024,64,64]"]
    assert "a prompt of 2,096 tokens and 16 new ones" in exactness.longest_shape(overrides)
