"""Models that do not fit into memory are refused before weights are read, with sizes and a setting that helps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.integrations import accelerate

from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import check_model
from espalier.harness.models import build_adapter as base
from espalier.harness.models.build_adapter import load_adapter, weight_bytes
from espalier.harness.models.loader import load_checkpoint
from espalier.harness.models.memory_check import (
    check_memory,
    check_placed,
    free_bytes,
    prompt_bytes,
    weight_limits,
)
from espalier.harness.paths import ROOT
from espalier.harness.specs import conflicts
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.store.files.digests import Digests
from lab.pages.placement_page import page, verdict
from run import main
from tests import commands
from tests.families.onevision import ONEVISION
from tests.refused import refused
from tests.tiny import LLAVA, full_model, random_model, save_llava

GIB = 2**30
#: Two cards of 80 GiB and a host of 100.
TWO_CARDS = {0: 79 * GIB, 1: 80 * GIB, "cpu": 100 * GIB}
LARGE = replace(LLAVA, device="cuda", weights="trained", dtype="bfloat16", longest=1)


def test_one_card_is_too_small_and_the_map_is_named() -> None:
    line = refused(check_memory, LARGE, 136 * GIB, TWO_CARDS)
    assert "136.0 GiB of weights do not fit on model.device='cuda'" in line
    assert "besides a prompt of 1 tokens" in line
    # The host's memory is no part of a plan that nobody asked for.
    assert (
        "valid: model.device_map=auto (79.0 GiB of card 0, 80.0 GiB of card 1, 0.0 GiB of cpu)"
        in line
    )
    check_memory(LARGE, 78 * GIB, TWO_CARDS)
    assert "80.0 GiB are free" in refused(
        check_memory, replace(LARGE, device="cuda:1"), 81 * GIB, TWO_CARDS
    )


def test_offload_is_advised_where_nothing_else_holds_the_weights_and_named_slow() -> None:
    line = refused(check_memory, LARGE, 200 * GIB, TWO_CARDS)
    assert "model.device_map=auto, model.offload=true, slowly (" in line
    assert "100.0 GiB of cpu)" in line


@pytest.mark.parametrize(
    ("changes", "needed", "room", "words"),
    [
        ({"dtype": "float32"}, 999, TWO_CARDS, "model.dtype=bfloat16"),
        (
            {"device": "cpu"},
            101,
            {"cpu": 100 * GIB},
            "model.device='cpu', where 100.0 GiB are free",
        ),
    ],
)
def test_the_map_is_not_advised_where_it_would_not_help(
    changes: dict[str, str], needed: int, room: dict, words: str
) -> None:
    line = refused(check_memory, replace(LARGE, **changes), needed * GIB, room)
    assert words in line
    assert "device_map" not in line


def test_a_map_takes_what_it_may_and_no_more() -> None:
    spread_out = replace(LARGE, device_map="auto")
    check_memory(spread_out, 158 * GIB, TWO_CARDS)
    assert "159.0 GiB of weights do not fit into 79.0 GiB of card 0" in refused(
        check_memory, spread_out, 159 * GIB, TWO_CARDS
    )
    check_memory(replace(spread_out, offload=True), 258 * GIB, TWO_CARDS)
    bounded = replace(spread_out, max_memory={"1": 60 * GIB, "cpu": 0})
    assert weight_limits(bounded, TWO_CARDS) == {1: 60 * GIB, "cpu": 0}
    assert "60.0 GiB of card 1" in refused(check_memory, bounded, 61 * GIB, TWO_CARDS)
    host = replace(spread_out, max_memory={"1": 60 * GIB, "cpu": 9 * GIB})
    assert "model.offload=true, or cpu: 0" in refused(check_memory, host, 61 * GIB, TWO_CARDS)
    check_memory(replace(host, offload=True), 61 * GIB, TWO_CARDS)


#: Bytes of weights at half precision, by parameters.
PUBLISHED = {
    "llava15_13b": 13.35e9,
    "internvl2_26b": 25.5e9,
    "qwen2_5_vl_32b": 33.5e9,
    "llava_ov_72b": 73.2e9,
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "cards", "fits"),
    [
        ("llava15_13b", 1 * [24], False),
        ("internvl2_26b", 1 * [24], False),
        ("qwen2_5_vl_32b", 1 * [24], False),
        ("qwen2_5_vl_32b", 1 * [80], True),
        ("llava15_13b", 2 * [24], True),
        ("llava_ov_72b", 1 * [80], False),
        ("llava_ov_72b", 2 * [80], True),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_a_plan_leaves_room_for_the_longest_prompt(
    name: str, cards: list[int], fits: bool, offload: bool
) -> None:
    spec = replace(
        commands.spec_of(f"model={name}", "model.device_map=auto", "benchmark=textvqa").model,
        offload=offload,
        device="cuda",
    )
    room = {n: int(0.98 * size * GIB) for n, size in enumerate(cards)} | {"cpu": 200 * GIB}
    needed = int(2 * PUBLISHED[name])
    places = weight_limits(spec, room)
    assert all(
        room[card] - places[card] >= prompt_bytes(spec, 1 / len(cards))
        for card in room
        if card != "cpu"
    )
    if fits or offload:
        check_memory(spec, needed, room)
    else:
        assert "model.offload=true, slowly" in refused(check_memory, spec, needed, room)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes any card that a plan names for one of this machine's."""
    monkeypatch.setattr(accelerate, "get_max_memory", dict)


