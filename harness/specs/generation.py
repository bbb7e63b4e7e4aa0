"""Generation settings: what a task asks for, in the words of `generate`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import GenerationConfig

from espalier.harness.errors import unknown_name
from espalier.harness.specs.think_tags import spoken

log = logging.getLogger(__name__)

#: Used when neither task, benchmark nor model set `max_new_tokens`, as in lmms-eval's own models.
DEFAULT_NEW_TOKENS = 1024

#: Settings that only mean something when sampling; `generate` warns about them otherwise.
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "typical_p")

#: What sampling means where nothing is said of it: the library's defaults, stated so that a row can tell them.
SAMPLING: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}

#: Settings of answers that are denoised (harness/decoding/diffusion/denoising_settings.py), which `generate` does not
#: have.
DENOISING = ("steps", "block_length", "schedule", "shift", "prefix_cache")


@dataclass(frozen=True)
class Settings:
    """Of one group of requests: arguments of `generate`, and the strings that end an answer."""

    generate: Mapping[str, Any]
    until: tuple[str, ...]


def settings(
    task: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    benchmark: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge model defaults, the task's settings and the benchmark's overrides; later ones win.

    A positive temperature means sampling, as in lmms-eval's models; zero means greedy. Keys that
    `generate` does not know (some tasks carry image options there) are dropped with a warning.

    `until` is the other way about: what the model's or the benchmark's file names, [] and null for none, goes before
    the strings that the task's author wrote. They never stop the generation, as in lmms-eval's model classes: the whole
    answer is generated, counted and timed, and then cut.
    """
    merged = {**(model or {}), **task, **(benchmark or {})}
    merged.pop("until", None)
    named = [table["until"] for table in (benchmark, model, task) if table and "until" in table]
    until = (named[0] if named else None) or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    known = _known()
    unknown = sorted(name for name in merged if name not in known)
    if unknown:
        log.warning("generation settings ignored, `generate` has no such: %s", ", ".join(unknown))
    chosen = {k: v for k, v in merged.items() if k in known and v is not None}
    sample = bool(chosen.get("do_sample", float(chosen.get("temperature", 0)) > 0))
    if float(chosen.get("temperature", 1)) == 0:
        sample = False
    if sample:
        chosen = {**SAMPLING, **chosen}
    else:
        chosen = {name: value for name, value in chosen.items() if name not in SAMPLING_ONLY}
    chosen["do_sample"] = sample
    chosen.setdefault("max_new_tokens", DEFAULT_NEW_TOKENS)
    return Settings(generate=chosen, until=tuple(stop for stop in until if stop))


def check_names(key: str, given: Iterable[str]) -> None:
    """Raise UserError for a setting that `generate` does not have; `key` is the config key of the table."""
    valid = _known() | {"until"}
    for name in given:
        if name not in valid:
            raise unknown_name(key, name, valid)


@cache
def _known() -> frozenset[str]:
    return frozenset(GenerationConfig().to_dict()) | frozenset(DENOISING)


def cut(text: str, until: tuple[str, ...]) -> str:
    """Return the text before the first stop string after its reasoning, which is kept."""
    answer = spoken(text)
    thought = text.removesuffix(answer)
    for stop in until:
        answer = answer.split(stop, 1)[0]
    return thought + answer
