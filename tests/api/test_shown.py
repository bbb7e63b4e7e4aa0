"""Attention and scores of an answer: numbers of the prefill, and pictures of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaForConditionalGeneration

import espalier
from espalier.harness.api.questions import question_chat
from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.methods.h2o import H2O
from tests.family_runs import saved
from tests.refused import refused
from tests.tiny import picture

SAMPLE = samples("seedling_vqa", "test", 0, 0, 1)[0]
QUESTION = SAMPLE["question"]
SCENE = sample_scene(SAMPLE).to_pil()


@pytest.mark.slow
def test_attention_is_that_of_the_library(model: Any) -> None:
    with espalier.apply(model, "none") as plain:
        answer = plain.ask(SCENE, QUESTION, max_new_tokens=2, record=True)
        inputs = plain._opened.encode([question_chat(SCENE, QUESTION, model.spec)])
        visual = plain._adapter.layout(inputs).visual[0]
    eager = LlavaForConditionalGeneration.from_pretrained(
        weights_dir("seedling"), attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        maps = eager(**inputs, output_attentions=True).attentions
    for layer, weights in enumerate(maps):
        expected = weights[0].mean(0)[-1][visual].numpy()
        np.testing.assert_allclose(answer.attention(layer), expected, rtol=1e-4, atol=1e-7)
    assert answer.attention(-1).title == f"attention in layer {len(maps) - 1}"


def test_dropped_tokens_have_no_attention_and_scores_choose_the_kept(model: Any) -> None:
    with espalier.apply(model, "fastv", ratio=0.9) as pruned:
        answer = pruned.ask(SCENE, QUESTION, record=True)
        plain = pruned.ask(SCENE, QUESTION)
    assert (answer.text, answer.kept_indices) == (plain.text, plain.kept_indices)
    scores = np.asarray(answer.scores())
    assert sorted(np.argsort(-scores, kind="stable")[:14]) == list(answer.kept_indices)
    np.testing.assert_array_equal(scores, answer.attention(1))
    assert tuple(np.flatnonzero(np.isfinite(answer.attention(2).values))) == answer.kept_indices


def test_a_compressor_scores_every_layer(model: Any) -> None:
    with espalier.apply(model, "snapkv", ratio=0.9) as pruned:
        answer = pruned.ask(SCENE, QUESTION, record=True)
    for layer in range(6):
        assert np.isfinite(answer.scores(layer).values).all()
    np.testing.assert_array_equal(answer.scores(), answer.scores(5))
    assert not np.array_equal(answer.scores(0), answer.scores(1))


def test_scores_of_a_compressor_that_chooses_by_head_are_the_mean_of_its_heads(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = []
    score = H2O.score

    def recorded(self: H2O, view: Any) -> Any:
        rows.append((view.layer, score(self, view)))
        return rows[-1][1]

    monkeypatch.setattr(H2O, "score", recorded)
    with espalier.apply(model, "h2o", ratio=0.9) as pruned:
        answer = pruned.ask(SCENE, QUESTION, record=True)
    for layer, scores in rows:
        assert len(scores) > 1
        np.testing.assert_allclose(answer.scores(layer).values, scores.mean(0), rtol=1e-5)
        assert not np.allclose(scores[0], scores.mean(0))


def test_rows_of_a_batch_are_those_of_single_questions() -> None:
    model = espalier.load(saved("llava_next"), dtype="float32", device="cpu")
    pictures = [picture(number, *size) for number, size in enumerate(((120, 80), (70, 150)))]
    questions = [*((image, "w1 w2") for image in pictures), (None, "w1 w2 w3")]
    with espalier.apply(model, "fastv", ratio=0.5, K=1) as pruned:
        batch = pruned.ask_many(questions, max_new_tokens=2, record=True)
        beams = pruned.ask(*questions[0], max_new_tokens=2, record=True, num_beams=2)
        for question, answer in zip(questions, batch, strict=True):
            alone = pruned.ask(*question, max_new_tokens=2, record=True)
            for layer in (0, 1):
                values, expected = answer.attention(layer).values, alone.attention(layer).values
                assert values.shape == (answer.visual,)
                np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(beams.scores(), batch[0].scores(), rtol=1e-4)


@pytest.mark.slow
def test_values_are_drawn_over_the_pictures(model: Any, tmp_path: Path) -> None:
    with espalier.apply(model, "fastv", ratio=0.9) as pruned:
        answer = pruned.ask([SCENE, SCENE], QUESTION, record=True)
    drawing = answer.attention(2).show(tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 1000
    first, second, bar = drawing.axes
    values = answer.attention(2).values
    assert bar.get_ylim() == pytest.approx((np.nanmin(values), np.nanmax(values)))
    # The highest value is the most coloured place: red far from blue.
    best = int(np.nanargmax(values))
    panel = (first, second)[best // 144]
    pixels = np.asarray(panel.images[0].get_array())
    row, column = divmod(best % 144, 12)
    side = len(pixels) // 12
    cells = pixels.reshape(12, side, 12, side, 3).mean((1, 3))
    colour = cells.max(2) - cells.min(2)
    assert np.unravel_index(colour.argmax(), (12, 12)) == (row, column)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda answer: answer.attention(6), "attention(layer=6): valid: 0 to 5"),
        (lambda answer: answer.attention(True), "attention(layer=True): valid: 0 to 5"),
        (lambda answer: answer.scores(3), "scores(layer=3): valid: 2, None"),
        (lambda answer: answer.scores().show("no/such/a.png"), "cannot be written"),
    ],
)
def test_places_that_do_not_exist_are_refused(model: Any, call: Any, words: str) -> None:
    with espalier.apply(model, "fastv", ratio=0.9) as pruned:
        answer = pruned.ask(SCENE, QUESTION, max_new_tokens=1, record=True)
    assert words in refused(call, answer)


def test_what_was_not_recorded_is_one_line_with_the_remedy(model: Any) -> None:
    with espalier.apply(model, "divprune", ratio=0.9) as pruned:
        unrecorded = pruned.ask(SCENE, QUESTION, max_new_tokens=1)
        unscored = pruned.ask(SCENE, QUESTION, max_new_tokens=1, record=True)
        assert "record='yes'" in refused(pruned.ask, SCENE, QUESTION, record="yes")
    for call in (unrecorded.scores, lambda: unrecorded.attention(0)):
        assert "valid: ask(..., record=True)" in refused(call)
    assert "states no scores" in refused(unscored.scores)
    with (
        espalier.apply(espalier.load("seedling_diffusion"), "fastv", ratio=0.5) as steps,
        pytest.raises(espalier.UserError, match="takes several"),
    ):
        steps.ask(SCENE, QUESTION, max_new_tokens=4, steps=2, record=True)
