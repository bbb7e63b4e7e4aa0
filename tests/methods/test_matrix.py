"""Every method on many model families through the real engine: a new line in tests/methods/cases.py is a new row here.

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
from espalier.methods.base import MethodError, TokenReducer
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.methods.cases import BLOCKS, CASES, DEPTH, build, case_id, signals_of
from tests.methods.engine import Chats, check_budget, check_cell, check_count
from tests.methods.runs import kept_by
from tests.methods.towers import chats_of
from tests.tiny import load_tiny, save_tiny

#: A raster and a class token; crops, newlines and padding; packed planes, and pooled frames with a newline; merged
#: patches, windows and positions on three axes; pixel shuffle; tokens that see one another, and sliding layers;
#: experts; tokens that are means of patches, newlines between them; class tokens between packed pictures.
IMAGES = (
    *("llava", "llava_next", "onevision_image", "onevision_video", "qwen2_5_vl", "internvl"),
    *("gemma3", "qwen3_vl_moe", "glm4v", "paddleocr_vl", "hunyuan_ocr", "molmo2"),
    "llava_onevision1_5",
)
#: For methods that compare frames: the families whose tiny videos have more than two.
VIDEOS = ("onevision_video", "llava_video")
#: For methods inside the tower: the families whose tokens are patches, and one that refuses.
TOWERS = ("llava", "llava_next", "onevision_image", "qwen2_5_vl")
#: Of single methods: models of their papers, and chats that mix pictures and videos.
FURTHER = {
    "rtprune": ("deepseek_ocr",),  # its ratio test has the larger ones
    "sparsevlm": ("onevision_mixed",),
    "dart": ("onevision_mixed",),
}

#: Cells that are known to be refused, with words of the refusal.
REFUSED = {
    (name, family): "patch_tokens"
    for name in ("tome", "ivtp")
    for family in ("qwen2_5_vl", *IMAGES[6:])
} | {
    # Its first tower layer works in windows.
    ("hired", "qwen2_5_vl"): "tower layer 0 .* does not attend over all patches",
}
#: Cells that are refused in a run: crops that are not stitched.
NOT_STITCHED = (("hired", "internvl"), ("globalcom2", "internvl"))

#: What a session needs beside the method: D2Pruner's prior of two views, resized to each grid.
CALIBRATED = {"prior": tuple(torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) + 0.1)}


def families_of(case: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    """The families that a method runs on."""
    method = build(case)
    usual = VIDEOS if method.needs_frames() else TOWERS if method.tower_sites(BLOCKS) else IMAGES
    return (*usual, *FURTHER.get(case[0], ()))


CELLS = [
    pytest.param(case, name, number, id=f"{case_id(case)}-{name}")
    for case in CASES
    for number, name in enumerate(families_of(case))
    if (case[0], name) not in NOT_STITCHED
]


@cache
def adapter_of(name: str) -> Adapter:
    """A tiny model of a family, as deep as the cases are meant for."""
    spec = FAMILIES[name].spec
    spec = replace(spec, facts=replace(spec.facts, text=replace(spec.facts.text, layers=DEPTH)))
    with TemporaryDirectory() as folder:
        return load_tiny(spec, save_tiny(spec, Path(folder)))


@cache
def plain_run(name: str, in_tower: bool) -> tuple[Chats, GeneratedBatch]:
    """A family's chats, for methods in the tower those of single patches, and their answers without reduction."""
    adapter = adapter_of(name)
    chats = chats_of(name) if in_tower else FAMILIES[name].chats
    return chats, kept_by(adapter, NoReduction(), chats, 0.0)


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
    assert re.search(REFUSED[name, family], refusal(adapter_of(family), build((name, {}))))


@pytest.mark.parametrize(("name", "family"), NOT_STITCHED)
def test_crops_that_are_not_stitched_are_refused(name: str, family: str) -> None:
    with pytest.raises(MethodError, match="does not stitch"):
        kept_by(adapter_of(family), build((name, {})), FAMILIES[family].chats, 0.5)


@pytest.mark.sampled(960)
@pytest.mark.parametrize(("case", "name", "row"), CELLS)
def test_a_method_on_a_family(case: tuple[str, dict[str, Any]], name: str, row: int) -> None:
    adapter, method = adapter_of(name), build(case)
    changes: dict[str, Any] = CALIBRATED if "prior" in signals_of(method) else {}
    line = refusal(adapter, method)
    if line is not None:
        with pytest.raises(UserError, match=re.escape(line)):
            kept_by(adapter, method, FAMILIES[name].chats, 0.5)
        return
    chats, plain = plain_run(name, bool(method.tower_sites(BLOCKS)))
    check_cell(adapter, method, chats, plain.logits, (row % len(chats),), **changes)
    for rule in RULES:
        check_budget(adapter, method, chats, Budget(rule, 0.6), **changes)
    totals = [record.visual for record in plain.records]
    check_count(adapter, method, chats, Random(case_id(case)).randint(1, max(totals)), **changes)
