"""The loop of an ordinary answer: one prefill by the whole model, then steps by its text stack alone.

The library prepares everything (`generate`, which takes this loop as its `custom_generate`): settings, positions and
masks of the prompt, logits processors, stopping criteria. What is chosen from the logits is what its own loop chooses,
and sampling draws what it draws from the same seed. What its loop does at every step and this one does not: prepare the
inputs of a whole multimodal model, make positions and masks anew, and wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.text.fixed_steps import TextForward
from espalier.harness.engine.text.step_attention import attention_configs, folded

#: Tokens between two looks at whether a GPU has said the last end: each look waits for all that was launched.
END_CHECK_INTERVAL = 8


class PrefillState(Protocol):
    """What the prefill leaves behind, known once it has run."""

    following: Tensor
    """Position (..., B, 1) of the token that follows."""

    def check_finite(self, lengths: Sequence[int]) -> None:
        """Raise if the logits behind the first `lengths` tokens of a row are not finite."""


@dataclass(frozen=True)
class LoopOutput:
    """What a loop said: `ids` (B, T), the logits (B, V) of each token if asked for, and the steps that it took."""

    ids: Tensor
    logits: tuple[Tensor, ...] | None
    steps: int


class AnswerLoop:
    """Says the answers of a batch, greedily or by sampling.

    Args:
        adapter: the model.
        behind: sees the prefill, and completes what the decoder stack is given at each step.
    """

    def __init__(self, adapter: Parts, prefill: PrefillState) -> None:
        self._adapter = adapter
        self._prefill = prefill
        self._text = TextForward.of(adapter)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> LoopOutput:
        """Run the prompt and say the answers; the arguments are those of the library's own loop.

        Raises:
            RuntimeError: sampling from probabilities that are none, and the model's own logits are finite.
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
        del inputs
        following = self._prefill.following
        with model._optimize_model_for_decode(), folded(attention_configs(self._adapter.decoder)):
            while not answer.extend(logits):
                positions = following + (answer.count - 1)
                logits = self._text(answer.last_tokens, positions, None, cache)[:, -1]
        if answer.sampling_failed:
            self._prefill.check_finite([answer.needed] * len(input_ids))
            raise RuntimeError("no token has a probability: the processors left none to draw")
        return answer.output()


def interval(device: torch.device) -> int:
    """Return the tokens between two looks at whether all rows have ended."""
    return 1 if device.type == "cpu" else END_CHECK_INTERVAL


def draw_ids(probabilities: Tensor) -> Tensor:
    """Draw one id (B,) a row from probabilities (B, V), without waiting for the device.

    torch.multinomial draws one sample by this very race, so the same seed draws the same ids; on a GPU it waits twice,
    to check what it was given.
    """
    noise = torch.empty_like(probabilities).exponential_(1)
    return torch.div(probabilities, noise, out=noise).argmax(-1)


class _GeneratedAnswer:
    """The tokens said so far, and which rows go on."""

    def __init__(self, prompt: Tensor, processors: Any, criteria: Any, config: Any) -> None:
        rows, self._start = prompt.shape
        self._processors, self._criteria, self._config = processors, criteria, config
        # Written by index; processors and criteria see what is written.
        self._ids = prompt.new_empty(rows, config.max_length)
        self._ids[:, : self._start] = prompt
        self._end = self._start
        self._unfinished = torch.ones(rows, dtype=torch.long, device=prompt.device)
        self._needed = self._unfinished.new_zeros(())
        self._has_nan = self._unfinished.new_zeros((), dtype=torch.bool)
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._logits: list[Tensor] | None = [] if config.output_logits else None
        self._interval = interval(prompt.device)

    @property
    def count(self) -> int:
        """Tokens said to each row."""
        return self._end - self._start

    @property
    def last_tokens(self) -> Tensor:
        """The latest tokens (B, 1)."""
        return self._ids[:, self._end - 1 : self._end]

    def extend(self, logits: Tensor) -> bool:
        """Say one more token to each row, from logits (B, V), and return whether all rows are known to have ended."""
        # A copy in fp32, which processors may write to, as in the library's loop.
        logits = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        scores = self._processors(self._ids[:, : self._end], logits)
        if self._logits is not None:
            self._logits.append(logits)
        tokens = self._choose(scores)
        if self._pads:
            pad = self._config._pad_token_tensor.to(tokens.device)
            tokens = tokens * self._unfinished + pad * (1 - self._unfinished)
        self._ids[:, self._end] = tokens
        self._end += 1
        self._needed += self._unfinished.amax()  # 1 until all have ended
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

    @property
    def sampling_failed(self) -> bool:
        """Whether a row had no probabilities to draw from. Cost: waits for the device."""
        return bool(self._has_nan)

    @property
    def needed(self) -> int:
        """Tokens until the last row ended. Cost: waits for the device."""
        return int(self._needed)

    def output(self) -> LoopOutput:
        """Return the answers without what was said behind the end of all rows."""
        ids = self._ids[:, self._start : self._start + self.needed].clone()
        logits = None if self._logits is None else tuple(self._logits[: self.needed])
        return LoopOutput(ids, logits, self.count - 1)
