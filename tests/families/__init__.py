"""Every model family as a tiny instance: a new family adds a module here and one line to FAMILIES."""

from __future__ import annotations

from tests.families import deepseek, internvl, llava, onevision, qwen
from tests.tiny import Family

FAMILIES: dict[str, Family] = {
    **llava.FAMILIES,
    **onevision.FAMILIES,
    **qwen.FAMILIES,
    **internvl.FAMILIES,
    **deepseek.FAMILIES,
}
