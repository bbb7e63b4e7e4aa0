"""One-hop lookups used in training only.

Questions need two hops (find the object by a word, then read another property). Trained on
questions alone, the model stays at chance for a long time; drills have the lookup word one hop
from the result, after which it learns the questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espalier.harness.seedling.scenes import COLOUR_NAMES, SHAPES, SceneObject
from espalier.harness.seedling.vocabulary import box_text

_KINDS = (*(str(i) for i in range(10)), *SHAPES)


@dataclass(frozen=True)
class Drill:
    """A word and the words that follow from it; every following word has a loss."""

    key: str
    continuation: str


def drills_for(
    objects: Sequence[SceneObject], rng: np.random.Generator, counts: dict[str, int]
) -> list[Drill]:
    """Returns drills about one scene.

    Args:
        objects: The scene's objects.
        rng: Source of choices.
        counts: Numbers of "by_colour", "by_name" and "present" drills.
    """
    kinds = [item.name for item in objects]
    unique = [item for item in objects if kinds.count(item.name) == 1]
    drills = [
        Drill(item.colour, ("frame " if item.kind == "digit" else "") + _named(item))
        for item in _choose(objects, rng, counts["by_colour"])
    ]
    drills += [
        Drill(item.name, f"{item.colour} {box_text(item.box)}")
        for item in _choose(unique, rng, counts["by_name"])
    ]
    colours = [item.colour for item in objects]
    for _ in range(counts["present"]):
        present, words = (colours, COLOUR_NAMES) if rng.random() < 0.4 else (kinds, _KINDS)
        wanted = rng.random() < 0.5
        pool = present if wanted else [word for word in words if word not in present]
        drills.append(Drill(pool[rng.integers(len(pool))], "yes" if wanted else "no"))
    return drills


def _named(item: SceneObject) -> str:
    return f"{item.name} {box_text(item.box)}"


def _choose(
    items: Sequence[SceneObject], rng: np.random.Generator, count: int
) -> list[SceneObject]:
    return [items[i] for i in rng.permutation(len(items))[:count]]
