"""Generation settings: the table of all of them, their checks, and the settings of a task's requests."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.settings import (
    Count,
    FromZero,
    Must,
    Natural,
    OneOf,
    Positive,
    read_value,
)
from espalier.harness.specs.run_spec import RunSpec

#: Templates may write the first tag into the prompt; the answer is then completed with it (`opened_by`).
BEGINS, ENDS = (re.compile(f"<{slash}think(?:ing)?>", re.IGNORECASE) for slash in ("", "/"))

#: Values of `generation.thinking` besides `budget:N`.
MODES = ("strip", "keep", "off")

#: The smallest budget: the closing tag is part of it, up to 13 tokens of a tokenizer of bytes.
LEAST_BUDGET = 16


@dataclass(frozen=True)
class Thinking:
    """The setting `generation.thinking`: what prompts ask for, and what is scored.

    Attributes:
        prompted: the value of `enable_thinking` for the chat template; None: the template's default.
        scores_all: whether the reasoning is scored as a part of the answer.
        budget: the largest number of tokens of reasoning, closing tag included; None: unlimited.
    """

    prompted: bool | None = None
    scores_all: bool = False
    budget: int | None = None

    @classmethod
    def of(cls, value: object) -> Thinking | None:
        """Return the meaning of a setting, the default for None; None for an invalid value."""
        if value is None:
            return cls()
        if value in MODES:
            return cls(prompted=value != "off", scores_all=value == "keep")
        number = re.fullmatch(r"budget:(\d+)", str(value))
        budget = 0 if number is None else int(number[1])
        return cls(prompted=True, budget=budget) if budget >= LEAST_BUDGET else None


def spoken(text: str) -> str:
    """Return what an answer holds after its reasoning: all of it where it has none, "" where that never ends.

    Reasoning begins an answer; a tag in the middle of a text, such as one read off a picture, is a part of it.
    """
    answer = ENDS.split(text)[-1]
    return "" if BEGINS.match(answer.lstrip()) else answer


def opened_by(prompt: str) -> str:
    """Return the tag of a reasoning that a prompt opens and leaves open, with the text after it; "" without one."""
    tags = list(BEGINS.finditer(ENDS.split(prompt)[-1]))
    return tags[-1][0] if tags else ""


log = logging.getLogger(__name__)

#: Used when neither task, benchmark nor model set `max_new_tokens`, as in lmms-eval's own models.
DEFAULT_NEW_TOKENS = 1024

#: Settings of strings that end an answer, and the escapes in them.
STOPS = ("until", "stop_words")
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
ESCAPE = re.compile(r"\\([nt\\])")

#: Sampling settings where none are given: the library's defaults, stated so that a row holds them.
SAMPLING: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}

#: How answers come about: one token after another, or denoised from masks or from canvases of random words.
TOKENS, MASKS, CANVASES = "tokens", "masks", "canvases"

#: How the places of a block are distributed over its steps (harness/decoding/diffusion/denoising_settings.py).
LINEAR, TIMESTEPS, ORIGIN = "linear", "timesteps", "origin"
SCHEDULES = (LINEAR, "shift", "cosine", "logit_normal", "maskgit", TIMESTEPS, ORIGIN)

#: What ranks the masked places of a block: the probability of their word, chance, the entropy of the distribution (its
#: negative), or the distance between its two highest probabilities.
REMASKING = ("low_confidence", "random", "entropy", "margin")

#: What follows from an end token or a stop word: nothing more is unmasked at later places; the answer is cut there
#: once it is complete; or nothing.
ENDINGS = ("cut", "freeze", "none")


def _are_texts(value: Any) -> bool:
    texts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(text, str) for text in texts)


Flag = Annotated[bool, Must("true or false")]
Texts = Annotated[Any, Must("a string or a list of strings", _are_texts)]
Number = Annotated[float, Must("a number", math.isfinite)]
Share = Annotated[float, Must("a number in (0, 1]", lambda value: 0 < value <= 1)]
ShareFromZero = Annotated[float, Must("a number in [0, 1]", lambda value: 0 <= value <= 1)]
BelowOne = Annotated[float, Must("a number in [0, 1)", lambda value: 0 <= value < 1)]
Reasoning = Annotated[
    Any,
    Must(
        f"{', '.join(MODES)} or budget:N with N at least {LEAST_BUDGET}",
        lambda value: Thinking.of(value) is not None,
    ),
]


@dataclass(frozen=True)
class GenerationSetting:
    """A setting of an answer, by its name in `generate` or in denoising.

    Attributes:
        hint: annotation of its values (harness/settings.py); Any: the library checks them at the first sample; None: no
            run can have it.
        answers: the ways to answer that have it.
        neutral: values that change nothing.
        needs: what it needs to act: `sampling`, `beams`, or either (`search`); None: nothing.
        unsupported: why the engine cannot honour other values than the neutral ones.
        instead: the setting that has its place.
    """

    hint: Any = None
    answers: tuple[str, ...] = (TOKENS,)
    neutral: tuple[Any, ...] = ()
    needs: str | None = None
    unsupported: str | None = None
    instead: str | None = None


_REWINDS = "assisted decoding rewinds a cache whose layers differ in length"
_BEAM_GROUPS = "beam groups are code outside the library"
_TOKENS_AND_MASKS = (TOKENS, MASKS)
_EVERY = (TOKENS, MASKS, CANVASES)

#: Every generation setting.
GENERATION: Mapping[str, GenerationSetting] = {
    "max_new_tokens": GenerationSetting(Count, _EVERY),
    "min_new_tokens": GenerationSetting(Natural, neutral=(0,)),
    "max_time": GenerationSetting(Positive),
    "do_sample": GenerationSetting(Flag, _TOKENS_AND_MASKS, (True,)),
    "use_cache": GenerationSetting(
        Flag, neutral=(True,), unsupported="tokens are chosen once, at prefill"
    ),
    "renormalize_logits": GenerationSetting(Flag, neutral=(False,), needs="search"),
    "remove_invalid_values": GenerationSetting(Flag),
    "num_beams": GenerationSetting(Count, neutral=(1,)),
    "num_beam_groups": GenerationSetting(Count, neutral=(1,), unsupported=_BEAM_GROUPS),
    "num_return_sequences": GenerationSetting(
        Count, neutral=(1,), unsupported="a sample has one answer"
    ),
    "early_stopping": GenerationSetting(
        Annotated[bool | Literal["never"], Must("true, false or never")],
        neutral=(False,),
        needs="beams",
    ),
    "temperature": GenerationSetting(FromZero, _TOKENS_AND_MASKS, (0,), "sampling"),
    "top_k": GenerationSetting(Natural, _TOKENS_AND_MASKS, (0, 50), "sampling"),
    "top_p": GenerationSetting(Share, _TOKENS_AND_MASKS, (1,), "sampling"),
    "top_h": GenerationSetting(Share, neutral=(1,), needs="sampling"),
    "min_p": GenerationSetting(ShareFromZero, neutral=(0,), needs="sampling"),
    "typical_p": GenerationSetting(Share, neutral=(1,), needs="sampling"),
    "epsilon_cutoff": GenerationSetting(BelowOne, neutral=(0,), needs="sampling"),
    "eta_cutoff": GenerationSetting(BelowOne, neutral=(0,), needs="sampling"),
    "repetition_penalty": GenerationSetting(Positive, neutral=(1.0,)),
    "encoder_repetition_penalty": GenerationSetting(Positive),
    "length_penalty": GenerationSetting(Number, neutral=(1,), needs="beams"),
    "diversity_penalty": GenerationSetting(FromZero, neutral=(0,), unsupported=_BEAM_GROUPS),
    "guidance_scale": GenerationSetting(
        Number, neutral=(1,), unsupported="guidance runs a second prompt between the steps"
    ),
    "no_repeat_ngram_size": GenerationSetting(Natural, neutral=(0,)),
    "encoder_no_repeat_ngram_size": GenerationSetting(Natural),
    "thinking": GenerationSetting(Reasoning),
    "steps": GenerationSetting(Count, (MASKS,)),
    "step_ratio": GenerationSetting(Share, (MASKS,)),
    "block_length": GenerationSetting(Count, (MASKS,)),
    "schedule": GenerationSetting(Annotated[str, OneOf(SCHEDULES)], (MASKS,)),
    "shift": GenerationSetting(Positive, (MASKS,)),
    "remasking": GenerationSetting(Annotated[str, OneOf(REMASKING)], (MASKS,)),
    "threshold": GenerationSetting(Share, (MASKS,)),
    "stop": GenerationSetting(Annotated[str, OneOf(ENDINGS)], (MASKS,)),
    "stop_words": GenerationSetting(Texts, (MASKS,)),
    "prefix_cache": GenerationSetting(Flag, (MASKS,)),
    "block_cache": GenerationSetting(Flag, (MASKS,)),
    "prompt_interval": GenerationSetting(Natural, (MASKS,)),
    "generation_interval": GenerationSetting(Natural, (MASKS,)),
    "transfer_ratio": GenerationSetting(Share, (MASKS,)),
    "eps": GenerationSetting(Share, (MASKS,)),
    "alg_temp": GenerationSetting(FromZero, (MASKS,)),
    "infill": GenerationSetting(str, (MASKS,)),
    "max_denoising_steps": GenerationSetting(Count, (CANVASES,)),
    "entropy_bound": GenerationSetting(Positive, (CANVASES,)),
    "t_min": GenerationSetting(FromZero, (CANVASES,)),
    "t_max": GenerationSetting(Positive, (CANVASES,)),
    "stability_threshold": GenerationSetting(Natural, (CANVASES,)),
    "confidence_threshold": GenerationSetting(Positive, (CANVASES,)),
    "until": GenerationSetting(Texts, _EVERY),
    "eos_token_id": GenerationSetting(Any),
    "bad_words_ids": GenerationSetting(Any),
    "sequence_bias": GenerationSetting(Any),
    "suppress_tokens": GenerationSetting(Any),
    "begin_suppress_tokens": GenerationSetting(Any),
    "forced_eos_token_id": GenerationSetting(Any),
    "exponential_decay_length_penalty": GenerationSetting(Any),
    "watermarking_config": GenerationSetting(Any),
    "cache_implementation": GenerationSetting(
        unsupported="static, offloaded and quantised caches hold one length for all layers"
    ),
    "prefill_chunk_size": GenerationSetting(
        unsupported="a chunked prefill never has all visual tokens at once"
    ),
    "assistant_model": GenerationSetting(unsupported=_REWINDS),
    "prompt_lookup_num_tokens": GenerationSetting(unsupported=_REWINDS),
    "past_key_values": GenerationSetting(
        unsupported="a cache from an earlier turn reports the length of layer 0 only"
    ),
    "inputs_embeds": GenerationSetting(unsupported="visual positions are read from input_ids"),
    "compile_config": GenerationSetting(unsupported="compiled graphs have fixed lengths"),
    "max_length": GenerationSetting(instead="max_new_tokens"),
    "min_length": GenerationSetting(instead="min_new_tokens"),
    "stop_strings": GenerationSetting(instead="until"),
}


def names_of(*answers: str) -> tuple[str, ...]:
    """Return the settings of these ways to answer alone."""
    return tuple(name for name, setting in GENERATION.items() if setting.answers == answers)


#: Settings of denoised answers, which `generate` does not have.
DENOISING, CANVAS = names_of(MASKS), names_of(CANVASES)

#: Of each way to answer, why it lacks a setting of another.
_LACKS = {
    TOKENS: "is for models that denoise their answers, and {} generates one token after another",
    MASKS: "is for models that generate one token after another, and {} denoises its answers",
    CANVASES: "is for other models, and {} denoises a canvas of random words",
}


def check_settings(key: str, table: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that does not exist, or a value that cannot work; null leaves a setting unset.

    Args:
        key: the config key of the table.
        table: the settings.
    """
    for name, value in table.items():
        setting = GENERATION.get(name)
        if setting is None:
            valid = (key for key, setting in GENERATION.items() if setting.hint is not None)
            raise unknown_name(key, name, valid)
        if setting.instead is not None:
            raise UserError(f"{key}.{name}={value!r} is not used; valid: {key}.{setting.instead}")
        if setting.hint is not None:
            read_value(f"{key}.{name}", value, setting.hint | None)
    if key != "model.generation" and table.get("thinking") is not None:
        raise UserError(
            f"{key}.thinking={table['thinking']!r}: the model's prompts depend on it; valid: model.generation.thinking"
        )
    minimum, maximum = table.get("min_new_tokens"), table.get("max_new_tokens")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise UserError(
            f"{key}.min_new_tokens={minimum} is above max_new_tokens={maximum}; valid: at most {maximum}"
        )


