"""What answers the samples of a check: the embedded model, or a tiny video model with random weights."""

from __future__ import annotations

from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.models.adapter import Adapter, load_adapter
from espalier.harness.specs.run_spec import ModelSpec, RunSpec, VideoSpec
from espalier.methods.signals import SIGNALS

#: The embedded model's context is 512 tokens, and each of its pictures takes 144; this many are left for an answer.
ROOM = 512 - 16
PICTURE = 144

#: Bytes are its tokens, so any text will do; videos become at most four frames of a few tokens.
VIDEO = ModelSpec(
    name="tiny_video",
    adapter="qwen2_vl",
    path=None,
    hub=None,
    revision=None,
    dtype="float32",
    attention="sdpa",
    weights="random",
    device="cpu",
    processor={
        "min_pixels": 14 * 14,
        "max_pixels": 56 * 56,
        "video_min_pixels": 14 * 14,
        "video_max_pixels": 56 * 56,
    },
    video=VideoSpec(frames=4),
    architecture={
        "text": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1.0e4,
                "mrope_section": [1, 1, 2],
            },
        },
        "vision": {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
    facts=ModelFacts(
        text=StackFacts(2, 32, 48, 4, 2, 8, gated=True, causal=True),
        tower=StackFacts(2, 32, 64, 4, 4, 8, gated=False, causal=False),
        stem=None,
        projector=(128, 128, 32),
        vocabulary=288,
        visual_tokens=16,
        class_attention="mean",
        rotary_axes=3,
        signals=frozenset(SIGNALS),
    ),
)


def answers(spec: RunSpec, clips: int, pictures: int, words: int) -> Adapter:
    """Load what can read a sample: the embedded model that the spec names, if it sees no video and it has the room.

    Args:
        spec: of a run on the embedded model.
        clips: videos of the sample that has most.
        pictures: its pictures.
        words: words of its text.
    """
    fits = not clips and pictures > 0 and pictures * PICTURE + words < ROOM
    return load_adapter(spec.model if fits else VIDEO)
