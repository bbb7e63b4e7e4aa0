"""Questions about scenes with unique answers, each a pure function of its address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.scenes import COLOUR_NAMES, SHAPES, Scene, SceneObject
from espalier.harness.seedling.vocabulary import box_text, location

FAMILIES = ("attr", "exist", "count", "rec", "ocr", "caption")
TEMPLATES: dict[str, tuple[str, ...]] = {
    "attr": ("digit_of_frame", "colour_of_shape", "colour_of_digit", "shape_of_colour"),
    "exist": ("digit", "shape", "coloured_object"),
    "count": ("digits", "shapes", "objects"),
    "rec": ("digit", "coloured_object"),
    "ocr": ("read_digits",),
    "caption": ("describe",),
}
_STREAM_OFFSET = 1_000_003
"""Separates the draws of questions from those of scenes with the same seed."""
_DRAWS = 128


@dataclass(frozen=True)
class SceneQuestion:
    """A question with its only correct answer.

    Attributes:
        family: One of :data:`FAMILIES`.
        template: One of the family's :data:`TEMPLATES`.
        text: Question, without the chat format.
        answer: Answer.
        target: Object of the question; None if there is none.
    """

    family: str
    template: str
    text: str
    answer: str
    target: SceneObject | None = None


def describe(item: SceneObject) -> str:
    """Return an object's name by colour in questions ("red frame", "blue star")."""
    return f"{item.colour} {'frame' if item.kind == 'digit' else item.name}"


def _digits(objects: Sequence[SceneObject]) -> list[SceneObject]:
    return [item for item in objects if item.kind == "digit"]


def shapes_of(objects: Sequence[SceneObject]) -> list[SceneObject]:
    """Return the shapes among objects."""
    return [item for item in objects if item.kind == "shape"]


def _unique(items: list[SceneObject]) -> list[SceneObject]:
    """Return the items with a unique name, so that a question by name has one answer."""
    names = [item.name for item in items]
    return [item for item in items if names.count(item.name) == 1]


def attribute_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the digit, shape or colour of an object."""
    digits, shapes = _digits(objects), shapes_of(objects)
    choice = stream.below(4)
    if (choice == 0 and digits) or not shapes:
        item = stream.pick(digits)
        return SceneQuestion(
            "attr", "digit_of_frame", f"what digit is in the {item.colour} frame ?", item.name, item
        )
    if choice == 1 and _unique(shapes):
        item = stream.pick(_unique(shapes))
        return SceneQuestion(
            "attr", "colour_of_shape", f"what colour is the {item.name} ?", item.colour, item
        )
    if choice == 2 and _unique(digits):
        item = stream.pick(_unique(digits))
        return SceneQuestion(
            "attr",
            "colour_of_digit",
            f"what colour is the frame of digit {item.name} ?",
            item.colour,
            item,
        )
    item = stream.pick(shapes)
    return SceneQuestion(
        "attr", "shape_of_colour", f"what shape is {item.colour} ?", item.name, item
    )


def existence_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the presence of an object; half of the answers are "yes"."""
    choice, present_answer = stream.below(3), bool(stream.below(2))
    answer = "yes" if present_answer else "no"
    for number, (items, names, prefix) in enumerate(
        [
            (_digits(objects), [str(i) for i in range(10)], "digit "),
            (shapes_of(objects), SHAPES, ""),
        ]
    ):
        if choice != number or not items:
            continue
        present = [name for name in names if any(item.name == name for item in items)]
        absent = [name for name in names if name not in present]
        name = stream.pick(present if present_answer else absent)
        return SceneQuestion(
            "exist",
            TEMPLATES["exist"][number],
            f"is there a {prefix}{name} ?",
            answer,
            next((item for item in items if item.name == name), None),
        )
    item = stream.pick(objects)
    text = describe(item)
    if not present_answer:  # hard negative: an existing thing in a colour that it does not have
        thing = text.split()[1]
        used_colours = {
            text.split()[0] for text in map(describe, objects) if text.split()[1] == thing
        }
        text = f"{stream.pick([c for c in COLOUR_NAMES if c not in used_colours])} {thing}"
    return SceneQuestion(
        "exist", "coloured_object", f"is there a {text} ?", answer, item if present_answer else None
    )


def counting_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the number of digits, shapes or objects."""
    template = stream.pick(TEMPLATES["count"])
    pools = {"digits": _digits(objects), "shapes": shapes_of(objects), "objects": objects}
    return SceneQuestion(
        "count", template, f"how many {template} are there ?", str(len(pools[template]))
    )


def grounding_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the box of an object."""
    by_digit = stream.below(2) == 0
    unique_digits = _unique(_digits(objects))
    if by_digit and unique_digits:
        item = stream.pick(unique_digits)
        template, text = "digit", f"digit {item.name}"
    else:
        item = stream.pick(objects)
        template, text = "coloured_object", describe(item)
    return SceneQuestion("rec", template, f"where is the {text} ?", box_text(item.box), item)


def reading_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return the question for all digits in reading order; reads no draws."""
    return SceneQuestion(
        "ocr",
        "read_digits",
        "read all digits .",
        " ".join(item.name for item in _digits(objects)) or "no",
    )


def caption_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return the question for all objects with their centres, in reading order; reads no draws."""
    return SceneQuestion(
        "caption",
        "describe",
        "describe the image .",
        " ".join(_caption_part(item) for item in objects),
    )


def _caption_part(item: SceneObject) -> str:
    x0, y0, x1, y1 = item.box
    extra = f" with digit {item.name}" if item.kind == "digit" else ""
    centre = f"{location((x0 + x1) // 2)} {location((y0 + y1) // 2)}"
    return f"a {describe(item)}{extra} at {centre} ;"


MAKERS: dict[str, Callable[[Sequence[SceneObject], DrawStream], SceneQuestion]] = {
    "attr": attribute_question,
    "exist": existence_question,
    "count": counting_question,
    "rec": grounding_question,
    "ocr": reading_question,
    "caption": caption_question,
}


def question_streams(split: str, seed: int, index: Sequence[int]) -> list[DrawStream]:
    """Return the stream of question draws of each scene."""
    return [DrawStream(row) for row in draws(seed + _STREAM_OFFSET, split, index, _DRAWS)]


def ask(
    objects: Sequence[SceneObject], stream: DrawStream, counts: dict[str, int]
) -> list[SceneQuestion]:
    """Return several questions about one scene, in the order of :data:`FAMILIES`."""
    return [
        MAKERS[family](objects, stream) for family in FAMILIES for _ in range(counts.get(family, 0))
    ]


def questions_for(scene: Scene, counts: dict[str, int]) -> list[SceneQuestion]:
    """Return questions about one scene, fixed by the scene's address and ``counts``.

    Args:
        scene: The scene.
        counts: Questions per family; missing families get none.
    """
    stream = question_streams(scene.split, scene.seed, [scene.index])[0]
    return ask(scene.objects, stream, counts)
