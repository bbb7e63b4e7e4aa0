"""Exports the video models and checks the recipe's targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.harness.seedling.video.clip_benchmarks import caption_score, conclusion, digits_score
from espalier.harness.seedling.video.events import WORDS, encode
from espalier.harness.seedling.vocabulary import ASSISTANT, EOS
from lab.training.clip_features import ClipTokens, ShownTokens, see, show, taken, visual_tokens
from lab.training.dialogue_packs import PREFIX
from lab.training.release_stage import LOG, load_exported, merged_log, record_sums
from lab.training.stage_runtime import load_checkpoint
from lab.training.tower_stage import tower_of
from lab.training.video_draft_stage import DRAFT_CHECKPOINT
from lab.training.video_drills import Talk, talks_about
from lab.training.video_model import (
    build_video_model,
    save_video_model,
    video_weights_dir,
)
from lab.training.video_stage import CHECKPOINT, TOP_CHECKPOINT

SOURCES = (
    ("seedling_video", CHECKPOINT, "video"),
    ("seedling_video", TOP_CHECKPOINT, "video_top"),
    ("seedling_video_draft", DRAFT_CHECKPOINT, "video_draft"),
)
SHORT = ("what", "where", "how_many", "order", "when")


def export_video(recipe: dict[str, Any], out: Path, unfinished: bool = False) -> None:
    """Writes the trained video models to the package's weights folder, with checksums and the log.

    Models with a missing checkpoint, or an unfinished one that was not requested, keep their present files.

    Args:
        recipe: The whole recipe.
        out: Run folder.
        unfinished: Whether to use checkpoints from before the stage's last step too.
    """
    for name, file, stage in SOURCES:
        state = load_checkpoint(out / file)
        if state is None or not (unfinished or state["step"] == recipe[stage]["steps"]):
            continue
        model = build_video_model(name)
        model.load_state_dict(state["model"])
        save_video_model(model, video_weights_dir(name))
        record_sums()
        LOG.write_text(merged_log(LOG, out / "log.jsonl"), encoding="utf-8")


class ClipReader:
    """One clip processed by a video model, for any number of questions.

    Args:
        model: A video model with ordinary attention.
        shown_tokens: The visual tokens of one clip.
    """

    @torch.no_grad()
    def __init__(self, model: Any, shown_tokens: ShownTokens) -> None:
        """Runs the model over the clip. For long clips this is most of the cost of an answer."""
        # transformers takes half a second to import, and most of this file does not need it.
        from transformers import DynamicCache

        self._model, self._shown = model, shown_tokens
        language = model.model.language_model
        self._cache = DynamicCache(config=language.config)
        parts = [
            language.embed_tokens(torch.tensor([PREFIX])),
            visual_tokens(model, shown_tokens),
            model.model.image_newline[None, None],
        ]
        places = [
            torch.arange(len(PREFIX))[None],
            shown_tokens.positions,
            torch.tensor([[shown_tokens.end]]),
        ]
        self._run(torch.cat(parts, dim=1), torch.cat(places, dim=1))
        self._length = self._cache.get_seq_length()

    @torch.no_grad()
    def answer(self, question: str, room: int) -> list[int]:
        """Answers a question word by word.

        Args:
            question: Its words.
            room: Maximum words of the answer.

        Returns:
            Token ids, including ``<eos>`` if generated.
        """
        if asked_before := self._cache.get_seq_length() - self._length:
            self._cache.crop(-asked_before)
        embed = self._model.model.language_model.embed_tokens
        ids = torch.tensor([[*encode(question), ASSISTANT]])
        rows = embed(ids)
        positions = self._shown.end + 1 + torch.arange(ids.shape[1])[None]
        answer: list[int] = []
        while len(answer) < room:
            hidden = self._run(rows, positions)
            answer.append(int(self._model.lm_head(hidden[:, -1]).argmax()))
            if answer[-1] == EOS:
                break
            rows, positions = embed(torch.tensor([answer[-1:]])), positions[:, -1:] + 1
        return answer

    def _run(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._model.model.language_model(
            inputs_embeds=rows,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return output


def _text(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens if token != EOS)


def _score(talk: Talk, answer: str, clip: ClipTokens) -> float:
    if talk.family == "caption":
        return caption_score(answer, clip.clip.events)["events_right"]
    if talk.family == "digits":
        return digits_score(answer, talk.answer)
    return float(conclusion(talk.family, answer) == conclusion(talk.family, talk.answer))


def measure_video(model: Any, plan: dict[str, Any], split: str, frames: int) -> dict[str, float]:
    """Returns the mean score of each family over clips of one length, all tokens shown."""
    scores: dict[str, list[float]] = {}
    for index in range(plan["clips"][frames]):
        clip = see(tower_of(model), split, 1, index, frames)
        watched = ClipReader(model, _all(clip))
        for talk in talks_about(clip.clip, 0, plan["questions"], 0):
            room = len(encode(talk.answer)) + plan["spare"]
            answer = _text(watched.answer(talk.question, room))
            scores.setdefault(talk.family, []).append(_score(talk, answer, clip))
    means = {family: float(np.mean(values)) for family, values in scores.items()}
    means["questions"] = float(np.mean([means[family] for family in SHORT]))
    return means


def accepted(
    target: Any, draft: Any, plan: dict[str, Any], split: str, frames: int, keep: float
) -> float:
    """Returns the share of the target's greedy caption words that the draft predicts from the words before.

    Args:
        target: Sees all tokens.
        draft: Sees a share of them.
        plan: The recipe's "gate_video".
        split: "val" or "test".
        frames: T of the clips.
        keep: Share of evenly spaced tokens that the draft sees.
    """
    right = total = 0
    for index in range(plan["drafted"][frames]):
        clip = see(tower_of(target), split, 2, index, frames)
        every_token = _all(clip)
        (talk,) = talks_about(clip.clip, 0, {"caption": 1}, 0)
        room = len(encode(talk.answer)) + plan["spare"]
        answer = ClipReader(target, every_token).answer(talk.question, room)
        few = every_token if keep == 1 else spread(clip, keep)
        predicted = led(draft, few, talk.question, answer)
        right += sum(
            word == target_word for word, target_word in zip(predicted, answer, strict=True)
        )
        total += len(answer)
    return right / total


@torch.no_grad()
def led(model: Any, shown_tokens: ShownTokens, question: str, answer: list[int]) -> list[int]:
    """Returns the model's most likely word at each position of an answer, given the words before it.

    Args:
        model: A video model with ordinary attention.
        shown_tokens: The visual tokens of one clip that it sees.
        question: Words.
        answer: Token ids.
    """
    language = model.model.language_model
    words = [*encode(question), ASSISTANT, *answer[:-1]]
    embed = language.embed_tokens
    newline = model.model.image_newline[None, None]
    text = embed(torch.tensor([words]))
    rows = [embed(torch.tensor([PREFIX])), visual_tokens(model, shown_tokens), newline, text]
    after = shown_tokens.end + torch.arange(len(words) + 1)
    places = [torch.arange(len(PREFIX))[None], shown_tokens.positions, after[None]]
    inputs = torch.cat(rows, dim=1)
    # Without a mask, transformers treats position gaps as borders between separate packed sequences.
    hidden = language(
        inputs_embeds=inputs,
        attention_mask=torch.ones(inputs.shape[:2], dtype=torch.long),
        position_ids=torch.cat(places, dim=1),
        use_cache=False,
    ).last_hidden_state
    predicted: list[int] = model.lm_head(hidden[0, -len(answer) :]).argmax(-1).tolist()
    return predicted


def _all(clip: ClipTokens) -> ShownTokens:
    return show([clip], len(clip.owner), 0.0, np.random.default_rng(0))


def spread(clip: ClipTokens, keep: float) -> ShownTokens:
    """Returns a share of a clip's tokens, evenly spaced, at their original positions."""
    total = len(clip.owner)
    chosen = np.linspace(0, total - 1, round(keep * total)).round().astype(np.int64)[None]
    features = None if clip.features is None else taken(clip.features[None], chosen)
    return ShownTokens(chosen, features, 0, len(clip.clip.frames))


