"""Generation settings of a task, by their names in `generate`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError
from espalier.harness.specs.canvas import CANVAS
from espalier.harness.specs.think_tags import Thinking, spoken

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import RunSpec

log = logging.getLogger(__name__)

#: Used when neither task, benchmark nor model set `max_new_tokens`, as in lmms-eval's own models.
DEFAULT_NEW_TOKENS = 1024

#: Settings that only act when sampling, and their values that change nothing otherwise.
SAMPLING_ONLY: Mapping[str, tuple[float, ...]] = {
    "temperature": (0,),
    "top_k": (0, 50),
    **dict.fromkeys(("top_p", "top_h", "typical_p"), (1,)),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (0,)),
}

#: The same of settings that only act on beams.
BEAMS_ONLY: Mapping[str, tuple[float, ...]] = {"length_penalty": (1,), "early_stopping": (False,)}

#: Settings of strings that end an answer, and the escapes in them.
STOPS = ("until", "stop_words")
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
ESCAPE = re.compile(r"\\([nt\\])")

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

    A task's positive temperature means sampling, as in lmms-eval's models; zero means greedy. Keys that
    `generate` does not know (some tasks carry image options there) are dropped with a warning. A task's settings that
    change nothing are dropped; those of the model and the benchmark are refused.

    A budget of reasoning (`thinking=budget:N`) is added to `max_new_tokens`, which tasks write for answers alone; the
    engine's argument is `thinking_budget`.

    `until` has the opposite order: what the model's or the benchmark's file names, [] and null for none, goes before
    the strings that the task's author wrote. They never stop the generation, as in lmms-eval's model classes: the whole
    answer is generated, counted and timed, and then cut.

    Raises:
        UserError: a setting of the model or the benchmark that changes nothing beside the others.
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
    tables: dict[str, str | None] = dict.fromkeys(model or (), "model")
    tables |= {**dict.fromkeys(task), **dict.fromkeys(benchmark or (), "benchmark")}
    by_task = denoises or tables.get("temperature") is None
    temperature = float(selected.get("temperature", 0)) if by_task else 0.0
    sample = bool(selected.get("do_sample", temperature > 0))
    if float(selected.get("temperature", 1)) == 0:
        sample = False
    if denoises:
        # The length is the model's own, and a word is sampled from the whole distribution unless a setting cuts it.
        selected["do_sample"] = sample or draws
        return Settings(selected, tuple(stop for stop in until if stop), thinking)
    _refuse_idle(selected, tables, sample)
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


def unescaped(table: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return settings with a line break, a tab and a backslash for `\n`, `\t` and `\\` in their stop strings.

    Neither a shell nor Hydra's grammar turns these letters into the characters.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        is_text = isinstance(value, str)
        return ESCAPE.sub(lambda match: ESCAPES[match[1]], value) if is_text else value

    return {name: plain(value) if name in STOPS else value for name, value in table.items()}


def settings_of(spec: RunSpec, task: Mapping[str, Any]) -> Settings:
    """Return the settings of a run's requests to a task; see `settings`."""
    facts, model, benchmark = spec.model.facts, spec.model.generation, spec.benchmark.generation
    draws = facts.canvas is not None
    return settings(task, model, benchmark, denoises=facts.denoises, draws=draws)


def _refuse_idle(
    selected: Mapping[str, Any], tables: Mapping[str, str | None], sample: bool
) -> None:
    """Raise UserError for a setting of `model` or `benchmark` that changes nothing; `tables` has the table of each."""
    beams = int(selected.get("num_beams", 1)) > 1
    idle = {**({} if sample else SAMPLING_ONLY), **({} if beams else BEAMS_ONLY)}
    if not sample and not beams:
        idle["renormalize_logits"] = (False,)
    for name, neutral in idle.items():
        table = tables.get(name)
        if table is not None and selected.get(name) not in (None, *neutral):
            remedy = "num_beams=2 or more" if name in BEAMS_ONLY else "do_sample=true"
            raise UserError(
                f"{table}.generation.{name}={selected[name]!r} changes nothing without benchmark.generation.{remedy}; "
                f"valid: both, or no {name}"
            )
    if not sample and selected.get("do_sample") and tables["do_sample"] is not None:
        raise UserError(
            f"{tables['do_sample']}.generation.do_sample=true changes nothing at temperature=0; valid: "
            "benchmark.generation.temperature above 0"
        )


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