def check_generation(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `generate` that the engine cannot honour.

    Raises:
        UserError: names the argument and the reason.
    """
    for name, setting in GENERATION.items():
        value = arguments.get(name)
        if setting.unsupported and value is not None and value not in setting.neutral:
            valid = setting.neutral[0] if setting.neutral else "null"
            raise UserError(
                f"generation.{name}={value!r} is not supported: {setting.unsupported}; valid: {valid}"
            )


def check_answers(generation: Mapping[str, Any], answers: str, model: str = "this one") -> None:
    """Refuse settings of other ways to answer, unless their value changes nothing.

    Args:
        generation: the settings.
        answers: how the model answers.
        model: the model in the error line.

    Raises:
        UserError: names the setting and those that the model has.
    """
    for name, value in generation.items():
        setting = GENERATION.get(name, GenerationSetting())
        changes = value not in setting.neutral or setting.needs or setting.unsupported
        if value is not None and answers not in setting.answers and changes:
            names = [name for name, setting in GENERATION.items() if answers in setting.answers]
            valid = "null" if answers == TOKENS else ", ".join(names)
            raise UserError(
                f"generation.{name}={value!r} {_LACKS[answers].format(model)}; valid: {valid}"
            )


@dataclass(frozen=True)
class CanvasSettings:
    """How canvases are denoised; defaults are those of DiffusionGemma's generation_config.json.

    Attributes:
        length: places of the answer, a multiple of those of a canvas.
        steps: most steps of a canvas.
        entropy_bound: places of the lowest entropy are accepted while the entropies of those before add up to at most
            this value (arXiv 2505.24857); all others get new random words.
        t_min: temperature of the last step.
        t_max: temperature before the first step, from where it falls linearly.
        stability_threshold: steps for which the likeliest words must stay the same to end a canvas early.
        confidence_threshold: mean entropy below which it then ends.
    """

    length: int
    steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005

    @classmethod
    def of(cls, generation: Mapping[str, Any], canvas: int) -> CanvasSettings:
        """Read generation settings; the length defaults to one canvas, of `canvas` places.

        Raises:
            UserError: a setting of other answers, a length that is not a multiple of `canvas`, or t_max up to t_min.
        """
        check_answers(generation, CANVASES)
        settings = {name: value for name, value in generation.items() if value is not None}
        length = int(settings.get("max_new_tokens", canvas))
        if length % canvas:
            raise UserError(
                f"generation.max_new_tokens={length} is no multiple of the {canvas} places of a canvas; valid: "
                f"{max(length // canvas, 1) * canvas}"
            )
        names = {"max_denoising_steps": "steps"}
        stated = {names.get(name, name): settings[name] for name in CANVAS if name in settings}
        canvas_settings = cls(
            length, **{name: type(getattr(cls, name))(value) for name, value in stated.items()}
        )
        if canvas_settings.t_max <= canvas_settings.t_min:
            raise UserError(
                f"generation.t_max={canvas_settings.t_max:g} is not above "
                f"generation.t_min={canvas_settings.t_min:g}; valid: above"
            )
        return canvas_settings


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
    sample = is_sampled(selected, denoises or tables.get("temperature") is None)
    if denoises:
        # The length is the model's own, and a word is sampled from the whole distribution unless a setting cuts it.
        selected["do_sample"] = sample or draws
        return Settings(selected, tuple(stop for stop in until if stop), thinking)
    _refuse_idle(selected, tables, sample)
    if sample:
        selected = {**SAMPLING, **selected}
    else:
        selected = {
            name: value
            for name, value in selected.items()
            if GENERATION.get(name, GenerationSetting()).needs != "sampling"
        }
    selected["do_sample"] = sample
    selected.setdefault("max_new_tokens", DEFAULT_NEW_TOKENS)
    if thinking.budget is not None:
        selected["max_new_tokens"] += thinking.budget
        selected["thinking_budget"] = thinking.budget
    return Settings(selected, tuple(stop for stop in until if stop), thinking)


def is_sampled(merged: Mapping[str, Any], by_temperature: bool) -> bool:
    """Return whether merged settings draw words; `by_temperature`: a positive temperature alone means sampling."""
    stated = {name: value for name, value in merged.items() if value is not None}
    temperature = float(stated.get("temperature", 0))
    sample = bool(stated.get("do_sample", by_temperature and temperature > 0))
    return sample and float(stated.get("temperature", 1)) != 0


def has_sampled_answers(spec: RunSpec, task: Mapping[str, Any]) -> bool:
    """Return whether a model that generates token by token draws the words of answers to a task.

    Args:
        spec: the run.
        task: the task's own settings.
    """
    model, benchmark = spec.model.generation, spec.benchmark.generation
    by_task = "temperature" not in benchmark and (
        "temperature" in task or "temperature" not in model
    )
    return is_sampled({**model, **task, **benchmark}, by_task)


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
    return settings(task, model, benchmark, denoises=facts.denoises, draws=facts.canvas is not None)


def _refuse_idle(
    selected: Mapping[str, Any], tables: Mapping[str, str | None], sample: bool
) -> None:
    """Raise UserError for a setting of `model` or `benchmark` that changes nothing; `tables` has the table of each."""
    beams = int(selected.get("num_beams", 1)) > 1
    acting = {"sampling": sample, "beams": beams, "search": sample or beams}
    for name, setting in GENERATION.items():
        table, value = tables.get(name), selected.get(name)
        idle = setting.needs is not None and not acting[setting.needs]
        if table is not None and idle and value not in (None, *setting.neutral):
            remedy = "num_beams=2 or more" if setting.needs == "beams" else "do_sample=true"
            raise UserError(
                f"{table}.generation.{name}={value!r} changes nothing without benchmark.generation.{remedy}; "
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
