"""InternVL with its two towers (InternViT-300M and -6B), its Qwen2, Qwen3, Llama and Phi-3 text stacks, and videos."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from espalier.harness.specs.run_spec import ModelSpec, VideoSpec
from tests.families.onevision import video, watch
from tests.tiny import IMAGE, SHAPES, TEXT, Family, picture, tiny_spec


def small(text: dict[str, Any], **vision: Any) -> ModelSpec:
    """A tower of 4 x 4 patches, which pixel shuffle turns into 2 x 2 units."""
    return tiny_spec(
        "internvl",
        projector=(128, 32, 32),
        processor={"max_patches": 6},
        video=VideoSpec(frames=3, short="all"),
        architecture={
            "text": {"max_position_embeddings": 4096, **text},
            "vision": {"image_size": IMAGE, "patch_size": 7, **vision},
            "model": {"image_seq_length": 4, "tie_word_embeddings": False},
        },
    )


QWEN = small({"model_type": "qwen2"}, attention_bias=True)
ROPE = {"rope_type": "dynamic", "rope_theta": 1.0e6, "factor": 2.0}
LLAMA = small(
    {"model_type": "llama", "rope_parameters": ROPE}, use_qk_norm=True, norm_type="rms_norm"
)
PHI = small({"model_type": "phi3"}, attention_bias=True)

#: InternVL3.5: normed queries and keys, and heads whose width is not the hidden width's share.
QWEN3 = small({"model_type": "qwen3", "head_dim": 16}, attention_bias=True)
QWEN3 = replace(QWEN3, facts=replace(QWEN3.facts, text=replace(TEXT, head_dim=16)))

#: 2, 3 and 3 frames; in the second chat a picture of several tiles follows the video.
VIDEOS = (
    watch("w1 w2 w3", video(0, frames=2)),
    watch("w4", video(1), picture(1, 28, 56)),
    watch("w5 w6 w7 w8 w9", video(2, frames=9)),
)

FAMILIES = {
    "internvl": Family(QWEN, tuple(SHAPES)),
    "internvl_6b": Family(LLAMA, tuple(SHAPES)),
    "internvl_phi3": Family(PHI, tuple(SHAPES)),
    "internvl_qwen3": Family(QWEN3, tuple(SHAPES)),
    "internvl_video": Family(QWEN, VIDEOS),
}
