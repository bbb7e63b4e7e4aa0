"""Who says an ordinary answer: the engine's own loop, or the library's where that is asked for or the loop cannot."""

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

#: What the loop says. Beams, and whatever else the library knows, are the library's.
LOOPED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

#: Arguments of `generate` that mean nothing outside the library's own loops.
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
    """Say the answers of a batch.

    Args:
        adapter: the model.
        current_pass: the pass that is open around it.
        inputs: of the batch.
        generation: arguments of `generate`.
        decode: whose loop is to be taken where both can.

    Returns:
        The answers, and whose loop said them.
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
    """Return the settings as `generate` is going to resolve them."""
    settings = {name: value for name, value in generation.items() if name != "generation_config"}
    generation_config = generation.get("generation_config")
    resolved: GenerationConfig = adapter.model._prepare_generation_config(
        generation_config, **settings
    )[0]
    return resolved


def _loops(config: GenerationConfig, generation: Mapping[str, Any]) -> bool:
    """Return whether the engine's loop can honour what is asked for."""
    if any(generation.get(name) or getattr(config, name, None) for name in LIBRARYS):
        return False
    return config.get_generation_mode() in LOOPED


def _stopping(config: GenerationConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stop strings become: `generate` does not hand its tokenizer on to a loop of the caller's own."""
    tokenizer = generation.get("tokenizer")
    if config.stop_strings is None or tokenizer is None:  # without one it says so itself
        return {}
    strings = StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer)
    criteria = StoppingCriteriaList([*(generation.get("stopping_criteria") or ()), strings])
    return {"stop_strings": None, "stopping_criteria": criteria}
