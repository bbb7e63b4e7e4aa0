"""DeepSeek-OCR 2: views and their queries, refusals, signals of the encoder, sizes of the release."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import load_adapter
from espalier.methods.base import Need, Site
from tests.families import FAMILIES
from tests.family_runs import Tiny, calls_of, saved, shown
from tests.tiny import chat, full_model, model_of, picture

SPEC = FAMILIES["deepseek_ocr2"].spec


def test_each_crop_and_the_whole_page_are_a_row_of_queries() -> None:
    adapter = Tiny("deepseek_ocr2").adapter
    layout = adapter.layout(adapter.encode([chat("w1", picture(0, 28, 100), picture(1, 40, 40))]))
    assert [tuple(place) for place in layout.grid[0].tolist()] == [
        (image, view, 0, column)
        for image, view in ((0, 1), (0, 2), (0, 0), (1, 0))
        for column in range(144)
    ]
    # The projector gets both pages first.
    assert layout.source[0, :, 0].tolist() == [*range(288, 576), *range(144), *range(144, 288)]
    assert layout.tile[0].tolist() == [1] * 144 + [2] * 144 + [0] * 288
    assert layout.special == (2,)
    work = layout.work[0]
    assert (work.units, work.tokens) == (4 * 144, 4 * 288)
    sees = torch.ones(288, 288).tril()
    sees[:144] = 0
    sees[:, :144] = 1
    assert work.pairs == 4 * int(sees.sum())


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ({"size": {"height": 64, "width": 64}}, r"processor\.size\.height=64: .*valid: 96, 128"),
        ({"tile_size": 80}, r"processor\.tile_size=80: .*views of 96 and 128 pixels alone"),
    ],
)
def test_views_without_a_table_of_queries_are_refused(
    processor: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        load_adapter(replace(SPEC, processor={**SPEC.processor, **processor}))


def test_kept_queries_cannot_be_drawn_on_the_picture() -> None:
    adapter = Tiny("deepseek_ocr2", "float32").adapter
    taken = espalier.wrap(adapter.model, adapter.processor)
    with espalier.apply(taken, "rtprune", ratio=0.5) as pruned:
        answer = pruned.ask(picture(0, 40, 40), "w1", max_new_tokens=1)
    assert (answer.kept, answer.visual) == (72, 144)
    with pytest.raises(UserError, match=r"show\(\): .* have no place in the picture"):
        answer.show()


def test_keys_and_states_of_the_encoder_are_those_of_its_queries() -> None:
    tiny = Tiny("deepseek_ocr2", "float32")
    adapter, inputs = tiny.adapter, tiny.inputs(1)
    layer = adapter.tower_layers()[-1]
    needs = (Need("wide_tower_keys"), Need("tower_states"))
    with calls_of(layer.self_attn.k_proj) as keys, calls_of(layer) as states:
        signals = shown(adapter, [Site("prefix")], needs, FAMILIES[tiny.name].chats[1:2])[0].signals
    source = adapter.layout(inputs).source[0, :, 0]
    assert signals["wide_tower_keys"].shape[1] == signals["tower_states"].shape[1] == 576
    captured = torch.cat([call.output[:, 144:].flatten(0, 1) for call in states])[source]
    assert torch.equal(signals["tower_states"][0], captured)
    # Rotary positions turn pairs of entries, and change no length.
    whole = torch.cat([call.output[:, 144:].flatten(0, 1) for call in keys])
    expected = whole[source].norm(dim=1)
    lengths = signals["wide_tower_keys"][0].norm(dim=1)
    assert (lengths - expected).abs().max() < 1e-5 * expected.max()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"width": {"qwen2-0-5b": {"dim": 64}}}, "tower.hidden=32, the loaded model has 64"),
        ({"width": {"sam_vit_b": {"heads": 2}}}, "stem.heads=4, the loaded model has 2"),
    ],
)
def test_sizes_that_the_release_states_are_compared_with_the_facts(
    tmp_path: Path, table: dict[str, Any], words: str
) -> None:
    for file in saved("deepseek_ocr2").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = {"model_type": "deepseek_vl_v2", "vision_config": table}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"model.facts.{words}"):
        load_adapter(replace(SPEC, path=tmp_path, weights="trained"))


def test_the_config_file_builds_the_released_architecture() -> None:
    spec = model_of("model=deepseek_ocr2")
    model = full_model(spec)
    count = sum(parameter.numel() for parameter in model.parameters())
    # The release's index states 6779249408 bytes and lists the tensors built here. The remainder is the size of tables
    # for 64, 100 and 400 queries.
    assert 2 * (count + 896 * (64 + 100 + 400)) == 6_779_249_408
    windowed = set(range(12)) - set(model.config.vision_config.sam_config.global_attn_indexes)
    assert spec.facts.stem.window_layers == len(windowed)
