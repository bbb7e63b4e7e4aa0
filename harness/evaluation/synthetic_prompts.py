"""Prompts of a length that is asked for: pictures of noise between words, so many that a model reads so many tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
from PIL import Image

from espalier.harness.errors import UserError

#: Pixels along a picture's edge.
EDGE = 384

#: Tokens of the words behind the pictures, as in AirCache's tables (arXiv 2503.23956, section 4.4).
QUESTION = 64

WORDS = ("describe", "what", "is", "shown", "in", "this", "picture", "and", "in", "the", "others")


@dataclass(frozen=True)
class Composition:
    """What a prompt is made of: words before its pictures, pictures, and words behind them."""

    before: int
    pictures: int
    behind: int


#: Returns the tokens of a prompt. Raises UserError: the model does not take it.
Count = Callable[[Composition], int]


def parts(composition: Composition, number: int, seed: int) -> list[str | Image.Image]:
    """Return texts and pictures of a prompt in their order; `number` and `seed` choose the pixels."""
    chance = np.random.default_rng((seed, number))
    pixels = chance.integers(0, 256, (composition.pictures, EDGE, EDGE, 3), dtype=np.uint8)
    before = [words(composition.before)] if composition.before else []
    return [*before, *map(Image.fromarray, pixels), words(composition.behind)]


def words(count: int) -> str:
    """Return so many words."""
    return " ".join(islice(cycle(WORDS), count))


def composed(count: Count, tokens: int) -> Composition:
    """Return the prompt nearest to `tokens` from below: a question of QUESTION tokens, pictures, words for the rest.

    Raises:
        UserError: not even one picture with one word behind it fits.

    Cost: `count` of some prompts of all pictures, and of two dozen of one picture.
    """

    def size(composition: Composition) -> float:
        try:
            return count(composition)
        except UserError:
            # One picture is all that some models take, and none takes more than its positions.
            return math.inf

    least = Composition(0, 1, 1)
    bare = count(least)
    if bare > tokens:
        raise UserError(
            f"benchmark.prompt_tokens={tokens}: a picture with one word takes {bare}; valid: at least {bare}"
        )
    asked = min(bare + QUESTION - 1, tokens)
    behind = _most(1, lambda n: size(replace(least, behind=n)) <= asked)
    alone = replace(least, behind=behind)
    pictures = _most(1, lambda n: size(replace(alone, pictures=n)) <= tokens)
    # Words cost the same whatever the pictures, and one picture is soon read.
    room = tokens - size(replace(alone, pictures=pictures)) + size(alone)
    before = _most(0, lambda n: size(replace(alone, before=n)) <= room)
    found = Composition(before, pictures, behind)
    while found.before and size(found) > tokens:
        found = replace(found, before=found.before - 1)
    return found


def _most(least: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from `least` on that fits, by doubling and halving; `least` does."""
    step = 1
    while fits(least + step):
        least, step = least + step, 2 * step
    while step > 1:
        step //= 2
        if fits(least + step):
            least += step
    return least
