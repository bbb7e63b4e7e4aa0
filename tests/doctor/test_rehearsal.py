"""Rehearsals on simulated cards: what they count, against arithmetic and against the same run with values."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

from espalier.harness.cli import run
from espalier.harness.models.build_adapter import build_skeleton, read_parts, weight_bytes
from espalier.harness.models.families import ADAPTERS
from espalier.harness.runs.cluster.resources import gpu_kinds, reached
from espalier.harness.specs.run_spec import ModelSpec, RunSpec
from espalier.harness.tools.rehearsal import real_sizes
from espalier.harness.tools.rehearsal import rehearse as rehearse_module
from espalier.harness.tools.rehearsal.rehearse import GIB, largest, read_cards, rehearse
from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.select.topk import top
from tests.refused import refused


def build_random_model(model_class: Any, config: Any, spec: ModelSpec) -> Any:
    """In place of a skeleton: the model on the host, with values."""
    return model_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa")


#: A model of real sizes with few layers.
SMALL = ("model=llava15_7b", "model.weights=random", "model.scale.layers=3")


@pytest.mark.slow
def test_a_card_holds_weights_and_cache_as_by_hand() -> None:
    rehearsal = rehearse(*SMALL, "method=fastv", "ratio=0.5", cards="1xH100")
    record, text = rehearsal.record, rehearsal.spec.model.facts.text
    assert (record.visual, record.kept) == (576, (288,))
    (card,) = rehearsal.cards
    family = ADAPTERS.load("llava")
    config, _ = read_parts(family, rehearsal.spec.model)
    skeleton = build_skeleton(family.class_of(config), config, rehearsal.spec.model)
    assert card.weights == weight_bytes(skeleton)
    entries = sum(record.entering) + text.layers * record.text
    assert record.kv_bytes == entries * 2 * text.kv_heads * text.head_dim * 2
    # Besides the cache: the prompt's embeddings, its pixels, ids, masks and positions.
    embeddings = (record.visual + record.text) * text.hidden * 2
    assert 0 <= card.bytes_held - record.kv_bytes - embeddings < 2**20
    assert card.weights < card.tower <= card.peak


@pytest.mark.slow
def test_two_cards_share_the_layers() -> None:
    arguments = ("model=llava_ov_0_5b", "model.device_map=auto", "method=snapkv", "ratio=0.5")
    rehearsal = rehearse(*arguments, "benchmark=pope", "engine.batch_size=1", cards="2x3")
    assert all(card.weights > 0 and card.bytes_held > 0 for card in rehearsal.cards)
    assert rehearsal.step.moves > 0
    assert rehearsal.fits


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("method", ["fastv", "snapkv"])
def test_shapes_give_the_counts_and_peaks_of_values(method: str) -> None:
    """The seedling with its weights and all values, and with every float of more than 128 numbers a shape."""
    arguments = ("model=seedling", f"method={method}", "ratio=0.5")
    with (
        patch.object(real_sizes, "LARGE", 2**40),
        patch.object(rehearse_module, "build_skeleton", build_random_model),
    ):
        valued = rehearse(*arguments, cards="1x80")
    with patch.object(real_sizes, "LARGE", 128):
        shaped = rehearse(*arguments, cards="1x80")
    for result in (valued, shaped):
        print(result.prompt, result.step, result.cards)
    assert (valued.prompt, valued.step) == (shaped.prompt, shaped.step)
    assert (valued.cards, valued.record.kept) == (shaped.cards, shaped.record.kept)


def test_the_largest_number_fits_and_one_more_does_not() -> None:
    def peaks(count: int) -> list[int]:
        return [10 + 7 * count, 20 + 3 * count]

    for start, room in ((1, 100), (4, 100), (1, 17), (1, 16)):
        number = largest(start, 2 * start, room, peaks)
        assert max(peaks(number)) <= room or number == 0
        assert max(peaks(number + 1)) > room


@pytest.mark.slow
def test_the_predicted_batch_fits() -> None:
    arguments = (*SMALL, "method=none")
    batch = rehearse(*arguments, cards="1x4").batch
    assert batch is not None
    assert batch > 1
    (card,) = rehearse(*arguments, cards="1x4", rows=batch).cards
    assert 0.97 * 3 * GIB < card.peak <= 3 * GIB


def test_cards_are_named_by_size_or_kind() -> None:
    assert read_cards("4xH100") == (4, gpu_kinds()["H100"])
    assert read_cards("2x24") == (2, gpu_kinds()["RTX 4090"])
    count, kind = read_cards("1x48")
    assert (count, kind.memory) == (1, 48 * GIB)
    for text in ("80", "0x80", "4xB9", "x80", "4x", "ax80", "9x80"):
        assert f"cards={text!r}" in refused(read_cards, text)


@pytest.mark.slow
def test_the_command_prints_what_each_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=seedling", "method=none,fastv", "ratio=0.5")
    assert run.main(["-m", *words, "--rehearse", "cards=1x80"]) == 0
    out, _ = capsys.readouterr()
    assert Counter(line.split(" ")[0] for line in out.splitlines())["tokens"] == 2
    assert "144 visual" in out
    assert "asked to keep 72, kept 72" in out
    assert run.main([*words[:1], "--rehearse", "cards"]) == 2
    assert run.main(["model=llava15_7b", "--rehearse", "cards=1x8"]) == 2
    assert "do not fit" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_is_one_line_and_the_next_one_follows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rehearse_module.rehearse_run

    def failing(spec: RunSpec, cards: real_sizes.RealSizes) -> rehearse_module.Rehearsal:
        if spec.method.name == "none":
            raise RuntimeError("tensors of two cards")
        return whole(spec, cards)

    monkeypatch.setattr(rehearse_module, "rehearse_run", failing)
    words = ("model=seedling", "method=none,fastv", "ratio=0.5")
    assert run.main(["-m", *words, "--rehearse", "cards=1x80"]) == 1
    out, err = capsys.readouterr()
    assert "does not end on these cards: tensors of two cards" in err
    assert "kept 72" in out


class Longest(TokenReducer):
    """Keeps the longest tokens."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        return Plan(top(view.tokens.norm(dim=2), keep))


def test_a_method_chooses_among_values() -> None:
    """Guesses, one by one, would not fit together."""
    kind = next(iter(gpu_kinds().values()))
    with real_sizes.RealSizes(1, kind):
        tokens = torch.empty(1, 3000, 2048, device="cuda")
        assert tokens.content.is_meta  # type: ignore[attr-defined]
        grid = torch.cartesian_prod(*map(torch.arange, (1, 1, 50, 60))).unsqueeze(0).to("cuda")
        kept = Longest().answer(View(Site("prefix"), tokens, grid, {}), 70).kept
        lengths = tokens.content.norm(dim=2)  # type: ignore[attr-defined]
        assert kept.tolist() == top(lengths, 70).tolist()
        assert torch.empty(3000, 2048, device="cuda").content.is_meta  # type: ignore[attr-defined]


@pytest.mark.slow
def test_times_of_a_step_cover_the_launches_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["model=deepseek_ocr_base", "method=none", "--rehearse", "cards=1x80"]) == 0
    (step,) = [line for line in capsys.readouterr().out.splitlines() if "each step" in line]
    low, high = map(float, re.search(r"; ([\d.]+) to ([\d.]+) s", step).groups())
    # A step of one row reads little: the launches of its twelve layers take longer.
    assert (low, high) == pytest.approx(reached().expert_launch.times(12), rel=0.05)
