"""LLaVA-Video, which transformers lacks: LLaVA-OneVision's modules, a newline token after each row of each frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, cast

from torch import Tensor

from espalier.harness.errors import unknown_name
from espalier.harness.media.frame_rules import each_second
from espalier.harness.media.frames import Clip
from espalier.harness.models.architectures.llava_releases import (
    POOLINGS,
    QWEN2_FIXED,
    LlavaVideoConfig,
    LlavaVideoForConditionalGeneration,
    LlavaVideoProcessor,
    ReleasedAdapter,
)
from espalier.harness.models.chat_media import Chat, Media
from espalier.harness.models.llava_onevision import LlavaOnevisionAdapter
from espalier.harness.settings import By, OneOf
from espalier.harness.specs.run_spec import ModelSpec


def read_instruction(key: str, value: Any) -> Any:
    """Return a name of TIMES.

    Raises:
        UserError: it is none.
    """
    if value not in TIMES:
        raise unknown_name(key, str(value), [str(name).lower() for name in TIMES])
    return value


class LlavaVideoAdapter(ReleasedAdapter):
    """`LlavaVideoForConditionalGeneration`.

    `model.processor.time_instruction`, one of TIMES, adds the times of frames to the prompt; `video_pooling`, one of
    POOLINGS, sets the pooling of frames, which is not a property of the weights.
    """

    data = replace(
        LlavaOnevisionAdapter.data,
        model_class=LlavaVideoForConditionalGeneration,
        types=(
            LlavaVideoConfig.model_type,
            "llava_qwen",
        ),  # of a converted checkpoint and of the release
        fixed={**QWEN2_FIXED, "mm_newline_position": "grid"},
        row_newlines=True,
        processor_class=LlavaVideoProcessor,
        settings={
            "time_instruction": ("", Annotated[Any, By(read_instruction)]),
            "video_pooling": ("", Annotated[str, OneOf(POOLINGS)]),
        },
        patch_tokens=False,  # a token is the mean of several patches
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set the pooling of frames, and the resulting number of placeholders on the processor."""
        model.config.video_pooling = spec.processor.get("video_pooling", POOLINGS[0])
        super().__init__(model, processor, spec)
        processor.frame_tokens = self._pooling.side * (self._pooling.side + 1)

    def prompt_text(self, chat: Chat, media: Media) -> str:
        """Return the prompt, with the times of frames under `time_instruction`."""
        text = super().prompt_text(chat, media)
        tell = TIMES[self.spec.processor.get("time_instruction", False)]
        if tell is None:
            return text
        before, *after = text.split(self.processor.video_token, maxsplit=len(media.clips))
        for clip, following in zip(media.clips, after, strict=True):
            marked = f"{self.processor.video_token}{tell(clip)}\n"
            # Drop the line break after the last video, or the blank before the next.
            before += marked + (following[1:] if following[:1] in ("\n", " ") else following)
        return before

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on frames that Pillow resized, as in the release."""
        size = self.processor.video_processor.size
        frames = [
            [replace(clip, frames=clip.resized(size["width"], size["height"])) for clip in row]
            for row in clips
        ]
        return super().process(texts, pictures, frames)

    def _pool(self, features: Tensor) -> Tensor:
        return cast("Tensor", self.model.model.pool(features))


def time_instruction(clip: Clip) -> str:
    """Return the release's introduction of a video: its length and the times of its frames."""
    return (
        f"The video lasts for {clip.total_frames / clip.fps:.2f} seconds, and {len(clip.indices)} frames are uniformly "
        f"sampled from it. These frames are located at {_moments(clip)}."
        "Please answer the following questions related to this video."
    )


def _moments(clip: Clip) -> str:
    """Return the times of frames; whole seconds for frames sampled once a second at a steady rate."""
    if not clip.steady:
        return ",".join(f"{at:.2f}s" for at in clip.timestamps)
    timed = clip.indices == each_second(clip.total_frames, clip.fps)
    rate = max(round(clip.fps), 1) if timed else clip.fps
    return ",".join(f"{index / rate:.2f}s" for index in clip.indices)


def _as_vlmevalkit(clip: Clip) -> str:
    """Return the introduction of VLMEvalKit's class: without blanks, and with the height instead of the frame count."""
    return (
        f"\nThe video lasts for {clip.total_frames / clip.fps:.2f} seconds,and {clip.frames.shape[1]} frames are "
        f"uniformly sampled from it.These frames are located at {_moments(clip)}."
        "Please answer the following questions related to this video."
    )


#: Text after the placeholder of a video, without the line break before the question, by `time_instruction`.
TIMES: Mapping[bool | str, Callable[[Clip], str] | None] = {
    False: None,
    True: lambda clip: f"\n{time_instruction(clip)}",  # as lmms-eval's class
    "release": time_instruction,
    "vlmevalkit": _as_vlmevalkit,
}
