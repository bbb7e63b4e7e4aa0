"""The generator of answers that another engine computes, with a record for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.positions import closes_gaps
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.errors import UserError
from espalier.harness.kinds.kind import OpenMethod, params_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.runs.served.served_chats import ServedCodec, ServedPrompt
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import TokenReducer
from espalier.serve.setting import Setting

#: Settings of `generate`, and their names in vLLM's `SamplingParams`.
SAMPLING: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}

#: Settings of `generate` that have no effect at these values.
IDLE = (("num_beams", 1), ("use_cache", True), ("do_sample", False), ("do_sample", True))


class Engine(Protocol):
    """Answers requests, in a process of this program or in a server."""

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers of requests, which run together; raises UserError or EngineEnded."""


class WrongPrompt(RuntimeError):
    """The engine read another number of tokens than the method keeps: it has no plug-in, or another processor."""


@contextmanager
def open_served(
    spec: AnswerRequest,
    adapter: Adapter,
    method: TokenReducer,
    engine: Engine,
    built_in: bool = False,
) -> Iterator[OpenMethod]:
    """Yield the generator and the codec of a run that another engine answers, pruned by its own code if `built_in`."""
    codec = ServedCodec(adapter)
    yield OpenMethod(ServedGenerator(spec, adapter, method, engine, built_in), codec)


def setting_of(spec: AnswerRequest, method: TokenReducer) -> Setting:
    """Return the setting by which the engine prunes each picture and video."""
    facts = spec.model.facts
    if not method.all_sites(facts.tower.layers, facts.text.layers):
        return Setting(seed=spec.seed)
    renumbered = closes_gaps(spec.engine.positions, method, facts)
    return Setting(
        method=spec.method.name,
        params=params_of(method),
        ratio=spec.budget.ratio if spec.budget.count is None else 0.0,
        keep=spec.budget.count,
        positions="renumbered" if renumbered else "original",
        seed=spec.seed,
    )


def kept_of(setting: Setting, budget: Budget, count: int) -> int:
    """Return how many of an item's `count` visual tokens stay; vLLM's own code rounds down."""
    return max(1, int(count * (1 - budget.ratio))) if budget.down else setting.kept(count)


@dataclass(frozen=True)
class ServedGenerator:
    """Sends batches to an engine."""

    spec: AnswerRequest
    adapter: Adapter
    method: TokenReducer
    engine: Engine
    built_in: bool = False

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> GeneratedBatch:
        """Answer one batch of prompts.

        Raises:
            UserError: the engine refuses a prompt, or lacks a generation setting.
            WrongPrompt: it read another number of tokens than expected.
            EngineEnded: it has ended.
        """
        prompts: Sequence[ServedPrompt] = inputs["prompts"]
        setting = setting_of(self.spec, self.method)
        sampling = sampling_of(generation, self.spec.seed, self.adapter.end_ids)
        answers = self.engine.ask(
            [
                {
                    "words": prompt.words,
                    "prompt": prompt.ids,
                    "adds_special": prompt.adds_special,
                    "media": prompt.media,
                    **({} if self.built_in else {"setting": {**setting.values, "sample": sample}}),
                    "sampling": sampling,
                }
                for prompt, sample in zip(prompts, samples, strict=True)
            ]
        )
        rows = zip(prompts, samples, answers, strict=True)
        records = tuple(self._record(setting, *row) for row in rows)
        width = max(len(answer["ids"]) for answer in answers)
        pad = self.adapter.pad_id
        ids = torch.full((len(answers), width), pad)
        for row, answer in enumerate(answers):
            ids[row, : len(answer["ids"])] = torch.tensor(answer["ids"])
        return GeneratedBatch(ids=ids, records=records)

    def _record(
        self, setting: Setting, prompt: ServedPrompt, sample: str, answer: Mapping[str, Any]
    ) -> SampleRecord:
        facts, visual = self.adapter.facts, sum(prompt.visual)
        kept = sum(kept_of(setting, self.spec.budget, count) for count in prompt.visual)
        if self.built_in and answer["prompt"] > prompt.text + kept:
            raise UserError(
                f"backend.pruning='vllm': {setting.method} kept {answer['prompt'] - prompt.text} of {visual} visual "
                f"tokens of sample {sample}, ratio={self.spec.budget.ratio:g} leaves {kept}; valid: a smaller ratio"
            )
        if answer["prompt"] != prompt.text + kept:
            raise WrongPrompt(
                f"the engine read {answer['prompt']} tokens of sample {sample}, {prompt.text} of text and {kept} of "
                f"{visual} visual ones were expected"
            )
        text = facts.text
        entries = kept * text.layers
        entry = 2 * text.kv_heads * text.head_dim * getattr(torch, self.spec.model.dtype).itemsize
        sites = self.method.all_sites(facts.tower.layers, text.layers)
        # The methods of the projector's input merge there, unless tokens mix its units.
        features = any(site.where == "vision" for site in sites) and not prompt.blended
        work = prompt.work._replace(reprojected=kept if features and kept < visual else 0)
        return SampleRecord(
            sample=sample,
            visual=visual,
            text=prompt.text,
            special=prompt.special,
            work=work,
            items=prompt.visual,
            requested=(kept,) if sites else (),
            kept=(kept,) if sites else (),
            entering=(kept,) * text.layers,
            kv_entries=entries,
            kv_bytes=answer["prompt"] * text.layers * entry,
            new_tokens=len(answer["ids"]),
            ended=answer["ended"],
        )


def sampling_of(generation: Mapping[str, Any], seed: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`; of itself it would also end at the tokenizer's end token.

    Raises:
        UserError: a setting that it does not have.
    """
    for name, value in generation.items():
        if name not in SAMPLING and (name, value) not in IDLE:
            raise UserError(
                f"generation.{name}={value!r} has no counterpart in backend=vllm; valid: {', '.join(SAMPLING)}"
            )
    given = {SAMPLING[n]: value for n, value in generation.items() if n in SAMPLING}
    if not generation.get("do_sample"):
        given["temperature"] = 0.0
    return {**given, "seed": seed, "stop_token_ids": list(end_ids), "ignore_eos": True}
