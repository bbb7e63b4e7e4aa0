"""LLaVA-OneVision-1.5: class tokens between packed pictures, released sizes, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import random_processor
from espalier.harness.models.families import ADAPTERS, family_of
from espalier.methods.base import Need, Site
from tests.families import FAMILIES
from tests.family_runs import Tiny, saved, shown
from tests.tiny import chat, full_model, load_tiny, model_of, picture

TINY = Tiny("llava_onevision1_5")
SIGNALS = ("cls_attention", "cls_logits", "tower_received", "tower_keys", "tower_states")


def signals(chats: list[Any]) -> list[dict[str, Tensor]]:
    """Return the tower's signals for each chat, in one batch."""
    return [
        {name: view.signals[name][row] for name in SIGNALS}
        for view in shown(TINY.adapter, [Site("prefix")], [*map(Need, SIGNALS)], chats)
        for row in range(len(view.tokens))
    ]


def test_signals_of_packed_pictures_are_those_of_each_picture_alone() -> None:
    """Class tokens stand between the patches of two pictures, which a signal must leave out."""
    pictures = picture(1, 56, 28), picture(2, 42, 56)
    (packed,) = signals([chat("w4", *pictures)])
    alone = [signals([chat("w4", image)])[0] for image in pictures]
    for name in SIGNALS:
        expected = torch.cat([row[name] for row in alone])
        assert packed[name].std() > 0
        torch.testing.assert_close(packed[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "total", "tower", "language"),
    [("llava_ov_1_5_4b", 4.7, 0.3, 4.4), ("llava_ov_1_5_8b", 8.5, 0.3, 8.2)],
)
def test_config_files_build_the_published_billions_of_parameters(
    name: str, total: float, tower: float, language: float
) -> None:
    """The table of the release's README; nothing is allocated."""
    spec = model_of(f"model={name}")
    adapter = ADAPTERS.load(spec.adapter)
    assert family_of("llavaonevision1_5") == spec.adapter
    built = full_model(spec)
    counts = [
        sum(item.numel() for item in part.parameters()) for part in (built, built.model.visual)
    ]
    assert [round(count / 1e9, 1) for count in counts] == [total, tower]
    assert round((counts[0] - counts[1]) / 1e9, 1) == language
    vision = built.config.vision_config
    assert (vision.hidden_act, vision.layer_norm_eps, vision.mlp_ratio) == ("gelu", 1e-5, 4)
    images = random_processor(adapter, spec).image_processor
    (shape,) = images([picture(0, 640, 480)], return_tensors="pt")["image_grid_thw"].tolist()
    assert shape == [1, 34, 46]
    assert spec.facts.visual_tokens == 17 * 23


def test_a_tower_that_takes_pairs_of_frames_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(saved(TINY.name), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["temporal_patch_size"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="temporal_patch_size=2; valid: 1"):
        load_tiny(FAMILIES[TINY.name].spec, folder)
