"""Settings of answers on canvases, by their names in the library's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.harness.errors import UserError

#: Settings of answers on canvases alone.
CANVAS = (
    *("max_denoising_steps", "entropy_bound", "t_min", "t_max"),
    *("stability_threshold", "confidence_threshold"),
)

#: Settings that an answer on canvases has.
VALID = ("max_new_tokens", *CANVAS, "until")

#: Settings of other models, with the values that change nothing here, where words are always sampled.
_NEUTRAL: Mapping[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
}


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
        settings = {name: value for name, value in generation.items() if value is not None}
        for name, value in settings.items():
            if name not in VALID and not (name in _NEUTRAL and value == _NEUTRAL[name]):
                raise UserError(
                    f"generation.{name}={value!r} is for other models, and this one denoises a canvas of random words; "
                    f"valid: {', '.join(VALID)}"
                )
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