def plan_of(skeleton: torch.nn.Module, spec: ModelSpec, free: dict) -> set[str]:
    places = accelerate._get_device_map(skeleton, "auto", dict(weight_limits(spec, free)), None)
    return {str(place) for place in places.values()}


@pytest.mark.slow
@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("name", "plans"),
    [
        # Cards and GiB of each: sums that are enough where the last layers find no card with room for a whole one.
        ("internvl3_38b", {(2, 40): "auto", (3, 40): "auto", (2, 48): "auto"}),
        ("qwen3_5_122b_a10b", {(6, 40): "no", (5, 48): "no", (3, 80): "no", (4, 80): "auto"}),
        ("qwen3_5_35b_a3b", {(3, 24): "no", (4, 24): "auto", (2, 40): "auto"}),
    ],
)
def test_a_plan_that_is_accepted_leaves_no_layer_on_disk(
    name: str, plans: dict[tuple[int, int], str]
) -> None:
    spec = replace(
        commands.spec_of(f"model={name}", "model.weights=random").model,
        device="cuda:0",
        device_map="auto",
    )
    skeleton = full_model(spec)
    for (number, size), word in plans.items():
        free = {card: (size - 1) * GIB for card in range(number)} | {"cpu": 0}
        assert verdict(spec, skeleton, number, size) == word
        assert ("disk" in plan_of(skeleton, spec, free)) == (word == "no")
        assert weight_bytes(skeleton) <= sum(weight_limits(spec, free).values())


@pytest.mark.usefixtures("cards")
def test_a_plan_with_layers_on_disk_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(LARGE, path=save_llava(tmp_path), device_map="auto", dtype="float32")
    needed = weight_bytes(random_model(LLAVA))
    half = prompt_bytes(spec, 1 / 2)
    monkeypatch.setattr(base, "free_bytes", lambda: {0: half + needed, 1: half + 10, "cpu": 0})
    monkeypatch.setattr(base, "load_checkpoint", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UserError, match=r"do not fit into .*, layer by layer, the memory of"):
        load_adapter(spec)
    with_room = {card: 2 * needed + half for card in (0, 1)} | {"cpu": 0}
    monkeypatch.setattr(base, "free_bytes", lambda: with_room)
    with pytest.raises(pytest.fail.Exception, match="weights were read"):
        load_adapter(spec)


def test_many_frames_take_their_room() -> None:
    lines = {}
    for frames in (32, 128):
        argv = ["model=llava_ov_72b", "benchmark=videomme", f"model.video.frames={frames}"]
        lines[frames] = commands.spec_of(*argv).model
    assert lines[128].longest > 128 * 196
    assert lines[128] == replace(lines[32], video=lines[128].video)  # no other model
    assert prompt_bytes(lines[128]) > 2 * prompt_bytes(lines[32])
    # Keys and values of 25,088 tokens alone are 8 GiB.
    assert prompt_bytes(lines[128]) > 8 * GIB


def test_the_drafts_card_is_left_free_where_there_is_another() -> None:
    beside = replace(LARGE, device_map="auto", spared_card=1)
    assert weight_limits(beside, TWO_CARDS)[1] == 0
    assert weight_limits(beside, TWO_CARDS)["cpu"] == 0
    single = {0: 79 * GIB, "cpu": 100 * GIB}
    assert weight_limits(replace(beside, spared_card=0), single)[0] > 78 * GIB


def test_layers_on_the_host_are_refused_without_offload() -> None:
    spec = replace(LARGE, device_map="auto")
    check_placed(spec, {"layers.0": 0, "layers.1": 1})
    check_placed(spec, {"": "cpu"})  # a machine without a card
    for place in ("cpu", "disk"):
        with pytest.raises(UserError, match=f"would be placed on {place}.*model.offload=true"):
            check_placed(spec, {"layers.0": 0, "layers.1": place})
        check_placed(replace(spec, offload=True), {"layers.0": 0, "layers.1": place})


