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
class PromptComposition:
    """What a prompt is made of: words before its pictures, pictures, and words behind them."""

    before: int
    pictures: int
    behind: int


#: Returns the tokens of a prompt. Raises UserError: the model does not take it.
Count = Callable[[PromptComposition], int]


def parts(composition: PromptComposition, number: int, seed: int) -> list[str | Image.Image]:
    """Return texts and pictures of a prompt in their order; `number` and `seed` choose the pixels."""
    chance = np.random.default_rng((seed, number))
    pixels = chance.integers(0, 256, (composition.pictures, EDGE, EDGE, 3), dtype=np.uint8)
    before = [words(composition.before)] if composition.before else []
    return [*before, *map(Image.fromarray, pixels), words(composition.behind)]


def words(count: int) -> str:
    """Return so many words."""
    return " ".join(islice(cycle(WORDS), count))


def composed(count: Count, tokens: int) -> PromptComposition:
    """Return the prompt nearest to `tokens` from below: a question of QUESTION tokens, pictures, words for the rest.

    Raises:
        UserError: not even one picture with one word behind it fits.

    Cost: `count` of some prompts of all pictures, and of two dozen of one picture.
    """

    def size(composition: PromptComposition) -> float:
        try:
            return count(composition)
        except UserError:
            # One picture is all that some models take, and none takes more than its positions.
            return math.inf

    smallest = PromptComposition(0, 1, 1)
    bare = count(smallest)
    if bare > tokens:
        raise UserError(
            f"benchmark.prompt_tokens={tokens}: a picture with one word takes {bare}; valid: at least {bare}"
        )
    question_end = min(bare + QUESTION - 1, tokens)
    behind = _largest(1, lambda n: size(replace(smallest, behind=n)) <= question_end)
    one_picture = replace(smallest, behind=behind)
    pictures = _largest(1, lambda n: size(replace(one_picture, pictures=n)) <= tokens)
    # Words cost the same whatever the pictures, and one picture is soon read.
    room = tokens - size(replace(one_picture, pictures=pictures)) + size(one_picture)
    before = _largest(0, lambda n: size(replace(one_picture, before=n)) <= room)
    prompt = PromptComposition(before, pictures, behind)
    while prompt.before and size(prompt) > tokens:
        prompt = replace(prompt, before=prompt.before - 1)
    return prompt


def _largest(number: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from `least` on that fits, by doubling and halving; `least` does."""
    step = 1
    while fits(number + step):
        number, step = number + step, 2 * step
    while step > 1:
        step //= 2
        if fits(number + step):
            number += step
    return number
