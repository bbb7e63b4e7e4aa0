from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.harness.seedling.scene_questions import FAMILIES, TEMPLATES, questions_for
from espalier.harness.seedling.scenes import Scene, Scenes, make_layout
from espalier.harness.seedling.vocabulary import UNK, box_from_bins, box_text, encode, parse_box
from lab.training.patch_targets import global_targets, patch_targets

EVERY_FAMILY = {family: 3 for family in FAMILIES}
SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return Scenes()


def many(scenes: Scenes, split: str, count: int = 40) -> list[Scene]:
    return [scenes.scene(split, 0, index) for index in range(count)]


def test_pixels_and_questions_are_pinned(scenes):
    """A change here changes every benchmark: bump the tasks' version and retrain."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for scene in many(scenes, split, 64):
            digest.update(scene.image.tobytes())
            for question in questions_for(scene, EVERY_FAMILY):
                digest.update(f"{question.template}|{question.text}|{question.answer}\n".encode())
    digits = scenes.digits
    parts = (digits.images, digits.labels, digits.split_codes)
    content = b"".join(part.tobytes() for part in parts)
    assert hashlib.sha256(content).hexdigest()[:16] == "0a0ae08c263fea17"
    assert digest.hexdigest()[:16] == "4a6a15a4cd5e2be7"


def test_batch_equals_single(scenes):
    index = np.array([7, 0, 123_456_789])
    layout, images = scenes.batch("val", 3, index)
    for row, number in enumerate(index):
        scene = scenes.scene("val", 3, int(number))
        assert np.array_equal(scene.image, images[row])
        assert scene.objects == layout.objects(row)


def test_scene_does_not_depend_on_what_was_drawn_before(scenes):
    first = scenes.scene("test", 0, 5)
    scenes.batch("train", 1, range(8), distort=True)
    assert np.array_equal(first.image, scenes.scene("test", 0, 5).image)
    assert np.array_equal(first.image, Scenes().scene("test", 0, 5).image)


def test_splits_and_seeds_give_different_scenes(scenes):
    images = [scenes.scene(split, seed, 0).image for split in SPLITS for seed in (0, 1)]
    assert len({image.tobytes() for image in images}) == len(images)


def test_digit_images_never_cross_splits(scenes):
    images = {}
    for split in SPLITS:
        layout = make_layout(split, 0, range(2000))
        real = np.arange(6)[None] < layout.count[:, None]
        numbers = scenes.digit_image_numbers(layout)[layout.is_digit & real]
        images[split] = {scenes.digits.images[number].tobytes() for number in numbers}
    assert not images["train"] & (images["val"] | images["test"])
    assert not images["val"] & images["test"]
    assert len(images["test"]) > 300


@pytest.mark.parametrize("split", SPLITS)
def test_objects_are_apart_inside_and_of_unique_colours(scenes, split):
    for scene in many(scenes, split):
        assert 3 <= len(scene.objects) <= 6
        assert {item.kind for item in scene.objects} == {"digit", "shape"}
        colours = [item.colour for item in scene.objects]
        assert len(set(colours)) == len(colours)
        taken = np.zeros((96, 96), int)
        for item in scene.objects:
            x0, y0, x1, y1 = item.box
            assert 0 <= x0 < x1 <= 96
            assert 0 <= y0 < y1 <= 96
            taken[y0:y1, x0:x1] += 1
        assert taken.max() == 1


def test_pil_image_has_the_same_pixels(scenes):
    scene = scenes.scene("val", 0, 1)
    assert np.array_equal(np.asarray(scene.to_pil()), scene.image)


def test_every_template_occurs_and_uses_known_words_only(scenes):
    templates = set()
    for scene in many(scenes, "val", 150):
        for question in questions_for(scene, EVERY_FAMILY):
            templates.add((question.family, question.template))
            assert UNK not in encode(f"{question.text} {question.answer}")
    assert templates == {(family, name) for family, names in TEMPLATES.items() for name in names}


def answers_by_search(scene: Scene, text: str) -> set[str]:
    """Answers a question from the objects alone, by trying all of them."""
    words = text.split()
    if text.startswith("what digit"):
        return {o.name for o in scene.objects if o.kind == "digit" and o.colour == words[5]}
    if text.startswith("what colour is the frame"):
        return {o.colour for o in scene.objects if o.name == words[7]}
    if text.startswith("what colour"):
        return {o.colour for o in scene.objects if o.name == words[4]}
    if text.startswith("what shape"):
        return {o.name for o in scene.objects if o.colour == words[3] and o.kind == "shape"}
    if text.startswith("is there a digit"):
        return {"yes" if any(o.name == words[4] for o in scene.objects) else "no"}
    if text.startswith("is there a"):
        wanted = words[3:-1]
        names = [[o.name] if len(wanted) == 1 else described(o) for o in scene.objects]
        return {"yes" if wanted in names else "no"}
    if text.startswith("where is the digit"):
        return {box_text(o.box) for o in scene.objects if o.name == words[4]}
    if text.startswith("where is the"):
        return {box_text(o.box) for o in scene.objects if described(o) == words[3:5]}
    raise AssertionError(text)


def described(item) -> list[str]:
    return [item.colour, "frame" if item.kind == "digit" else item.name]


def test_answers_are_right_and_unique(scenes):
    for scene in many(scenes, "test", 150):
        for question in questions_for(scene, {"attr": 6, "exist": 6, "rec": 6}):
            assert answers_by_search(scene, question.text) == {question.answer}, question


def test_counts_and_reading(scenes):
    for scene in many(scenes, "test", 30):
        digits = [item.name for item in scene.objects if item.kind == "digit"]
        truth = {
            "digits": str(len(digits)),
            "shapes": str(len(scene.objects) - len(digits)),
            "objects": str(len(scene.objects)),
            "read_digits": " ".join(digits),
        }
        for question in questions_for(scene, {"count": 4, "ocr": 1}):
            assert question.answer == truth[question.template]


@given(x=st.integers(0, 79), y=st.integers(0, 79), side=st.integers(16, 24))
@settings(max_examples=60, deadline=None)
def test_box_round_trip_stays_close(x, y, side):
    box = (min(x, 96 - side), min(y, 96 - side), min(x, 96 - side) + side, min(y, 96 - side) + side)
    assert max(abs(a - b) for a, b in zip(box, parse_box(box_text(box)), strict=True)) <= 2


@pytest.mark.parametrize(
    "text", ["", "yes", "<loc_1> <loc_2> <loc_3>", "<loc_1> " * 5, "<loc_99> " * 4]
)
def test_malformed_boxes_are_none(text):
    assert parse_box(text) is None


def test_bins_become_bin_centres():
    assert box_from_bins([0, 1, 2, 3]) == (1, 4, 8, 11)


def test_patch_targets_match_the_objects(scenes):
    layout = make_layout("val", 0, range(16))
    targets = patch_targets(layout)
    present = global_targets(layout)
    for row in range(16):
        objects = layout.objects(row)
        for patch in np.flatnonzero(targets.owner[row] >= 0):
            x0, y0, x1, y1 = objects[targets.owner[row, patch]].box
            left, top = 8 * (patch % 12), 8 * (patch // 12)
            width = min(x1, left + 8) - max(x0, left)
            height = min(y1, top + 8) - max(y0, top)
            assert targets.overlap[row, patch] == width * height >= 12
        assert present[row, 10:18].sum() == len(objects)
        assert set(targets.owner[row]) - {-1} == set(range(len(objects)))
