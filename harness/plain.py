"""What others wrote, made safe to print: letters that steer a terminal or turn the order of a line are escaped."""

from __future__ import annotations

import re
from typing import Any

# Controls of ASCII and of ISO 6429, letters without width, marks that turn the direction, ends of lines and
# paragraphs, halves of letters, tags.
_STEERING = (
    "\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_CONTROLS = re.compile(f"[{_STEERING}]")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def plain(text: str) -> str:
    r"""Return a text in one line with letters that steer as `\x1b` or `\u202e`; ends of lines become blanks."""
    return _CONTROLS.sub(_escape, re.sub(r"[\t\n\r]+", " ", text))


def plain_values(value: Any) -> Any:
    """Return JSON's data with every text in it as `plain` has it."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain_values(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value


def plain_page(page: str) -> str:
    """Return a page of Markdown in which what would be HTML is text, and nothing steers a terminal."""
    lines = (_CONTROLS.sub(_escape, line) for line in page.split("\n"))
    return _TAG.sub("&lt;", "\n".join(lines))


def steers(text: str) -> bool:
    """Say whether a text holds ends of lines or other letters that steer."""
    return _CONTROLS.search(text) is not None


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
