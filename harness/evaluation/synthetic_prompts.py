"""Prompts of a given number of tokens: pictures of noise between words."""

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

#: Tokens of the words after the pictures, as in AirCache's tables (arXiv 2503.23956, section 4.4).
QUESTION = 64

WORDS = ("describe", "what", "is", "shown", "in", "this", "picture", "and", "in", "the", "others")


@dataclass(frozen=True)
class PromptComposition:
    """The parts of a prompt: the number of words before its pictures, of pictures, and of words after them."""

    before: int
    pictures: int
    after: int


#: Returns the number of tokens of a prompt. Raises UserError: the model does not accept it.
Count = Callable[[PromptComposition], int]


def parts(composition: PromptComposition, number: int, seed: int) -> list[str | Image.Image]:
    """Return texts and pictures of a prompt in order; `number` and `seed` determine the pixels."""
    pixels = np.random.default_rng((seed, number)).integers(
        0, 256, (composition.pictures, EDGE, EDGE, 3), dtype=np.uint8
    )
    before = [words(composition.before)] if composition.before else []
    return [*before, *map(Image.fromarray, pixels), words(composition.after)]


def words(count: int) -> str:
    """Return `count` words."""
    return " ".join(islice(cycle(WORDS), count))


def compose_prompt(count: Count, tokens: int) -> PromptComposition:
    """Return the longest prompt of at most `tokens`: a question of QUESTION tokens, pictures, words for the remainder.

    Raises:
        UserError: one picture with one word does not fit.

    Cost: `count` of a few prompts with all pictures, and of two dozen with one picture.
    """

    def size(composition: PromptComposition) -> float:
        try:
            return count(composition)
        except UserError:
            # Some models take one picture only, and none takes more than its positions.
            return math.inf

    smallest = PromptComposition(0, 1, 1)
    bare = count(smallest)
    if bare > tokens:
        raise UserError(
            f"benchmark.prompt_tokens={tokens}: a picture with one word takes {bare}; valid: at least {bare}"
        )
    question_end = min(bare + QUESTION - 1, tokens)
    after = _largest(1, lambda n: size(replace(smallest, after=n)) <= question_end)
    one_picture = replace(smallest, after=after)
    pictures = _largest(1, lambda n: size(replace(one_picture, pictures=n)) <= tokens)
    # Words cost the same for any number of pictures, and one picture is fast to count.
    room = tokens - size(replace(one_picture, pictures=pictures)) + size(one_picture)
    before = _largest(0, lambda n: size(replace(one_picture, before=n)) <= room)
    prompt = PromptComposition(before, pictures, after)
    while prompt.before and size(prompt) > tokens:
        prompt = replace(prompt, before=prompt.before - 1)
    return prompt


def _largest(number: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, from `number`, which fits, by doubling and halving."""
    step = 1
    while fits(number + step):
        number, step = number + step, 2 * step
    while step > 1:
        step //= 2
        if fits(number + step):
            number += step
    return number
