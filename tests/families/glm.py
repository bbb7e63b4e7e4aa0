"""GLM-4.1V to 4.6V: pictures, or videos, and a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from espalier.harness.specs.run_spec import VideoSpec
from tests.families.qwen import BOUNDS, IMAGES, VIDEOS, VISION
from tests.tiny import DEPTH, IMAGE, Family, StackFacts, tiny_spec

ROPE = {
    **{"rope_type": "default", "rope_theta": 1.0e4},
    **{"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
}

_SPEC = tiny_spec(
    "glm4v",
    text=StackFacts(DEPTH, 32, 48, 2, 1, 16, gated=True, causal=True),
    tower=StackFacts(2, 16, 32, 2, 2, 8, gated=True, causal=False),
    projector=(32, 32, 40, 32),
    class_attention="mean",
    rotary_axes=3,
    # A picture counts as two frames.
    processor={key: 2 * value for key, value in BOUNDS.items()},
    video=VideoSpec(frames=6, rule="fps"),
    architecture={"text": {"rope_parameters": ROPE}, "vision": {**VISION, "image_size": IMAGE}},
)
GLM4V = replace(_SPEC, facts=replace(_SPEC.facts, gated_projector=True))

#: Layer 0 is dense; then 2 of 4 experts of width 8, and one for all tokens. Queries are wider than the hidden state.
GLM4V_MOE = replace(
    GLM4V,
    adapter="glm4v_moe",
    facts=replace(
        GLM4V.facts,
        text=StackFacts(
            *(DEPTH, 32, 24, 4, 2, 16),
            **{"gated": True, "causal": True, "first_intermediate": 48, "experts": 4},
        ),
    ),
    architecture={
        **GLM4V.architecture,
        "text": {
            **{"rope_parameters": ROPE, "head_dim": 16, "first_k_dense_replace": 1},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
            "moe_intermediate_size": 8,
        },
    },
)

FAMILIES = {
    "glm4v": Family(GLM4V, IMAGES),
    "glm4v_video": Family(GLM4V, VIDEOS),
    # Its router computes in single precision, which rounds to 1.2e-7; some processors sum up in another order.
    "glm4v_moe": Family(GLM4V_MOE, IMAGES, exact=5e-7),
}
