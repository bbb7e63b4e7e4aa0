"""Checks of generation settings: names and values that `generate` would refuse or misread at the first sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from espalier.harness.decoding.diffusion.denoising_settings import REMASKING, SCHEDULES, STOPS
from espalier.harness.engine.engine_guards import FIXED, REFUSED
from espalier.harness.errors import UserError, unknown_name
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.specs.think_tags import LEAST_BUDGET, MODES, Thinking
from espalier.methods.base import Decoder, Method


@dataclass(frozen=True)
class Valid:
    """The valid values of a setting, in words and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


def _number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _texts(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    )


def _words(*valid: str) -> Valid:
    return Valid(
        f"{', '.join(valid[:-1])} or {valid[-1]}",
        lambda value: isinstance(value, str) and value in valid,
    )


COUNT = Valid("an integer of at least 1", lambda value: _integer(value, 1))
COUNT_OR_NONE = Valid("an integer of at least 0", lambda value: _integer(value, 0))
FLAG = Valid("true or false", lambda value: isinstance(value, bool))
TEXT = Valid("a string", lambda value: isinstance(value, str))
TEXTS = Valid("a string or a list of strings", _texts)
NUMBER = Valid("a number", _number)
POSITIVE = Valid("a number above 0", lambda value: _number(value) and value > 0)
FROM_ZERO = Valid("a number of at least 0", lambda value: _number(value) and value >= 0)
SHARE = Valid("a number in (0, 1]", lambda value: _number(value) and 0 < value <= 1)
SHARE_FROM_ZERO = Valid("a number in [0, 1]", lambda value: _number(value) and 0 <= value <= 1)
BELOW_ONE = Valid("a number in [0, 1)", lambda value: _number(value) and 0 <= value < 1)
SCHEDULE, RANKING, STOP = (_words(*names) for names in (SCHEDULES, REMASKING, STOPS))
STOPPING = Valid("true, false or never", lambda value: isinstance(value, bool) or value == "never")
THINKING = Valid(
    f"{', '.join(MODES)} or budget:N with N at least {LEAST_BUDGET}",
    lambda value: Thinking.of(value) is not None,
)

#: Settings with values that only the library checks, at the first sample.
UNCHECKED = (
    *("eos_token_id", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config"),
)

#: The library's settings that this harness has under another name.
INSTEAD = {
    "max_length": "max_new_tokens",
    "min_length": "min_new_tokens",
    "stop_strings": "until",
}

VALUES: Mapping[str, Valid] = {
    "until": TEXTS,
    "max_new_tokens": COUNT,
    "min_new_tokens": COUNT_OR_NONE,
    "max_time": POSITIVE,
    "do_sample": FLAG,
    "use_cache": FLAG,
    "renormalize_logits": FLAG,
    "remove_invalid_values": FLAG,
    "num_beams": COUNT,
    "num_beam_groups": COUNT,
    "num_return_sequences": COUNT,
    "early_stopping": STOPPING,
    "temperature": FROM_ZERO,
    "top_k": COUNT_OR_NONE,
    "top_p": SHARE,
    "top_h": SHARE,
    "min_p": SHARE_FROM_ZERO,
    "typical_p": SHARE,
    "epsilon_cutoff": BELOW_ONE,
    "eta_cutoff": BELOW_ONE,
    "repetition_penalty": POSITIVE,
    "encoder_repetition_penalty": POSITIVE,
    "length_penalty": NUMBER,
    "diversity_penalty": FROM_ZERO,
    "guidance_scale": NUMBER,
    "no_repeat_ngram_size": COUNT_OR_NONE,
    "encoder_no_repeat_ngram_size": COUNT_OR_NONE,
    "steps": COUNT,
    "block_length": COUNT,
    "step_ratio": SHARE,
    "schedule": SCHEDULE,
    "shift": POSITIVE,
    "remasking": RANKING,
    "threshold": SHARE,
    "stop": STOP,
    "stop_words": TEXTS,
    "prefix_cache": FLAG,
    "block_cache": FLAG,
    "prompt_interval": COUNT_OR_NONE,
    "generation_interval": COUNT_OR_NONE,
    "transfer_ratio": SHARE,
    "eps": SHARE,
    "alg_temp": FROM_ZERO,
    "infill": TEXT,
    "max_denoising_steps": COUNT,
    "entropy_bound": POSITIVE,
    "t_min": FROM_ZERO,
    "t_max": POSITIVE,
    "stability_threshold": COUNT_OR_NONE,
    "confidence_threshold": POSITIVE,
    "thinking": THINKING,
}


def check_budget_of_reasoning(spec: RunSpec, method: Method) -> None:
    """Raise UserError for a budget of reasoning in a run that decodes in another way than one token after another."""
    value = spec.model.generation.get("thinking")
    if (Thinking.of(value) or Thinking()).budget is None:
        return
    reasons = {
        f"method={spec.method.name!r} verifies drafts": isinstance(method, Decoder),
        f"model={spec.model.name!r} denoises its answers": spec.model.facts.denoises,
        "backend=vllm decodes by itself": spec.backend.served,
        "engine.rescore judges the model's own tokens": spec.engine.rescore,
        f"benchmark={spec.benchmark.name!r} fixes the length of answers": (
            spec.benchmark.new_tokens is not None
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(
                f"model.generation.thinking={value!r} writes tokens into the answer, and {reason}; valid: strip, keep"
            )


def check_settings(key: str, table: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that does not exist, or a value that cannot work; null leaves a setting unset.

    Args:
        key: the config key of the table.
        table: the settings.
    """
    for name, value in table.items():
        if name in INSTEAD:
            raise UserError(f"{key}.{name}={value!r} is not used; valid: {key}.{INSTEAD[name]}")
        if name not in (*VALUES, *UNCHECKED, *REFUSED, *FIXED):
            raise unknown_name(key, name, (*VALUES, *UNCHECKED))
        valid = VALUES.get(name)
        if valid is not None and value is not None and not valid.holds(value):
            raise UserError(f"{key}.{name}={value!r} must be {valid.words}, or null")
    if key != "model.generation" and table.get("thinking") is not None:
        raise UserError(
            f"{key}.thinking={table['thinking']!r}: the model's prompts depend on it; valid: model.generation.thinking"
        )
    minimum, maximum = table.get("min_new_tokens"), table.get("max_new_tokens")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise UserError(
            f"{key}.min_new_tokens={minimum} is above max_new_tokens={maximum}; valid: at most {maximum}"
        )
