"""Generation settings of a task, by their names in `generate`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from espalier.harness.errors import unknown_name
from espalier.harness.specs.canvas import CANVAS
from espalier.harness.specs.think_tags import Thinking, spoken

log = logging.getLogger(__name__)

#: Used when neither task, benchmark nor model set `max_new_tokens`, as in lmms-eval's own models.
DEFAULT_NEW_TOKENS = 1024

#: Settings that only mean something when sampling; `generate` warns about them otherwise.
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "typical_p")

#: Sampling settings where none are given: the library's defaults, stated so that a row holds them.
SAMPLING: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}

#: Settings of answers that are denoised (harness/decoding/diffusion/denoising_settings.py), which `generate` does not
#: have.
DENOISING = (
    *("steps", "step_ratio", "block_length", "schedule", "shift", "remasking", "threshold"),
    *("stop", "stop_words", "prefix_cache", "block_cache", "prompt_interval"),
    *("generation_interval", "transfer_ratio", "eps", "alg_temp", "infill"),
)


#: Reasoning as the prompt format has it, and not scored.
STRIPPED = Thinking()


@dataclass(frozen=True)
class Settings:
    """Of one group of requests: arguments of `generate`, the strings that end an answer, the use of reasoning."""

    generate: Mapping[str, Any]
    until: tuple[str, ...]
    thinking: Thinking = STRIPPED


def settings(
    task: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    benchmark: Mapping[str, Any] | None = None,
    *,
    denoises: bool = False,
    draws: bool = False,
) -> Settings:
    """Merge model defaults, the task's settings and the benchmark's overrides; later ones win.

    Tasks state limits and sampling for models that generate token by token: where the model `denoises`, only `until`
    and the settings of denoising are read of a task.

    Where the model `draws` whatever its settings are, as on canvases, the generator is seeded.

    A positive temperature means sampling, as in lmms-eval's models; zero means greedy. Keys that
    `generate` does not know (some tasks carry image options there) are dropped with a warning.

    A budget of reasoning (`thinking=budget:N`) is added to `max_new_tokens`, which tasks write for answers alone; the
    engine's argument is `thinking_budget`.

    `until` has the opposite order: what the model's or the benchmark's file names, [] and null for none, goes before
    the strings that the task's author wrote. They never stop the generation, as in lmms-eval's model classes: the whole
    answer is generated, counted and timed, and then cut.
    """
    if denoises:
        task = {name: task[name] for name in (*DENOISING, "until") if name in task}
    merged = {**(model or {}), **task, **(benchmark or {})}
    merged.pop("until", None)
    thinking = Thinking.of(merged.pop("thinking", None)) or STRIPPED
    stop_tables = [
        table["until"] for table in (benchmark, model, task) if table and "until" in table
    ]
    until = (stop_tables[0] if stop_tables else None) or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    valid_names = _setting_names()
    unknown = sorted(name for name in merged if name not in valid_names)
    if unknown:
        log.warning("generation settings ignored, `generate` has no such: %s", ", ".join(unknown))
    selected = {k: v for k, v in merged.items() if k in valid_names and v is not None}
    sample = bool(selected.get("do_sample", float(selected.get("temperature", 0)) > 0))
    if float(selected.get("temperature", 1)) == 0:
        sample = False
    if denoises:
        # The length is the model's own, and a word is sampled from the whole distribution unless a setting cuts it.
        selected["do_sample"] = sample or draws
        return Settings(selected, tuple(stop for stop in until if stop), thinking)
    if sample:
        selected = {**SAMPLING, **selected}
    else:
        selected = {name: value for name, value in selected.items() if name not in SAMPLING_ONLY}
    selected["do_sample"] = sample
    selected.setdefault("max_new_tokens", DEFAULT_NEW_TOKENS)
    if thinking.budget is not None:
        selected["max_new_tokens"] += thinking.budget
        selected["thinking_budget"] = thinking.budget
    return Settings(selected, tuple(stop for stop in until if stop), thinking)


def check_names(key: str, settings_names: Iterable[str]) -> None:
    """Raise UserError for a setting that `generate` does not have; `key` is the config key of the table."""
    valid = _setting_names() | {"until"}
    for name in settings_names:
        if name not in valid:
            raise unknown_name(key, name, valid)


@cache
def _setting_names() -> frozenset[str]:
    # transformers takes a second to import, and admission reads only names that it knows itself.
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict()) | {*DENOISING, *CANVAS}


def cut(text: str, until: tuple[str, ...]) -> str:
    """Return the text before the first stop string after its reasoning, which is kept."""
    answer = spoken(text)
    thought = text.removesuffix(answer)
    for stop in until:
        answer = answer.split(stop, 1)[0]
    return thought + answer
