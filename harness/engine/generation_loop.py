"""Generate ordinary answers: by the engine's loop, or by the library's if requested or if the loop does not apply.

The engine's loop is one prefill by the full model, then steps by its text stack alone. The library prepares everything
(`generate`, which takes this loop as its `custom_generate`): settings, positions and masks of the prompt, logits
processors, stopping criteria. Tokens are chosen from the logits as in its own loop, and sampling draws the same ids
from the same seed. Unlike the library's loop, this one does not prepare the inputs of a full multimodal model, build
positions and masks again, or wait for the device at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from espalier.harness.engine.forward_pass import Pass
from espalier.harness.engine.kv_cache import answer_cache, attention_configs, fold_heads
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.record import LoopOutput
from espalier.harness.engine.text_stack import TextForward
from espalier.harness.specs.generation import spoken
from espalier.harness.specs.run_spec import DecodeLoop

#: Tokens between two checks on a GPU whether all rows have ended: each check waits for all launched kernels.
END_CHECK_INTERVAL = 8


class PrefillState(Protocol):
    """State after the prefill, available once it has run."""

    following: Tensor
    """Position (..., B, 1) of the token that follows."""


def run_loop(
    adapter: ModelParts,
    prefill: PrefillState,
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> LoopOutput:
    """Run the prompt and generate the answers of a batch, greedily or by sampling.

    Args:
        adapter: the model.
        prefill: observes the prefill, and completes the decoder's arguments at each step.
        model: this and all others: arguments of the library's loop.
        input_ids: (B, L).
        logits_processor: of the scores.
        stopping_criteria: of the answers.
        generation_config: resolved settings.
        **model_kwargs: of the model's forward.
    """
    cache = model_kwargs["past_key_values"]
    inputs = model.prepare_inputs_for_generation(
        input_ids,
        next_sequence_length=input_ids.shape[1] - cache.get_seq_length(),
        is_first_iteration=True,
        **model_kwargs,
    )
    logits = model(**inputs, return_dict=True).logits[:, -1]
    answer = _GeneratedAnswer(input_ids, logits_processor, stopping_criteria, generation_config)
    text = TextForward.of(adapter)
    with (
        model._optimize_model_for_decode(),
        fold_heads(attention_configs(adapter.decoder)),
    ):
        while not answer.extend(logits):
            positions = prefill.following + (answer.count - 1)
            logits = text(answer.last_tokens, positions, None, cache)[:, -1]
    return answer.output()


def interval(device: torch.device) -> int:
    """Return the number of tokens between two checks whether all rows have ended."""
    return 1 if device.type == "cpu" else END_CHECK_INTERVAL


def draw_ids(probabilities: Tensor) -> Tensor:
    """Draw one id (B,) a row from probabilities (B, V), without waiting for the device.

    torch.multinomial draws one sample by the same computation, so the same seed draws the same ids; on a GPU it
    synchronises twice, to check its arguments.
    """
    noise = torch.empty_like(probabilities).exponential_(1)
    return torch.div(probabilities, noise, out=noise).argmax(-1)


class _GeneratedAnswer:
    """The tokens generated so far, and which rows continue."""

    def __init__(self, prompt: Tensor, processors: Any, criteria: Any, config: Any) -> None:
        rows, self._start = prompt.shape
        self._processors, self._criteria, self._config = processors, criteria, config
        # Written by index; processors and criteria see the written part.
        self._ids = prompt.new_empty(rows, config.max_length)
        self._ids[:, : self._start] = prompt
        self._end = self._start
        self._unfinished = torch.ones(rows, dtype=torch.long, device=prompt.device)
        #: (B,) tokens until a row ended, and () whether a row had no probabilities to draw from.
        self._needed = torch.zeros_like(self._unfinished)
        self._has_nan = self._unfinished.new_zeros((), dtype=torch.bool)
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._logits: list[Tensor] | None = [] if config.output_logits else None
        self._interval = interval(prompt.device)

    @property
    def count(self) -> int:
        """Tokens generated for each row."""
        return self._end - self._start

    @property
    def last_tokens(self) -> Tensor:
        """The latest tokens (B, 1)."""
        return self._ids[:, self._end - 1 : self._end]

    def extend(self, logits: Tensor) -> bool:
        """Add one token to each row, from logits (B, V), and return whether all rows are known to have ended."""
        # A copy in fp32, which processors may write to, as in the library's loop.
        logits = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        scores = self._processors(self._ids[:, : self._end], logits)
        if self._logits is not None:
            self._logits.append(logits)
        tokens = self._choose(scores)
        if self._pads:
            pad = self._config._pad_token_tensor.to(tokens.device)
            tokens = torch.where(self._unfinished > 0, tokens, pad)
        self._ids[:, self._end] = tokens
        self._end += 1
        self._needed += self._unfinished  # 1 until the row has ended
        self._unfinished &= ~self._criteria(self._ids[:, : self._end], None)
        if self._end >= self._config.max_length:
            return True
        return self.count % self._interval == 0 and not bool(self._unfinished.any())

    def _choose(self, scores: Tensor) -> Tensor:
        if not self._config.do_sample:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        self._has_nan |= probabilities.isnan().any()
        return draw_ids(probabilities)

    def output(self) -> LoopOutput:
        """Return the answers; the device is not waited for."""
        ids = self._ids[:, self._start : self._end]
        logits = None if self._logits is None else tuple(self._logits)
        end = self._needed.amax()
        return LoopOutput(ids, logits, self.count - 1, "loop", end, self._has_nan)


#: Modes of the engine's loop. Beams and all other modes are left to the library.
LOOP_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

#: Arguments of `generate` that only the library's loops support.
LIBRARY_ARGUMENTS = (
    *("streamer", "synced_gpus", "custom_generate"),
    *("output_scores", "output_attentions", "output_hidden_states"),
)


def generate_answers(
    adapter: ModelParts,
    current_pass: Pass,
    inputs: Mapping[str, Any],
    generation: Mapping[str, Any],
    decode: DecodeLoop,
) -> LoopOutput:
    """Generate the answers of a batch.

    Args:
        adapter: the model.
        current_pass: the open pass.
        inputs: of the batch.
        generation: arguments of `generate`.
        decode: the loop to use where both apply.
    """
    types, emulates = adapter.layer_types, current_pass.prefill.setup.emulate
    hooks = current_pass.canvas
    windows = () if types is None or (emulates and hooks is None) else types.windows
    states = tuple(filter(adapter.facts.text.is_linear, range(len(adapter.decoder.layers))))
    cache = answer_cache(adapter.decoder, windows, states)
    if hooks is not None:
        ids = hooks.answers(inputs, generation, cache)
        return LoopOutput(ids, None, ids.shape[1], "generate")
    arguments = {**inputs, **generation, "past_key_values": cache}
    settings = dict(generation)
    # As `generate` will resolve them.
    config = adapter.model._prepare_generation_config(
        settings.pop("generation_config", None), **settings
    )[0]
    library_only = any(
        generation.get(name) or getattr(config, name, None) for name in LIBRARY_ARGUMENTS
    )
    if decode == "loop" and not library_only and config.get_generation_mode() in LOOP_MODES:
        current_pass.completes = True
        result: LoopOutput = adapter.generate(
            **{**arguments, **_stop_criteria(config, generation)},
            custom_generate=partial(run_loop, adapter, current_pass),
        )
        return result
    output = adapter.generate(**arguments, return_dict_in_generate=True)
    ids = output.sequences[:, inputs["input_ids"].shape[1] :]
    return LoopOutput(ids, getattr(output, "logits", None), ids.shape[1] - 1, "generate")


def _stop_criteria(config: GenerationConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return stop strings as criteria: `generate` does not pass its tokenizer on to a custom loop."""
    tokenizer = generation.get("tokenizer")
    if config.stop_strings is None or tokenizer is None:  # without a tokenizer `generate` raises
        return {}
    strings = StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer)
    criteria = StoppingCriteriaList([*(generation.get("stopping_criteria") or ()), strings])
    return {"stop_strings": None, "stopping_criteria": criteria}