def gate_video(recipe: dict[str, Any], split: str = "val") -> None:
    """Measures the shipped video models into ``weights/gate_video_SPLIT.json``.

    Args:
        recipe: The whole recipe.
        split: "val" while developing; "test" once, at the end.

    Raises:
        SystemExit: If a target of the recipe is missed.
    """
    plan = recipe["gate_video"]
    target = load_exported(video_weights_dir("seedling_video"))
    results: dict[str, dict[str, float]] = {
        f"{frames} frames": measure_video(target, plan, split, frames) for frames in plan["clips"]
    }
    if (video_weights_dir("seedling_video_draft") / "model.safetensors").exists():
        draft = load_exported(video_weights_dir("seedling_video_draft"))
        for frames in plan["drafted"]:
            results[f"draft, {frames} frames"] = {
                name: accepted(target, draft, plan, split, frames, keep)
                for name, keep in (("accepted", 1.0), ("accepted_tenth", 0.1))
            }
    path = video_weights_dir().parent / f"gate_video_{split}.json"
    rounded = {s: {n: round(v, 4) for n, v in scores.items()} for s, scores in results.items()}
    path.write_text(json.dumps(rounded, separators=(",", ":")) + "\n", encoding="utf-8")
    missed = [
        f"{setting} {name} {scores[name]:.3f} < {wanted}"
        for setting, scores in results.items()
        for name, wanted in plan["targets"].items()
        if name in scores and scores[name] < wanted
    ]
    if missed:
        raise SystemExit(f"the video models miss their targets on {split}: {'; '.join(missed)}")
