"""Remove grounding marks from answers of DeepSeek-OCR."""

from __future__ import annotations

import re

MARK = re.compile(r"<\|ref\|>(.*?)<\|/ref\|><\|det\|>.*?<\|/det\|>[ \t]*\n?", re.DOTALL)
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def plain_markdown(answer: str) -> str:
    r"""Return an answer without the boxes that the model writes before each block.

    A picture becomes a markdown picture on its own line; other marks are removed with their line. `\coloneqq` and
    `\eqqcolon`, which few renderers know, are replaced by `:=` and `=:`. Other answers are unchanged.
    """
    answer = MARK.sub(_picture, answer.replace(END, ""))
    return answer.replace("\\coloneqq", ":=").replace("\\eqqcolon", "=:").strip()


def _picture(mark: re.Match[str]) -> str:
    return "![](picture)\n" if mark.group(1).strip() == "image" else ""
