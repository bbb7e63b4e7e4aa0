"""Questions about crowded scenes with unique answers, each a pure function of its address."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.seedling.scenes import COLOUR_NAMES, SceneObject
from espalier.harness.seedling.vocabulary import UNK, VOCABULARY

SIDES = ("leftmost", "rightmost", "highest", "lowest")
TEMPLATES: dict[str, tuple[str, ...]] = {
    "attribute": ("colour_of_shape", "shape_of_colour"),
    "count": ("shape", "colour"),
    "number": ("read",),
    "relation": SIDES,
    "exist": ("coloured_shape",),
}
FAMILIES = tuple(TEMPLATES)
CLEAR = 8
"""Least distance in pixels between the centres of the outermost object and of the next."""

_STREAM_OFFSET = 5_000_111
_DRAWS = 256
_EXTRA = VOCABULARY.index("<extra_1>")

WORDS: tuple[str, ...] = (*VOCABULARY[:_EXTRA], *SIDES, *VOCABULARY[_EXTRA + len(SIDES) :])
"""Seedling's words, with the sides in place of spare ones."""
TOKEN_ID: dict[str, int] = {word: number for number, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Return the token ids of space-separated words; unknown words become ``<unk>``."""
    return [TOKEN_ID.get(word, UNK) for word in text.split()]


def _shapes(objects: Sequence[SceneObject]) -> list[SceneObject]:
    return [item for item in objects if item.kind == "shape"]


def _single(values: Sequence[str]) -> list[str]:
    return [value for value in dict.fromkeys(values) if values.count(value) == 1]


def attribute_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the colour of the only shape of a name, or the name of the only one of a colour."""
    shapes = _shapes(objects)
    names = _single([item.name for item in shapes])
    colours = _single([item.colour for item in shapes])
    if stream.below(2) and colours:
        colour = stream.pick(colours)
        item = next(item for item in shapes if item.colour == colour)
        text = f"what shape is {colour} ?"
        return SceneQuestion("attribute", "shape_of_colour", text, item.name, item)
    name = stream.pick(names)
    item = next(item for item in shapes if item.name == name)
    text = f"what colour is the {name} ?"
    return SceneQuestion("attribute", "colour_of_shape", text, item.colour, item)


def counting_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the number of shapes of a name or a colour, in half of the cases the most frequent name."""
    shapes = _shapes(objects)
    names = [item.name for item in shapes]
    choice = stream.below(4)
    if choice == 3:
        colour = stream.pick([item.colour for item in shapes])
        count = sum(item.colour == colour for item in shapes)
        text = f"how many {colour} shapes are there ?"
        return SceneQuestion("count", "colour", text, str(count))
    kinds = sorted(dict.fromkeys(names), key=names.count)
    name = stream.pick(kinds) if choice == 2 else kinds[-1]
    text = f"how many {name} shapes are there ?"
    return SceneQuestion("count", "shape", text, str(names.count(name)))


def number_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return the question for the digits in frames of one colour, from left to right."""
    digits = [item for item in objects if item.kind == "digit"]
    colour = stream.pick(list(dict.fromkeys(item.colour for item in digits)))
    answer = " ".join(item.name for item in digits if item.colour == colour)
    return SceneQuestion("number", "read", f"read the {colour} digits .", answer)


def relation_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the colour of the outermost of several shapes of a name, if one is clearly outermost."""
    candidates = []
    for name in dict.fromkeys(item.name for item in _shapes(objects)):
        for side in SIDES:
            axis = 0 if side in ("leftmost", "rightmost") else 1
            alike = [item for item in objects if item.name == name]
            alike.sort(key=lambda item: item.box[axis] + item.box[axis + 2])
            if side in ("rightmost", "lowest"):
                alike.reverse()
            if len(alike) < 2 or len({item.colour for item in alike}) < 2:
                continue
            first, second = (item.box[axis] + item.box[axis + 2] for item in alike[:2])
            if abs(first - second) >= 2 * CLEAR:
                candidates.append((side, alike[0]))
    if not candidates:
        return attribute_question(objects, stream)
    side, item = stream.pick(candidates)
    text = f"what colour is the {side} {item.name} ?"
    return SceneQuestion("relation", side, text, item.colour, item)


def existence_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for a shape in a colour; half of the answers are "yes".

    Where the answer is "no", the scene has the shape in other colours, and another shape in this colour if possible.
    """
    shapes = _shapes(objects)
    present = {(item.colour, item.name) for item in shapes}
    if stream.below(2):
        item = stream.pick(shapes)
        text = f"is there a {item.colour} {item.name} ?"
        return SceneQuestion("exist", "coloured_shape", text, "yes", item)
    incomplete = {
        name
        for _, name in present
        if sum(label == name for _, label in present) < len(COLOUR_NAMES)
    }
    name = stream.pick([item.name for item in shapes if item.name in incomplete])
    used = [item.colour for item in shapes if (item.colour, name) not in present]
    absent = [colour for colour in COLOUR_NAMES if (colour, name) not in present]
    text = f"is there a {stream.pick(used or absent)} {name} ?"
    return SceneQuestion("exist", "coloured_shape", text, "no")


MAKERS: dict[str, Callable[[Sequence[SceneObject], DrawStream], SceneQuestion]] = {
    "attribute": attribute_question,
    "count": counting_question,
    "number": number_question,
    "relation": relation_question,
    "exist": existence_question,
}


def question_stream(split: str, seed: int, index: int) -> DrawStream:
    """Return the question draws of one scene."""
    return DrawStream(draws(seed + _STREAM_OFFSET, split, [index], _DRAWS)[0])


def ask(
    objects: Sequence[SceneObject], stream: DrawStream, counts: dict[str, int]
) -> list[SceneQuestion]:
    """Return several questions about one scene, in the order of :data:`FAMILIES`."""
    families = [family for family in FAMILIES for _ in range(counts.get(family, 0))]
    return [MAKERS[family](objects, stream) for family in families]
