"""Refuse input that a model does not accept, before and after its processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.harness.errors import UserError
from espalier.harness.models.chat_media import Chat, Media

#: Exceptions of processors for pictures and frames of unsupported sizes.
UNFIT = (ValueError, ZeroDivisionError)


def refuse_videos(chats: Sequence[Chat], model: str) -> None:
    """Raise UserError for the first chat with a video; for models that take images only."""
    for number, chat in enumerate(chats):
        if any(part["type"] == "video" for turn in chat for part in turn["content"]):
            raise UserError(
                f"chat {number} of the batch holds a video; model={model!r} takes images only"
            )


def refuse_mixed(
    pictures: Sequence[Sequence[Any]], clips: Sequence[Sequence[Any]], class_name: str, model: str
) -> None:
    """Raise UserError for a batch of pictures and videos; for classes with one placeholder for both."""
    if any(pictures) and any(clips):
        raise UserError(
            f"pictures and videos in one batch: {class_name} of model={model!r} has one "
            "placeholder for both and refuses them; valid: engine.batch_size=1, and one kind in a chat"
        )


def refusal_error(
    where: str, media: Media, processor: Any, model: str, refusal: Exception
) -> Exception:
    """Return the error line for the media of a chat that a processor refuses; `refusal` itself if there are no media.

    Args:
        where: start of the line.
        media: media of the chat.
        processor: processor of the model.
        model: name of the model.
        refusal: exception of the processor.
    """
    sizes = [
        f"picture {number} ({picture.width}x{picture.height})"
        for number, picture in enumerate(media.pictures)
    ]
    words = " ".join(str(refusal).split())
    for number, picture in enumerate(media.pictures):
        try:
            processor.image_processor(images=[picture], return_tensors="pt")
        except UNFIT:
            sizes = [sizes[number]]
            break
    else:
        if sizes and not media.clips:
            return UserError(
                f"{where}the processor of model={model!r} takes {', '.join(sizes)} alone, and not in a list with the "
                f"prompt: {words}"
            )
        sizes += [
            f"video {number} (frames of {clip.frames.shape[2]}x{clip.frames.shape[1]})"
            for number, clip in enumerate(media.clips)
        ]
    if not sizes:
        return refusal
    return UserError(f"{where}{', '.join(sizes)} does not fit model={model!r}: {words}")


def check_context(mask: Tensor, limit: int | None, model: str) -> None:
    """Raise UserError for the first prompt that fills the model's context.

    Args:
        mask: (B, T) attention mask of the prompts.
        limit: length of the model's context in tokens; None: unknown.
        model: name of the model.
    """
    if limit is None:
        return
    for number, length in enumerate(mask.sum(1).tolist()):
        if length >= limit:
            raise UserError(
                f"chat {number} of the batch has {length} tokens, model={model!r} takes fewer than {limit}"
            )


def special_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[str, bool]:
    """Return the option of a tokenizer for prompts: it adds no special tokens to those that begin with the begin token.

    This is the rule of the library's `processor.apply_chat_template(tokenize=True)`.

    Raises:
        UserError: only some of the prompts begin with it, and one call tokenises all of them.
    """
    begin = tokenizer.bos_token
    begun = {begin is not None and text.startswith(begin) for text in texts}
    if len(begun) > 1:
        raise UserError(
            f"some prompts of a batch begin with {begin!r} and others do not; valid: engine.batch_size=1"
        )
    return {"add_special_tokens": False} if True in begun else {}


def tensor_to(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a value on a device; floating-point tensors, the pixels, also take the dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)
