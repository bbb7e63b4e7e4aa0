"""Generate ordinary answers: by the engine's loop, or by the library's if requested or if the loop does not apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from espalier.harness.engine.forward_pass import Pass
from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.text.generation_loop import AnswerLoop, LoopOutput
from espalier.harness.engine.text.kv_cache import answer_cache
from espalier.harness.specs.run_spec import DecodeLoop

#: Modes of the engine's loop. Beams and all other modes are left to the library.
LOOPED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

#: Arguments of `generate` that only the library's loops support.
LIBRARYS = (
    *("streamer", "synced_gpus", "custom_generate"),
    *("output_scores", "output_attentions", "output_hidden_states"),
)


def generate_answers(
    adapter: Parts,
    current_pass: Pass,
    inputs: Mapping[str, Any],
    generation: Mapping[str, Any],
    decode: DecodeLoop,
) -> tuple[LoopOutput, DecodeLoop]:
    """Generate the answers of a batch.

    Args:
        adapter: the model.
        current_pass: the open pass.
        inputs: of the batch.
        generation: arguments of `generate`.
        decode: the loop to use where both apply.

    Returns:
        The answers, and the loop that generated them.
    """
    arguments = {**inputs, **generation, "past_key_values": answer_cache(adapter.decoder)}
    config = _resolved(adapter, generation)
    if decode == "loop" and _loops(config, generation):
        current_pass.completes = True
        loop = AnswerLoop(adapter, current_pass)
        result: LoopOutput = adapter.model.generate(
            **{**arguments, **_stopping(config, generation)}, custom_generate=loop
        )
        return result, "loop"
    output = adapter.model.generate(**arguments, return_dict_in_generate=True)
    ids = output.sequences[:, inputs["input_ids"].shape[1] :]
    return LoopOutput(ids, getattr(output, "logits", None), ids.shape[1] - 1), "generate"


def _resolved(adapter: Parts, generation: Mapping[str, Any]) -> GenerationConfig:
    """Return the settings as `generate` will resolve them."""
    settings = {name: value for name, value in generation.items() if name != "generation_config"}
    generation_config = generation.get("generation_config")
    resolved: GenerationConfig = adapter.model._prepare_generation_config(
        generation_config, **settings
    )[0]
    return resolved


def _loops(config: GenerationConfig, generation: Mapping[str, Any]) -> bool:
    """Return whether the engine's loop supports these settings."""
    if any(generation.get(name) or getattr(config, name, None) for name in LIBRARYS):
        return False
    return config.get_generation_mode() in LOOPED


def _stopping(config: GenerationConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return stop strings as criteria: `generate` does not pass its tokenizer on to a custom loop."""
    tokenizer = generation.get("tokenizer")
    if config.stop_strings is None or tokenizer is None:  # without a tokenizer `generate` raises
        return {}
    strings = StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer)
    criteria = StoppingCriteriaList([*(generation.get("stopping_criteria") or ()), strings])
    return {"stop_strings": None, "stopping_criteria": criteria}
