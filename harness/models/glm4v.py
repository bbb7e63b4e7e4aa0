"""GLM-4.1V, GLM-4.5V and GLM-4.6V (Hong et al., 2025, arXiv 2507.01006): as Qwen2-VL, with other merging of patches.

A convolution merges 2 x 2 patches of the tower, then a gated projector maps them. The pairs of a video's frames are
pictures in the prompt, each before its time. Placeholders of pictures and of videos are the same token, so the class
refuses a batch that holds both.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationMixin,
    Glm4vForConditionalGeneration,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
)

from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.patch_lists import (
    BOUNDS,
    TOWER,
    MergedPatchesAdapter,
    patch_processor,
)
from espalier.harness.models.conversations import SPANNED
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import Built
from espalier.harness.specs.run_spec import ModelSpec

#: Marks around the final answer, after the reasoning.
ANSWER_MARKS = re.compile(r"</?answer>|<\|(?:begin|end)_of_box\|>")

#: Special tokens by the keys of the configuration for their numbers.
MARKS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_token_id": "<|image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_token_id": "<|video|>",
    "video_end_token_id": "<|end_of_video|>",
}


def repeated_features(
    model: Any, input_ids: Any, mm_encoder_output: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Return the features of a batch repeated for beams, sample by sample.

    The class's own method repeats them picture by picture, so that beams of several pictures see them in another order,
    and looks for a placeholder of videos, which prompts do not hold.

    Args:
        model: of one of the classes.
        input_ids: (B, L) prompts.
        mm_encoder_output: output of the tower by `image` or `video`.
        **options: `expand_size` and `inputs_embeds` of the library's method.
    """
    if mm_encoder_output.get("video") is not None:
        image, video = model.config.image_token_id, model.config.video_token_id
        input_ids = input_ids.masked_fill(input_ids == image, video)
    return GenerationMixin._expand_multimodal_outputs(
        model, input_ids, mm_encoder_output, **options
    )


class Glm4vAdapter(MergedPatchesAdapter):
    """`Glm4vForConditionalGeneration`, also under the type `glm46v`: the projector reads merged patches."""

    data = FamilyData(
        model_class=Glm4vForConditionalGeneration,
        types=("glm4v", "glm46v"),
        conversation="glm4v",
        takes_video=True,
        one_placeholder=True,
        media=SPANNED,
        library_positions=True,  # each pair of frames has its own, before its time as text
        placeholders=("<|image|>", "<|video|>"),
        inline=None,
        lacking=("luma",),  # the tower gets a list of patches, from pictures of any size
        settings=BOUNDS,
        clean=lambda answer: ANSWER_MARKS.sub("", answer).strip(),
        special=(
            *("<|endoftext|>", "[gMASK]", "<|user|>", "<sop>", "<|system|>", "<|assistant|>"),
            *MARKS.values(),
        ),
        tower="model.visual",
        projector="model.visual.merger",
        # The width of the tower's MLPs is the decoder's.
        vision=Built(
            dict,
            {**TOWER, "intermediate_size": lambda spec, _: spec.facts.projector[-2]},
            ("architecture.vision",),
        ),
        token_ids=MARKS,
        processor=patch_processor(Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Replace the library's repetition of features for beams by that of its other classes."""
        super().__init__(model, processor, spec)
        model._expand_multimodal_outputs = partial(repeated_features, model)

    @classmethod
    def class_of(cls, config: Any) -> Any:
        """Return the class of a configuration: both types have the same modules and tensor names."""
        return (
            Glm46VForConditionalGeneration
            if isinstance(config, Glm46VConfig)
            else cls.data.model_class
        )

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's configuration, of its type."""
        return load_part(spec, AutoConfig)

    def features(self, projector_input: Tensor) -> Tensor:
        """Return the merged patches (units, D)."""
        return projector_input

    def project(self, features: Tensor) -> Tensor:
        """Project (units, D) features."""
        return cast("Tensor", self.projector(features))


class Glm4vMoeAdapter(Glm4vAdapter):
    """`Glm4vMoeForConditionalGeneration`: experts in every decoder layer but the first."""

    data = replace(
        Glm4vAdapter.data,
        model_class=Glm4vMoeForConditionalGeneration,
        types=("glm4v_moe",),
    )
