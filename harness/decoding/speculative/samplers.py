"""Rows from a model's logits, exactly as its own `generate` would process them.

The settings are resolved once, on the target, and used for both sides, so that the draft predicts the target's output
after its processors and warpers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as library

from espalier.harness.decoding.speculative.drafts import (
    Greedy,
    RandomNumbers,
    Row,
    Rule,
    Sampling,
    draw_from,
)
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.errors import UserError
from espalier.harness.specs.generation import check_generation

#: Processors that do not read earlier tokens; all positions of a window are processed at once.
STATELESS = (
    library.TemperatureLogitsWarper,
    library.TopKLogitsWarper,
    library.TopPLogitsWarper,
    library.MinPLogitsWarper,
    library.TypicalLogitsWarper,
    library.EpsilonLogitsWarper,
    library.EtaLogitsWarper,
    library.InfNanRemoveLogitsProcessor,
    library.SuppressTokensLogitsProcessor,
    library.LogitNormalization,
)

#: Settings that the loop does not support, with the reason.
_REFUSED: Mapping[str, str] = {
    "stop_strings": "answers end at end tokens and at their limit",
    "max_time": "an answer that depends on the clock cannot be compared",
    "penalty_alpha": "contrastive search looks ahead at each step",
    "dola_layers": "contrasting layers reads hidden states at each step",
    "constraints": "constrained search needs beams",
    "force_words_ids": "constrained search needs beams",
    "watermarking_config": "a watermark depends on earlier steps",
    "assistant_early_exit": "the method itself defines the draft",
    "use_mtp": "the method itself defines the draft",
    "token_healing": "it changes the prompt after the visual tokens were read off it",
    "output_attentions": "windows are not steps",
    "output_hidden_states": "windows are not steps",
    "output_scores": "windows are not steps",
    "output_logits": "windows are not steps",
}


def resolved_config(adapter: ModelParts, settings: Mapping[str, Any]) -> GenerationConfig:
    """Return the model's generation settings updated with `settings`, as `generate` resolves them; it can be pickled.

    Raises:
        UserError: a setting, of the call or of the checkpoint, that a loop over windows does not support, an unknown
            one, or a value that the library refuses; no `max_new_tokens`.
    """
    check_generation(settings)
    try:
        config, unknown = adapter.model._prepare_generation_config(None, **settings)
    except ValueError as error:  # the library's own checks of single values
        raise UserError(
            f"generation={dict(settings)!r} is refused by generate(): {' '.join(str(error).split())}"
        ) from error
    values = vars(config)
    check_generation(values)
    for name in unknown:
        if name not in _REFUSED:
            raise UserError(f"generation.{name}={unknown[name]!r} is not a generation setting")
    for name, reason in _REFUSED.items():
        value = values.get(name)
        if value is not None and value is not False:
            raise UserError(
                f"generation.{name}={value!r} is not supported by speculative decoding: {reason}; valid: null"
            )
    if (config.num_beams or 1) > 1:
        raise UserError(
            f"generation.num_beams={config.num_beams} is not supported by speculative decoding; valid: 1"
        )
    if config.max_new_tokens is None:
        raise UserError("generation.max_new_tokens=None sets no limit; valid: 1 or more")
    return cast("GenerationConfig", config)


def rule_of(config: GenerationConfig, numbers: RandomNumbers) -> Rule:
    """Return the acceptance rule of a configuration."""
    return Sampling(numbers) if config.do_sample else Greedy()


def limit_of(config: GenerationConfig) -> int:
    """Return the maximum number of tokens of an answer."""
    return int(config.max_new_tokens)


@dataclass(frozen=True)
class TokenSampler:
    """Turns the logits of one side into tokens of an answer to one prompt.

    Attributes:
        prompt: (1, L) ids that processors see before the answer.
        processors: the model's own, warpers included.
        samples: whether rows are probabilities instead of the likeliest ids.
        common: choose only from this many first ids; None: all. For drafts with a larger vocabulary than the target's.
        numbers: random numbers of a sampling draft; None for a side that does not draft.
    """

    prompt: Tensor
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    samples: bool = False
    common: int | None = None
    numbers: RandomNumbers | None = None

    @property
    def reads_past(self) -> bool:
        """Whether processors depend on earlier tokens."""
        return any(not isinstance(processor, STATELESS) for processor in self.processors)

    def scores(self, logits: Tensor, pasts: Sequence[Tensor]) -> Tensor:
        """Return (t, V) logits (t, V) after the processors, in fp32 as in `generate`.

        `pasts` holds the answer (n,) before each of the t positions; it is only read, position by position, if
        processors look back.
        """
        scores = logits.to(torch.float32, copy=True)
        if self.common is not None:
            scores[:, self.common :] = float("-inf")
        if not self.reads_past:
            return self._processed(self.prompt, scores)
        processed = [
            self._processed(torch.cat([self.prompt[0], past])[None], row[None])
            for past, row in zip(pasts, scores, strict=True)
        ]
        return torch.cat(processed)

    def _processed(self, ids: Tensor, scores: Tensor) -> Tensor:
        return self.processors(cast("torch.LongTensor", ids), cast("torch.FloatTensor", scores))

    def rows(self, logits: Tensor, pasts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return t rows: ids () of a greedy side, probabilities (V,) of a sampling one."""
        if not self.samples and not self.processors:
            # They are not modified, so logits in fp32 need no copy.
            return logits[:, : self.common].float().argmax(-1).unbind()
        scores = self.scores(logits, pasts)
        if not self.samples:
            return scores.argmax(-1).unbind()
        return scores.softmax(-1)[:, : self.common].unbind()

    def pick(self, row: Row, position: int) -> Tensor:
        """Return () the id that a draft chooses at `position` of the answer, without synchronizing.

        Raises:
            ValueError: a side that samples without random numbers.
        """
        if not self.samples:
            return torch.as_tensor(row, device=self.prompt.device)
        if self.numbers is None or isinstance(row, int):
            raise ValueError("a side that samples needs random numbers to draft with")
        return draw_from(row, self.numbers.uniform(position, "draft"))

    def best(self, logits: Tensor, pasts: Sequence[Tensor], count: int) -> Tensor:
        """Return (t, count) the likeliest ids, most probable first."""
        return self.scores(logits, pasts).topk(count, dim=-1).indices


def sampler_of(
    adapter: ModelParts,
    config: GenerationConfig,
    prompt: Tensor,
    common: int | None = None,
    numbers: RandomNumbers | None = None,
) -> TokenSampler:
    """Return the sampler of a model under settings resolved by `resolved_config`.

    Args:
        adapter: the model.
        config: resolved on the target; not changed.
        prompt: (1, L) the target's prompt.
        common: as in `TokenSampler`; must be None for the target, else its distribution changes.
        numbers: as in `TokenSampler`.
    """
    model, resolved = adapter.model, deepcopy(config)
    prompt = prompt.to(adapter.device)
    length = prompt.shape[1]
    model._prepare_special_tokens(resolved, True, device=adapter.device)
    resolved.max_length = length + limit_of(config)
    if resolved.min_new_tokens is not None:
        resolved.min_length = length + resolved.min_new_tokens
    processors = model._get_logits_processor(
        generation_config=resolved,
        input_ids_seq_length=length,
        encoder_input_ids=prompt,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device=adapter.device,
    )
    return TokenSampler(prompt, processors, bool(config.do_sample), common, numbers)
