"""Every method on three model families through the real engine: a new line in tests/methods/cases.py is a new row here.

Each cell: ratio 0 is bit-identical to the plain model, dropping equals emulation, a row of the batch equals the row
alone, and the budget is met under each rule, or refused with a range that holds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from espalier.harness.cost.budget import RULES, Budget
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.signals.tower_attention import tower_layer
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import TokenReducer
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.methods.cases import BLOCKS, CASES, DEPTH, build, case_id, signals_of
from tests.methods.engine import check_budget, check_cell, check_count
from tests.methods.runs import kept_by
from tests.tiny import load_tiny, save_tiny

#: A raster and a class token; crops, newlines and padding; merged patches, windows and positions on three axes;
#: tokens that see one another, and sliding layers; experts; tokens that are means of patches, newlines between them;
#: class tokens between packed pictures.
IMAGES = (
    *("llava", "llava_next", "qwen2_5_vl", "gemma3"),
    *("qwen3_vl_moe", "glm4v", "paddleocr_vl", "hunyuan_ocr", "molmo2"),
    "llava_onevision1_5",
)
#: For methods that compare frames: the families whose tiny videos have more than two.
VIDEOS = ("onevision_video", "llava_video")

#: Cells that are known to be refused, with words of the refusal.
REFUSED = {
    ("tome", "qwen2_5_vl"): "patch_tokens",
    ("ivtp", "qwen2_5_vl"): "patch_tokens",
    ("tome", "gemma3"): "patch_tokens",
    ("ivtp", "gemma3"): "patch_tokens",
    ("tome", "glm4v"): "patch_tokens",
    ("ivtp", "glm4v"): "patch_tokens",
    ("tome", "qwen3_vl_moe"): "patch_tokens",
    ("ivtp", "qwen3_vl_moe"): "patch_tokens",
    ("tome", "paddleocr_vl"): "patch_tokens",
    ("ivtp", "paddleocr_vl"): "patch_tokens",
    ("tome", "hunyuan_ocr"): "patch_tokens",
    ("ivtp", "hunyuan_ocr"): "patch_tokens",
    ("tome", "molmo2"): "patch_tokens",
    ("ivtp", "molmo2"): "patch_tokens",
    ("tome", "llava_onevision1_5"): "patch_tokens",
    ("ivtp", "llava_onevision1_5"): "patch_tokens",
    # Its first tower layer works in windows.
    ("hired", "qwen2_5_vl"): "tower layer 0 .* does not attend over all patches",
}

#: What a session needs beside the method: D2Pruner's prior of two views, resized to each grid.
CALIBRATED = {"prior": tuple(torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) + 0.1)}

CELLS = [
    pytest.param(case, name, number, id=f"{case_id(case)}-{name}")
    for case in CASES
    for number, name in enumerate(VIDEOS if build(case).needs_frames() else IMAGES)
]


@cache
def adapter_of(name: str) -> Adapter:
    """A tiny model of a family, as deep as the cases are meant for."""
    spec = FAMILIES[name].spec
    facts = replace(spec.facts, text=replace(spec.facts.text, layers=DEPTH))
    spec = replace(spec, facts=facts)
    with TemporaryDirectory() as folder:
        return load_tiny(spec, save_tiny(spec, Path(folder)))


@cache
def plain_run(name: str) -> GeneratedBatch:
    return kept_by(adapter_of(name), NoReduction(), FAMILIES[name].chats, 0.0)


def refusal(adapter: Adapter, method: TokenReducer) -> str | None:
    """What the family says if it lacks what the method asks of its tower: blocks to act in, a layer to read."""
    try:
        if method.tower_sites(BLOCKS):
            adapter.tower_blocks()
        for site in method.all_sites(BLOCKS, DEPTH):
            for need in method.needs(site):
                if need.signal.startswith(("cls_", "wide_", "tower_")):
                    adapter.tower_attention(tower_layer(adapter, need))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "family"), REFUSED)
def test_what_is_refused_says_why(name: str, family: str) -> None:
    line = refusal(adapter_of(family), build((name, {})))
    assert line is not None
    assert re.search(REFUSED[name, family], line)


@pytest.mark.sampled(32)
@pytest.mark.parametrize(("case", "name", "row"), CELLS)
def test_a_method_on_a_family(case: tuple[str, dict[str, Any]], name: str, row: int) -> None:
    adapter, method, chats = adapter_of(name), build(case), FAMILIES[name].chats
    changes: dict[str, Any] = CALIBRATED if "prior" in signals_of(method) else {}
    line = refusal(adapter, method)
    if line is not None:
        with pytest.raises(UserError, match=re.escape(line)):
            kept_by(adapter, method, chats, 0.5)
        return
    plain = plain_run(name)
    assert plain.logits is not None
    check_cell(adapter, method, chats, plain.logits, (row % len(chats),), **changes)
    for rule in RULES:
        check_budget(adapter, method, chats, Budget(rule, 0.6), **changes)
    totals = [record.visual for record in plain.records]
    check_count(adapter, method, chats, Random(case_id(case)).randint(1, max(totals)), **changes)