@pytest.mark.slow
def test_the_spared_card_is_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with two reported GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for draft, option, card in (
        ("llava_ov_7b", None, 0),
        ("llava_ov_7b", "device=cuda:1", 1),
        ("llava_ov_7b", "device=cpu", None),
        ("llava_ov_7b", "device_map=auto", None),
        ("llava_ov_72b", None, None),
    ):
        options = [] if option is None else [f"+method.draft_options.{option}"]
        command = ["method=vanilla_sd", "model=llava_ov_72b", f"method.draft={draft}", *options]
        model = commands.spec_of(*command).model
        assert (model.device_map, model.spared_card) == ("auto", card)


def test_random_weights_are_built_on_one_device() -> None:
    assert commands.spec_of("model=llava_ov_72b", "model.weights=random").model.device_map is None


def test_this_machine_has_room() -> None:
    assert free_bytes()["cpu"] > 2**20


def test_a_model_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(LLAVA, path=save_llava(tmp_path), weights="trained")
    monkeypatch.setattr(base, "free_bytes", lambda: {"cpu": 1000})
    monkeypatch.setattr(base, "load_checkpoint", lambda *_: pytest.fail("weights were read"))
    assert "do not fit on model.device='cpu'" in refused(load_adapter, spec)
    monkeypatch.setattr(base, "build_random", lambda *_: pytest.fail("weights were made"))
    assert "do not fit on model.device='cpu'" in refused(load_adapter, LLAVA)


def test_the_bound_reaches_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}

    class Class:
        @staticmethod
        def from_pretrained(source: str, **options: object) -> object:
            limits.update(options)
            return None, {"missing_keys": (), "unexpected_keys": (), "mismatched_keys": ()}

    spec = replace(LARGE, path=tmp_path, device_map="auto", max_memory={"0": 5, "cpu": 7})
    load_checkpoint(Class, None, spec)
    assert limits["max_memory"] == {0: 5, "cpu": 7}


def test_bytes_are_those_of_the_parameters_and_tied_ones_count_once() -> None:
    model = random_model(LLAVA)
    assert weight_bytes(model) == (
        sum(p.numel() * 4 for p in model.parameters())
        + sum(b.numel() * b.element_size() for b in model.buffers())
    )
    text = {"text": {"tie_word_embeddings": True}}
    tied = replace(ONEVISION, architecture={**ONEVISION.architecture, **text})
    head = ONEVISION.facts.vocabulary * ONEVISION.facts.text.hidden * 4
    assert weight_bytes(random_model(ONEVISION)) - weight_bytes(random_model(tied)) == head


# ---------------------------------------------------------------- attention


def test_flash_attention_without_its_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(LARGE, attention="flash_attention_2", path=save_llava(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(conflicts, "find_spec", lambda name: None)
    line = refused(check_model, spec, True, Digests())
    assert "needs the package flash-attn" in line
    assert "valid: sdpa, eager" in line
    # Whoever gets past it (a package that does not import) reads one line too.
    assert "model.attention='flash_attention_2'" in refused(
        load_adapter, replace(spec, device="cpu")
    )


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"dtype": "float32"}])
def test_flash_attention_takes_a_gpu_and_half_precision(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    spec = replace(LARGE, attention="flash_attention_2", path=save_llava(tmp_path), **changes)
    assert "needs a GPU and half precision, not " in refused(check_model, spec, True, Digests())


def test_a_map_without_cards_is_the_cpu(tmp_path: Path) -> None:
    """Support of half precision is checked on the device of the model."""
    spec = replace(LLAVA, weights="trained", path=save_llava(tmp_path), device_map="auto")
    check_model(replace(spec, dtype="bfloat16"), True, Digests())
    assert "on the CPU" in refused(check_model, replace(spec, dtype="float16"), True, Digests())


@pytest.mark.exhaustive
def test_the_page_of_cards_follows_from_the_config_files() -> None:
    assert (ROOT / "docs" / "placement.md").read_text(encoding="utf-8") == page()


@pytest.mark.slow
def test_a_row_of_offloaded_layers_has_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["model.device_map=auto", "model.offload=true", f"store={tmp_path}", "json=true"]
    assert main([*command, "limit=1", "method=divprune", "engine.paired=1"]) == 0
    row = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(row["time"].values()) == {None}
    assert "copied from the host" in row["extra"]["untimed"]
    assert row["extra"]["speedup"] is None
