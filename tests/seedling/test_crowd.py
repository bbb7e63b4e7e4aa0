"""Crowded scenes, their questions, the start of their model from seedling, and its training."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.harness.seedling.crowd import (
    CYCLE,
    FAMILIES,
    LONGEST_NUMBER,
    SIDE,
    TEMPLATES,
    WORDS,
    ask,
    crowd_metrics,
    crowd_objects,
    crowd_scene,
    encode,
    question_stream,
    relation_question,
    sample_objects,
    samples,
)
from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.seedling.scenes import CELL, PATCH, WIDTH, SceneObject
from espalier.harness.seedling.vocabulary import UNK, VOCABULARY
from lab.training import crowd_release, stage_runtime
from lab.training.crowd_gaze import (
    GAZE_ATTENTION,
    Watched,
    gaze_attention,
    gaze_loss,
    objects_looked_at,
)
from lab.training.crowd_lessons import (
    CROWD_TEXT_START,
    crowd_hidden,
    make_lesson,
    validate_crowd,
)
from lab.training.crowd_model import crowd_weights_dir
from lab.training.crowd_stage import new_crowd_model, train_crowd
from lab.training.dialogue_packs import PREFIX
from lab.training.fast_math import use_attention
from lab.training.patch_targets import crowd_targets
from lab.training.release_stage import load_exported
from lab.training.stage_runtime import Worker, load_checkpoint, load_recipe
from lab.training.tower_stage import tower_of

MIX = dict.fromkeys(FAMILIES, 4)
SCENES = [crowd_objects("val", 0, index) for index in range(300)]
QUESTIONS = """
from espalier.harness.seedling.crowd import FAMILIES, ask, question_stream
from espalier.harness.seedling.crowd import crowd_objects
for index in range(20):
    stream = question_stream("val", 0, index)
    print(ask(crowd_objects("val", 0, index), stream, dict.fromkeys(FAMILIES, 4)))
