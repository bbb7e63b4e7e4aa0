"""LLaDA-V: LLaVA-OneVision's vision side with SigLIP 2, in front of LLaDA, which denoises its answers.

LLaDA's blocks are Llama's, every token sees every other (`model.facts.diffusion`). The release is loaded under its own
tensor names, without its code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from transformers import LlavaOnevisionImageProcessorPil, PreTrainedTokenizerFast

from espalier.harness.errors import UserError
from espalier.harness.models.conversations import FLUSH, JOINS
from espalier.harness.models.llada_release import RENAMES, check_release, planes, text_sizes
from espalier.harness.models.llava_onevision import LlavaOnevisionAdapter
from espalier.harness.models.loader import config_of, load_part
from espalier.harness.models.onevision_processor import build_processor
from espalier.harness.models.random_weights import text_config, vision_config

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: LLaDA's: padding and end, beginning, placeholders, and what prompts and answers hold beside words.
SPECIAL = (
    *("<|endoftext|>", "<|startoftext|>", "<|endoftext|>", "<image>", "<video>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"),
)


class LladaVAdapter(LlavaOnevisionAdapter):
    """`LlavaOnevisionForConditionalGeneration` around Llama: one image is AnyRes, each of several one tile."""

    checkpoint_types = ("llava_llada",)
    #: The release's config.json belongs to remote code and does not describe the tower.
    self_described = False
    renames = RENAMES
    special = SPECIAL
    #: The release's evaluation asks for short answers without reasoning.
    conversation: ClassVar[str] = "llada_no_think"
    joins = {**JOINS, "flush": FLUSH}  # noqa: RUF012 - never written to

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Build it around the checkpoint's tokenizer; image settings are remote code there."""
        return cls.built_processor(cls.checkpoint_config(spec), _tokenizer(spec))

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """SigLIP's preprocessing, AnyRes for images."""
        return cls.built_processor(cls.configuration(spec, tokenizer), tokenizer)

    @classmethod
    def built_processor(cls, config: Any, tokenizer: Any) -> Any:
        """Return the processor that fits a configuration; it resizes images by PIL, as the releases do."""
        return build_processor(
            cls.processor_class, config, tokenizer, LlavaOnevisionImageProcessorPil
        )

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Describe the model in the library's words, as far as the checkpoint's own config.json describes it.

        What that does not say comes from the config file.

        Raises:
            UserError: it says that something is computed in another way.
        """
        release = config_of(spec)
        check_release(release)
        config = cls._described(spec, _tokenizer(spec), text_sizes(release))
        if "image_grid_pinpoints" in release:
            config.image_grid_pinpoints = planes(
                release["image_grid_pinpoints"], config.vision_config.image_size
            )
        return config

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """SigLIP, an MLP and Llama."""
        return cls._described(spec, tokenizer, {})

    @classmethod
    def _described(cls, spec: ModelSpec, tokenizer: Any, sizes: dict[str, Any]) -> Any:
        return cls.config_class(
            vision_config={
                "model_type": "siglip_vision_model",
                **vision_config(spec.facts.tower, spec),
            },
            text_config={"model_type": "llama", **text_config(spec, tokenizer), **sizes},
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
            **spec.architecture["model"],
        )

    def decode(self, ids: Tensor) -> list[str]:
        """Turn new tokens into answers, without one full stop at their end, as the release's evaluation does."""
        return [text.removesuffix(".").strip() for text in super().decode(ids)]


def _tokenizer(spec: ModelSpec) -> Any:
    """Load the checkpoint's tokenizer and give it the two placeholders, which the originals write as numbers below 0.

    Raises:
        UserError: their ids would lie behind the embedding's last row.
    """
    tokenizer = load_part(spec, PreTrainedTokenizerFast)
    tokenizer.add_tokens(["<image>", "<video>"], special_tokens=True)
    if len(tokenizer) > spec.facts.vocabulary:
        raise UserError(
            f"model={spec.name}: the tokenizer has {len(tokenizer)} tokens with <image> and <video>, the embedding "
            f"{spec.facts.vocabulary} rows (model.facts.vocabulary)"
        )
    return tokenizer
