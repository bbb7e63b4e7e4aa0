"""How far answers of a reduced model agree with the full model, by an acceptance test of each token.

An answer is fed to the unreduced model by teacher forcing, so each token is judged after the tokens that the reduced
model really generated before it. Two figures: `greedy`, whether the token is the full model's likeliest, and
`sampling`, the probability with which speculative sampling keeps it: min(1, p/q) with q = 1, since the token was chosen
outright (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from espalier.harness.cost.clock import Clock
from espalier.harness.kinds.kind import Generator

if TYPE_CHECKING:
    from espalier.harness.engine.record import GeneratedBatch, SampleRecord
    from espalier.harness.models.adapter import Adapter

#: Phase of `SampleRecord.times_ms`.
PHASE = "rescore"


@dataclass(frozen=True)
class Judged:
    """The judgement of the full model on each token of (B, T) answers; values after an answer's end mean nothing.

    Attributes:
        stands: (B, T) whether the token is the likeliest; ties go to the lowest id.
        chance: (B, T) its probability, fp32.
        gap: (B, T) by how much the likeliest token's score exceeds its own, in logits.
    """

    stands: Tensor
    chance: Tensor
    gap: Tensor

    def accepted(self, lengths: Sequence[int]) -> list[dict[str, float | None]]:
        """Return `SampleRecord.accepted` of each row, from its first `lengths` tokens."""
        accepted: list[dict[str, float | None]] = []
        tables = self.stands.tolist(), self.chance.tolist(), self.gap.tolist()
        for stands, chance, gap, length in zip(*tables, lengths, strict=True):
            refused = [place for place, stays in enumerate(stands[:length]) if not stays]
            # A token that the settings rule out for the full model (top_k, top_p) has no gap.
            gaps = [gap[place] for place in refused if gap[place] < float("inf")]
            accepted.append(
                {
                    "greedy": sum(stands[:length]),
                    "sampling": sum(chance[:length]),
                    "first_refusal": refused[0] if refused else None,
                    "gap": max(gaps, default=None),
                }
            )
        return accepted


class Rescored:
    """Generates with `inner`, then judges every answer by the full model.

    The time of judging is a separate phase of the records; nothing else in them changes.

    Args:
        adapter: the model, unreduced whenever `inner` is not generating.
        inner: generates the answers.
    """

    def __init__(self, adapter: Adapter, inner: Generator) -> None:
        self._adapter = adapter
        self._inner = inner

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str] | None = None, **generation: Any
    ) -> GeneratedBatch:
        """Return the answers of `inner`; their records count the tokens that the full model accepts.

        Cost: one prefill of the full prompt and one pass over the longest answer, with the full cache.
        """
        names = samples or [str(row) for row in range(len(inputs["attention_mask"]))]
        generated = self._inner.generate(inputs, names, **generation)
        clock = Clock(*self._adapter.devices)
        with clock.phase(PHASE):
            judged = judge(
                self._adapter, inputs, generated.ids.to(inputs["input_ids"].device), **generation
            )
        took = clock.totals_ms()[PHASE] / len(generated.records)
        accepted_counts = judged.accepted([record.new_tokens for record in generated.records])
        records = tuple(
            replace(record, accepted=accepted, times_ms={**record.times_ms, PHASE: took})
            for record, accepted in zip(generated.records, accepted_counts, strict=True)
        )
        return replace(generated, records=records)


@torch.inference_mode()
def judge(adapter: Adapter, inputs: Mapping[str, Any], ids: Tensor, **generation: Any) -> Judged:
    """Judge answers `ids` (B, T), padded on the right, to the prompts `inputs` under the full model.

    Scores go through the logits processors of `generation`, as in `generate`. The prompt runs as in `generate`, then
    the answers in one pass; logits are (B, V), one position of the answers after the other.
    """

    def score(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **arguments: Any,
    ) -> Judged:
        del stopping_criteria, generation_config
        prompt = model(
            **model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **arguments)
        )
        hidden = _run_answers(
            adapter, inputs["attention_mask"], arguments["position_ids"], ids, prompt
        )
        head, length = model.get_output_embeddings(), input_ids.shape[1]
        tokens = torch.cat([input_ids, ids], 1)
        stands, chance, gap = [], [], []
        for place in range(ids.shape[1]):
            logits = prompt.logits[:, -1] if place == 0 else head(hidden[:, place - 1])
            # A copy in single precision, as `generate` makes one: processors may write into it.
            logits = logits.to(ids.device, torch.float32, copy=True)
            scores = logits_processor(tokens[:, : length + place], logits)
            token = ids[:, place : place + 1]
            score_of_token = scores.gather(1, token).squeeze(1)
            stands.append(scores.argmax(1) == token.squeeze(1))
            chance.append(scores.softmax(1).gather(1, token).squeeze(1))
            gap.append(scores.amax(1) - score_of_token)
        return Judged(torch.stack(stands, 1), torch.stack(chance, 1), torch.stack(gap, 1))

    # Beam search is a way to search; the judging model has one distribution.
    settings = {**generation, "num_beams": 1}
    return cast("Judged", adapter.model.generate(**inputs, **settings, custom_generate=score))


def _run_answers(
    adapter: Adapter, mask: Tensor, positions: Tensor, ids: Tensor, prompt: Any
) -> Tensor:
    """Run all but the last tokens of (B, T) answers after a prompt; return their hidden states (B, T - 1, D).

    The decoder is called directly, as in a decoding step: an answer may hold the id of an image placeholder, which
    does not represent an image there.
    """
    fed = ids[:, :-1]
    if fed.shape[1] == 0:
        return cast("Tensor", prompt.logits[:, :0])
    # Positions of text increase by one on all axes; no counted token attends to positions after an answer's end.
    following = positions[..., -1:] + 1 + torch.arange(fed.shape[1], device=positions.device)
    output = adapter.decoder(
        inputs_embeds=adapter.model.get_input_embeddings()(fed),
        attention_mask=torch.cat([mask, mask.new_ones(fed.shape)], 1),
        position_ids=following,
        past_key_values=prompt.past_key_values,
        use_cache=True,
    )
    return cast("Tensor", output.last_hidden_state)


def acceptance(records: Sequence[SampleRecord]) -> dict[str, Any] | None:
    """Return the block `acceptance` of a row; None if the answers were not judged.

    `greedy` and `sampling` are shares of all tokens of the set, those with `_per_answer` are means of the shares of
    each answer. `untouched` is the share of answers without a refused token, `first_refusal` the mean position, from 0,
    in the others, and `widest_gap` the largest distance in logits between a refused token and the likeliest: rounding
    alone causes tiny ones.
    """
    judged = [(entry.accepted, entry) for entry in records if entry.accepted is not None]
    if not judged:
        return None
    tokens = sum(record.new_tokens for _, record in judged)
    row: dict[str, Any] = {"tokens": tokens}
    for figure in ("greedy", "sampling"):
        counts = [accepted[figure] or 0.0 for accepted, _ in judged]
        shares = [
            count / record.new_tokens for count, (_, record) in zip(counts, judged, strict=True)
        ]
        row |= {figure: sum(counts) / tokens, f"{figure}_per_answer": fmean(shares)}
    first = _values_of(judged, "first_refusal")
    return row | {
        "untouched": 1 - len(first) / len(judged),
        "first_refusal": fmean(first) if first else None,
        "widest_gap": max(_values_of(judged, "gap"), default=None),
        "rescore_ms": median(record.times_ms[PHASE] for _, record in judged),
    }


def _values_of(
    judged: Sequence[tuple[Mapping[str, float | None], SampleRecord]], name: str
) -> list[float]:
    return [value for accepted, _ in judged if (value := accepted[name]) is not None]
