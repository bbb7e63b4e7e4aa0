"""What is checked of a batch of prompts on its way to a model, and where its tensors go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.harness.errors import UserError
from espalier.harness.models.chat_media import Chat, Media

#: What processors raise on pictures and frames of sizes that they cannot cut up.
UNFIT = (ValueError, ZeroDivisionError)


def refuse_videos(chats: Sequence[Chat], model: str) -> None:
    """Raise UserError for the first chat with a video, for a model that takes images only."""
    for number, chat in enumerate(chats):
        if any(part["type"] == "video" for turn in chat for part in turn["content"]):
            raise UserError(
                f"chat {number} of the batch holds a video; model={model!r} takes images only"
            )


def unfit(where: str, media: Media, processor: Any, model: str, refusal: Exception) -> Exception:
    """Return the error for the pictures and clips of a chat that a processor refuses; without any, what it raised.

    Args:
        where: what the line begins with.
        media: of the chat.
        processor: the model's.
        model: its name.
        refusal: what the processor raised.
    """
    sizes = [
        f"picture {number} ({picture.width}x{picture.height})"
        for number, picture in enumerate(media.pictures)
    ]
    for number, picture in enumerate(media.pictures):
        try:
            processor.image_processor(images=[picture], return_tensors="pt")
        except UNFIT:
            sizes = [sizes[number]]
            break
    else:
        sizes += [
            f"video {number} (frames of {clip.frames.shape[2]}x{clip.frames.shape[1]})"
            for number, clip in enumerate(media.clips)
        ]
    if not sizes:
        return refusal
    words = " ".join(str(refusal).split())
    return UserError(f"{where}{', '.join(sizes)} does not fit model={model!r}: {words}")


def check_context(mask: Tensor, limit: int | None, model: str) -> None:
    """Raise UserError for the first prompt that leaves no room for an answer.

    Args:
        mask: (B, T) attention mask of the prompts.
        limit: tokens of the model's context; None: no limit is known.
        model: its name, for the message.
    """
    if limit is None:
        return
    for number, length in enumerate(mask.sum(1).tolist()):
        if length >= limit:
            raise UserError(
                f"chat {number} of the batch has {length} tokens, model={model!r} takes fewer than {limit}"
            )


def moved(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return a batch on the model's device; floating-point tensors, the pixels, also take its dtype."""
    return {name: _tensor_to(value, device, dtype) for name, value in batch.items()}


def _tensor_to(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)
