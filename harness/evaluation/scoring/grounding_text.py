"""What an answer of DeepSeek-OCR has beside the text of its page."""

from __future__ import annotations

import re

MARK = re.compile(r"<\|ref\|>(.*?)<\|/ref\|><\|det\|>.*?<\|/det\|>[ \t]*\n?", re.DOTALL)
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def plain_markdown(answer: str) -> str:
    r"""Return an answer without the boxes that the model writes before each block.

    A picture becomes a markdown picture on a line of its own; other marks go, with the line that they stand on.
    `\coloneqq` and `\eqqcolon`, which few renderers know, become what they stand for. Other answers stay as they are.
    """
    answer = MARK.sub(_picture, answer.replace(END, ""))
    return answer.replace("\\coloneqq", ":=").replace("\\eqqcolon", "=:").strip()


def _picture(mark: re.Match[str]) -> str:
    return "![](picture)\n" if mark.group(1).strip() == "image" else ""
