"""The generator of answers that another engine computes: chats as it takes them, and a record for each sample."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import Work
from espalier.harness.engine.engine_guards import closes_gaps
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.errors import UserError
from espalier.harness.kinds.kind import params_of
from espalier.harness.models.adapter import Adapter, special_tokens
from espalier.harness.models.chat_media import Chat, Media
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import TokenReducer
from espalier.serve.setting import Setting


@dataclass(frozen=True)
class ServedPrompt:
    """One prompt.

    Attributes:
        words: the rendered text, with placeholders.
        ids: its token ids, one placeholder for each picture or video.
        adds_special: whether the tokenizer adds special tokens to the text.
        media: pictures and videos, ready for JSON.
        visual: visual tokens that a method may drop, of each picture or video.
        text: other tokens of the whole prompt.
        special: newline and separator tokens among them.
        work: cost before the decoder.
        blended: whether a visual token mixes several units of the projector.
    """

    words: str
    ids: tuple[int, ...]
    adds_special: bool
    media: tuple[Mapping[str, Any], ...]
    visual: tuple[int, ...]
    text: int
    special: int
    work: Work
    blended: bool


def served_prompts(adapter: Adapter, chats: Sequence[Chat]) -> Mapping[str, Any]:
    """Return the prompts of chats, for which a model's adapter needs no weights.

    Raises:
        UserError: as in `Adapter.prepare`, or videos that cannot be counted one by one.
    """
    return {"prompts": [served_prompt(adapter, chat) for chat in chats]}


def served_prompt(adapter: Adapter, chat: Chat) -> ServedPrompt:
    """Return the prompt of one chat; the model's processor runs, for the counts that the engine must agree with."""
    if not adapter.data.takes_video and any(
        part["type"] == "video" for turn in chat for part in turn["content"]
    ):
        raise UserError(f"a chat holds a video; model={adapter.spec.name!r} takes images only")
    media = adapter.load_media(chat, 0, adapter.spec.media == "required")
    text = adapter.prompt_text(chat, media)
    layout = adapter.layout(adapter.process_batch([text], [media]))
    items = np.bincount(layout.picture[0, : layout.counts[0]]).tolist() if layout.counts[0] else []
    number = len(media.pictures) + len(media.clips)
    if number == 1 and items:
        items = [sum(items)]  # InternVL counts a video frame by frame
    if len(items) != number:
        raise UserError(
            f"backend=vllm: {number} pictures and videos of a prompt have {len(items)} parts; valid: one video a prompt"
        )
    tokenizer = adapter.processor.tokenizer
    options = special_tokens(tokenizer, [text])
    return ServedPrompt(
        words=text,
        ids=tuple(tokenizer(text, **options)["input_ids"]),
        adds_special=options.get("add_special_tokens", True),
        media=tuple(encoded_media(media)),
        visual=tuple(items),
        text=layout.text[0],
        special=layout.special[0],
        work=layout.work[0],
        blended=layout.blended[0],
    )


def encoded_media(media: Media) -> list[dict[str, Any]]:
    """Return pictures as PNG and the frames of videos as arrays, in base 64."""
    parts: list[dict[str, Any]] = []
    for picture in media.pictures:
        content = io.BytesIO()
        picture.save(content, "PNG", compress_level=1)
        parts.append({"kind": "image", "data": _text(content)})
    for clip in media.clips:
        content = io.BytesIO()
        np.save(content, clip.frames, allow_pickle=False)
        times: dict[str, Any] = {
            "fps": clip.fps,
            "frames_indices": list(clip.indices),
            "total_num_frames": clip.total_frames,
            "duration": clip.duration,
            "video_backend": "espalier",
            "do_sample_frames": False,
        }
        parts.append({"kind": "video", "data": _text(content), "metadata": times})
    return parts


def _text(content: io.BytesIO) -> str:
    return base64.b64encode(content.getvalue()).decode("ascii")


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
        ids = pad_sequence(
            [torch.tensor(answer["ids"], dtype=torch.long) for answer in answers],
            batch_first=True,
            padding_value=self.adapter.pad_id,
        )
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
        features = any(site.on_features for site in sites) and not prompt.blended
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
    sampling = {SAMPLING[n]: value for n, value in generation.items() if n in SAMPLING}
    if not generation.get("do_sample"):
        sampling["temperature"] = 0.0
    if {"min_tokens", "max_tokens"} <= sampling.keys():
        # vLLM refuses a least length above the greatest one; `generate` stops at the greatest.
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
    return {**sampling, "seed": seed, "stop_token_ids": list(end_ids), "ignore_eos": True}