"""


def questions_of(index: int) -> list:
    return ask(SCENES[index], question_stream("val", 0, index), MIX)


def test_pixels_and_questions_are_pinned():
    digest = hashlib.sha256()
    for split in ("train", "val", "test"):
        for index in range(12):
            scene = crowd_scene(split, 0, index)
            questions = ask(scene.objects, question_stream(split, 0, index), MIX)
            digest.update(scene.image.tobytes() + repr((scene.objects, questions)).encode())
    assert digest.hexdigest() == "4ccdcb5ae4c0180c81d9d09e21cbec1a13cfb0807f724f698e141dc769361a46"


def test_questions_do_not_depend_on_hash_seeds():
    command = [sys.executable, "-c", QUESTIONS]
    texts = {
        subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_objects_are_apart_and_inside_a_quarter():
    for objects in SCENES:
        taken = np.zeros((SIDE, SIDE), bool)
        for item in objects:
            x0, y0, x1, y1 = item.box
            assert x0 // WIDTH == (x1 - 1) // WIDTH
            assert y0 // CELL == (y1 - 1) // CELL
            assert not taken[y0:y1, x0:x1].any()
            taken[y0:y1, x0:x1] = True


def test_scenes_are_crowded():
    frequencies = []
    for objects in SCENES:
        names = [item.name for item in objects if item.kind == "shape"]
        numbers = {item.colour for item in objects if item.kind == "digit"}
        assert len(numbers) == 2
        frequencies.append(max(names.count(name) for name in names))
        for colour in numbers:
            row = [item.box for item in objects if item.kind == "digit" and item.colour == colour]
            gaps = [right[0] - left[2] for left, right in pairwise(row)]
            assert 2 <= len(row) <= LONGEST_NUMBER
            assert min(gaps) >= PATCH
    assert max(frequencies) == 9
    assert np.mean([len(objects) for objects in SCENES]) > 13


def test_every_template_occurs_and_uses_known_words_only():
    templates = set()
    for index in range(len(SCENES)):
        for question in questions_of(index):
            templates.add((question.family, question.template))
            assert UNK not in encode(f"{question.text} {question.answer}")
    assert templates == {(family, name) for family, names in TEMPLATES.items() for name in names}


def test_words_are_seedlings_but_for_spare_ones():
    changed = [old for old, new in zip(VOCABULARY, WORDS, strict=True) if old != new]
    assert changed
    assert all(word.startswith("<extra_") for word in changed)


def answer_by_hand(objects: tuple[SceneObject, ...], question) -> str:
    """The answer of a question, read off its words and the list of objects."""
    shapes = [item for item in objects if item.kind == "shape"]
    words = question.text.split()
    if question.family == "number":
        digits = [item for item in objects if item.kind == "digit" and item.colour == words[2]]
        return " ".join(item.name for item in sorted(digits, key=lambda item: item.box[0]))
    if question.family == "count":
        return str(sum(words[2] in (item.name, item.colour) for item in shapes))
    if question.family == "exist":
        return "yes" if any([item.colour, item.name] == words[3:5] for item in shapes) else "no"
    if question.family == "relation":
        alike = [item for item in shapes if item.name == words[5]]
        axis = 0 if words[4] in ("leftmost", "rightmost") else 1
        choose = min if words[4] in ("leftmost", "highest") else max
        return choose(alike, key=lambda item: item.box[axis] + item.box[axis + 2]).colour
    if question.template == "shape_of_colour":
        (item,) = (item for item in shapes if item.colour == words[3])
        return item.name
    (item,) = (item for item in shapes if item.name == words[4])
    return item.colour


def test_answers_are_right():
    for index, objects in enumerate(SCENES):
        for question in questions_of(index):
            assert question.answer == answer_by_hand(objects, question), question


def test_a_relation_without_a_clear_answer_is_not_asked():
    boxes = ((0, 0, 16, 16), (4, 4, 20, 20), (100, 100, 116, 116))
    names = ("star", "star", "cross")
    colours = ("red", "blue", "white")
    objects = [SceneObject("shape", *fields) for fields in zip(names, colours, boxes, strict=True)]
    assert relation_question(objects, question_stream("val", 0, 0)).family == "attribute"


def test_targets_label_the_patches_of_each_object():
    objects = SCENES[0]
    owner = crowd_targets([objects]).owner[0].reshape(SIDE // PATCH, -1)
    for slot, item in enumerate(objects):
        rows, columns = np.nonzero(owner == slot)
        x0, y0, x1, y1 = item.box
        assert len(rows) >= 4
        assert ((rows + 1) * PATCH > y0).all()
        assert (rows * PATCH < y1).all()
        assert ((columns + 1) * PATCH > x0).all()
        assert (columns * PATCH < x1).all()


def test_samples_take_turns_and_do_not_depend_on_their_number():
    taken = samples("test", 0, 2_000_000, 16)
    assert [sample["family"] for sample in taken] == [*CYCLE, *CYCLE]
    assert samples("test", 0, 2_000_000, 5) == taken[:5]
    assert sample_objects(taken[3]) == crowd_objects("test", 0, 2_000_003)


@pytest.mark.parametrize(
    ("family", "truth", "answer", "right", "unparsed"),
    [
        ("count", "9", "9", 1, 0),
        ("attribute", "star", "circle", 0, 0),
        ("count", "9", "nine", 0, 1),
        ("relation", "red", "Red.", 1, 0),
        ("attribute", "star", "", 0, 1),
        ("attribute", "star", "star star", 0, 1),
        ("number", "4 7 0", "4 7 0", 1, 0),
        ("number", "4 7 0", "4 7", 0, 0),
        ("number", "4 7", "4 red", 0, 1),
        ("number", "4 7", "4 7 0 0", 0, 1),
    ],
)
def test_metrics(family, truth, answer, right, unparsed):
    scores = crowd_metrics({"family": family, "answer": truth}, answer)
    assert scores == {"accuracy": right, f"accuracy_{family}": right, "unparsed": unparsed}


@pytest.fixture(scope="module")
def started():
    torch.manual_seed(0)
    return new_crowd_model()


def test_a_question_sees_what_it_would_see_by_itself(started):
    lesson = make_lesson(
        tower_of(started), "val", 0, [0, 1], MIX, dict.fromkeys([*MIX, "end"], 1.0)
    )
    language = started.model.language_model
    with torch.no_grad():
        visual = started.model.multi_modal_projector(lesson.features)[:, :50]
        positions = torch.arange(3, 153, 3).expand(2, -1)
        packed = crowd_hidden(started, visual, lesson.packed, positions)
        row = lesson.packed.segments[1] == 2
        words = lesson.packed.tokens[1][row]
        single = crowd_hidden(started, visual[1:], _only(lesson.packed, row), positions[1:])
    torch.testing.assert_close(packed[1][row], single[0], atol=1e-4, rtol=1e-4)
    assert words[0] in encode(lesson.questions[1][2].text)
    assert lesson.packed.positions[1][row][0] == CROWD_TEXT_START == len(PREFIX) + 576
    assert language.embed_tokens.weight.shape[0] == len(WORDS)


def _only(packed, words: torch.Tensor):
    """One dialogue of the second row."""
    from lab.training.dialogue_packs import Packed

    rows = (packed.tokens, packed.labels, packed.weights, packed.positions, packed.segments)
    return Packed(*(row[1:, words] for row in rows))


def test_words_look_at_the_patches_of_their_objects():
    boxes = [(x, y, x + 16, y + 16) for y in (0, 32) for x in (0, 32, 64)]
    objects = tuple(
        SceneObject(kind, name, colour, box)
        for (kind, name, colour), box in zip(
            [
                ("digit", "4", "red"),
                ("digit", "7", "red"),
                ("shape", "star", "red"),
                ("shape", "star", "blue"),
                ("shape", "cross", "blue"),
                ("digit", "4", "white"),
            ],
            boxes,
            strict=True,
        )
    )
    looks = {
        ("number", "read the red digits .", "4 7", None): [([0, 1], [0]), ([0, 1], [1])],
        ("count", "how many star shapes are there ?", "2", None): [([2, 3], [2, 3])],
        ("count", "how many red shapes are there ?", "1", None): [([2], [2])],
        ("relation", "what colour is the leftmost star ?", "blue", 3): [([2, 3], [3])],
        ("attribute", "what colour is the cross ?", "blue", 4): [([4], [4])],
        ("exist", "is there a green star ?", "no", None): [([2, 3], [2, 3])],
    }
    for (family, text, answer, target), expected in looks.items():
        item = None if target is None else objects[target]
        assert objects_looked_at(SceneQuestion(family, "", text, answer, item), objects) == expected


def test_gaze_loss_equals_a_loop_over_words():
    torch.manual_seed(3)
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 8, 8)
    right = torch.rand(2, 2, 4, 6) < 0.4
    right[:, 0, 1] = False
    loss = gaze_loss(Watched({1: (query, key), 5: (key[:, :, :4], key)}), [1, 5], 2, right)
    layers = []
    for (queries, keys), sets in zip(((query, key), (key[:, :, :4], key)), right, strict=True):
        terms = [
            -(queries[row, head, word] @ keys[row, head, 2:].T)
            .softmax(-1)[sets[row, word]]
            .sum()
            .log()
            for row in range(2)
            for head in range(2)
            for word in range(4)
            if sets[row, word].any()
        ]
        layers.append(torch.stack(terms).mean())
    torch.testing.assert_close(loss, torch.stack(layers).mean())


@pytest.fixture
def tiny_recipe() -> dict:
    recipe = load_recipe()
    plan = {"layers": 1, "steps": 4, "batch": 2, "warmup": 1, "log_every": 2, "save_every": 2}
    mix = recipe["crowd"]["phases"][0]["mix"]
    phases = [
        {"until": 3, "lr": 0.001, "cosine": 4, "mix": mix},
        {"until": 4, "lr": 0.0005, "cosine": 1, "mix": {**mix, "relation": 1}},
    ]
    recipe["crowd"].update(plan, validate_every=4, phases=phases)
    recipe["crowd"]["gaze"] = {"layers": [0, 0], "count_layer": 0, "heads": 2, "weight": 1.0}
    recipe["crowd"]["validation"] = {"scenes": 2, "mix": MIX}
    return recipe


@pytest.mark.slow
def test_an_interrupted_training_continues_as_if_it_had_not_been(tmp_path: Path, tiny_recipe):
    train_crowd(Worker(0, 1), tiny_recipe, tmp_path / "whole")
    half = {**tiny_recipe, "crowd": {**tiny_recipe["crowd"], "validate_every": 100}}

    class StopError(Exception):
        pass

    saved = stage_runtime.save_checkpoint

    def save_and_stop(path, state):
        saved(path, state)
        raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_runtime, "save_checkpoint", save_and_stop)
        with pytest.raises(StopError):
            train_crowd(Worker(0, 1), half, tmp_path / "parts")
    train_crowd(Worker(0, 1), tiny_recipe, tmp_path / "parts")
    complete, parts = (load_checkpoint(tmp_path / name / "crowd.pt") for name in ("whole", "parts"))
    assert parts["step"] == 4
    for key, value in complete["model"].items():
        torch.testing.assert_close(parts["model"][key], value, atol=1e-5, rtol=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    assert set(FAMILIES) <= set(lines[-1]["val"])


def test_export_refuses_an_unfinished_training(tmp_path: Path, tiny_recipe, monkeypatch):
    with pytest.raises(SystemExit, match="run the stage crowd first"):
        crowd_release.export_crowd(tiny_recipe, tmp_path)


def test_exported_model_loads_and_answers_alike(tmp_path: Path, tiny_recipe, monkeypatch):
    model = new_crowd_model(1)
    torch.save({"model": model.state_dict(), "step": 4}, tmp_path / "crowd.pt")
    (tmp_path / "log.jsonl").write_text("", encoding="utf-8")
    monkeypatch.setattr(crowd_release, "crowd_weights_dir", lambda: tmp_path / "crowd")
    monkeypatch.setattr(crowd_release, "record_sums", lambda: None)
    monkeypatch.setattr(crowd_release, "LOG", tmp_path / "merged.jsonl")
    crowd_release.export_crowd(tiny_recipe, tmp_path)
    loaded = load_exported(tmp_path / "crowd")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value.half().float())


@pytest.mark.slow
def test_shipped_model_answers_validation_questions():
    model = load_exported(crowd_weights_dir())
    use_attention(model.model.language_model, GAZE_ATTENTION, gaze_attention)
    mix = {"attribute": 3, "count": 2, "number": 2, "relation": 4, "exist": 3}
    scores = validate_crowd(model, tower_of(model), "val", {"scenes": 16, "mix": mix})
    assert min(scores[name] for name in ("attribute", "relation", "exist")) >= 0.85
    assert scores["count"] >= 0.5


def test_shipped_processor_knows_the_words_of_crowded_scenes():
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(crowd_weights_dir())
    assert processor.tokenizer.get_vocab() == {word: number for number, word in enumerate(WORDS)}
    image = processor.image_processor(crowd_scene("val", 0, 0).to_pil(), return_tensors="pt")
    assert image["pixel_values"].shape == (1, 3, SIDE, SIDE)
