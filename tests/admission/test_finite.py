"""Tensors with NaN, infinite or too large values are named before a checkpoint is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from espalier.harness.errors import UserError
from espalier.harness.kinds import checkpoint_check as finite
from espalier.harness.kinds.checkpoint_check import check_finite
from tests.refused import refused
from tests.tiny import LLAVA


def checkpoint(folder: Path, **changes: torch.Tensor) -> Path:
    tensors = {"first": torch.randn(7, 5), "second": torch.randn(3), "count": torch.arange(4)}
    save_file({**tensors, "scalar": torch.tensor(1.0), **changes}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 34])
def test_a_tensor_with_one_bad_value_is_named_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, place: int
) -> None:
    monkeypatch.setattr(finite, "CHUNK", 10)  # two rows at once: the tensor is read in four parts
    poisoned = torch.randn(7, 5)
    poisoned.view(-1)[place] = value
    folder = checkpoint(tmp_path, first=poisoned)
    with pytest.raises(UserError, match=r"tensor 'first' of .*NaN, infinite"):
        check_finite(LLAVA, folder)
    check_finite(replace(LLAVA, check_weights=False), folder)


def test_all_of_them_are_counted_and_a_sound_checkpoint_passes(tmp_path: Path) -> None:
    check_finite(LLAVA, checkpoint(tmp_path))
    bad = torch.tensor(torch.nan)
    folder = checkpoint(tmp_path, scalar=bad, second=bad.expand(3).clone())
    assert "'scalar' and 1 more" in refused(check_finite, LLAVA, folder)


def test_values_beyond_half_precision_are_too_large_for_it_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, second=torch.tensor([1.0, 7.0e4, 2.0], dtype=torch.bfloat16))
    check_finite(replace(LLAVA, dtype="bfloat16"), folder)
    assert "beyond model.dtype=float16" in refused(
        check_finite, replace(LLAVA, dtype="float16"), folder
    )


def test_large_checkpoints_are_looked_at_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path, second=torch.full((3,), torch.nan))
    monkeypatch.setattr(finite, "LARGEST", 100)
    check_finite(LLAVA, folder)
    assert "'second'" in refused(check_finite, replace(LLAVA, check_weights=True), folder)
