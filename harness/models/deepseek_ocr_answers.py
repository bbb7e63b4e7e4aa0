"""What DeepSeek-OCR's answers become before they are scored: the clean-ups of its two releases."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count

#: A label and its boxes; the label is the first group.
_REFERENCE = re.compile(r"<\|ref\|>(.*?)<\|/ref\|><\|det\|>.*?<\|/det\|>", re.DOTALL)
_DISPLAY = re.compile(r"\\\[.*?\\\]", re.DOTALL)
_NUMBER = re.compile(r"\\quad \([^)]*\)")
_GAP = re.compile(r"\n{3,4}")


def answer_ids(ids: Sequence[int], end: int | None, pad: int) -> list[int]:
    """Return new tokens up to the first that ends the answer or fills up its row, which stay out."""
    rows = []
    for row in ids:
        if row in (end, pad):
            break
        rows.append(row)
    return rows


def as_transformers(text: str) -> str:
    """Return an answer as the transformers code writes it to a file.

    Pictures become markdown links, numbered from 0, and a line break; other labels and boxes go; two operators that
    markdown renderers lack are spelt out.
    """
    numbers = count()

    def link(match: re.Match[str]) -> str:
        return f"![](images/{next(numbers)}.jpg)\n" if match[1] == "image" else ""

    return _operators(_REFERENCE.sub(link, text))


def as_vllm(text: str) -> str:
    """Return an answer as the vLLM code of the release writes it for benchmarks.

    All labels and boxes go, with the tags that centre, and numbers behind displayed formulas; of three or four line
    breaks two stay.
    """
    text = _REFERENCE.sub("", text)
    text = _DISPLAY.sub(lambda match: _NUMBER.sub("", match[0]), text)
    return _GAP.sub("\n\n", text).replace("<center>", "").replace("</center>", "")


def _operators(text: str) -> str:
    return text.replace("\\coloneqq", ":=").replace("\\eqqcolon", "=:")


#: By the names of `model.processor.clean_up`.
CLEAN_UPS: Mapping[str, Callable[[str], str]] = {
    "transformers": as_transformers,
    "vllm": as_vllm,
}
