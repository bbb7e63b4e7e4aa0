"""PaddleOCR-VL (Cui et al., 2025, arXiv 2510.14528): SigLIP on pictures of any size, two maps, ERNIE 4.5 0.3B."""

from __future__ import annotations

from transformers import (
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
)

from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.patch_lists import (
    PICTURE_BOUNDS,
    RasterPatchesAdapter,
    patch_processor,
)
from espalier.harness.models.conversations import FRAMED
from espalier.harness.models.random_weights import HALF, of, text_config

#: Placeholder of a picture.
PLACEHOLDER = "<|IMAGE_PLACEHOLDER|>"


class PaddleOcrVLAdapter(RasterPatchesAdapter):
    """`PaddleOCRVLForConditionalGeneration`: one grid of tokens per picture."""

    data = FamilyData(
        model_class=PaddleOCRVLForConditionalGeneration,
        conversation="paddleocr_vl",
        media=FRAMED,
        placeholders=(PLACEHOLDER,),
        inline=None,
        lacking=("luma",),  # the tower gets a list of patches, from pictures of any size
        settings=PICTURE_BOUNDS,
        special=(
            *("<unk>", "<s>", "</s>", "<|begin_of_sentence|>"),
            *("<|IMAGE_START|>", PLACEHOLDER, "<|IMAGE_END|>"),
        ),
        named_tokens={"image_token": PLACEHOLDER},
        tower="model.visual.vision_model",
        projector="model.projector",
        # The class ties the head unless both parts say no.
        text=text_config("architecture.model", head_dim=of("facts.text.head_dim")),
        token_ids={"image_token_id": PLACEHOLDER},
        processor=patch_processor(
            PaddleOCRVLProcessor, PaddleOCRVLImageProcessor, image_mean=HALF, image_std=HALF
        ),
    )