#: Text that ends a reasoning.
CLOSING = "\n</think>\n\n"


class ReasoningLimit(LogitsProcessor):
    """Leaves only the tokens of CLOSING to rows that still reason when these fill up the budget.

    Args:
        tokenizer: tokenizer of the model.
        budget: tokens of reasoning, CLOSING included.
        lead: the tag by which the prompt opens the reasoning; "" if the answer opens it.

    The first call, with the prompt alone, sets where answers start.

    Cost: a decoding of each answer for each forced token.
    """

    def __init__(self, tokenizer: Any, budget: int, lead: str) -> None:
        self._tokenizer = tokenizer
        self._closing = tokenizer.encode(CLOSING, add_special_tokens=False)
        self._forced_from = budget - len(self._closing)
        self._lead = lead
        self._start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V), minus infinity for all but the forced token of a row."""
        if self._start is None:
            self._start = input_ids.shape[1]
        place = input_ids.shape[1] - self._start - self._forced_from
        if not 0 <= place < len(self._closing):
            return scores
        free = input_ids[:, self._start : self._start + self._forced_from]
        texts = (self._lead + text for text in self._tokenizer.batch_decode(free))
        reasons = [bool(text) and not spoken(text) for text in texts]
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._closing[place]] = 0.0
        return torch.where(torch.tensor(reasons, device=scores.device)[:, None], forced, scores)
