"""DeepSeek-OCR: SAM, a convolution to 1/16 of the cells, CLIP, one linear layer, and a mixture-of-experts decoder.

transformers has no class of this name; its class for Unlimited-OCR has the same modules and tensor names. It differs
in the decoder's attention, which the configuration built here sets to full attention in every layer. Answers are
cleaned up before scoring as in the releases' code.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

from torch import Tensor
from transformers import (
    UnlimitedOcrConfig,
    UnlimitedOcrForConditionalGeneration,
    UnlimitedOcrProcessor,
)

from espalier.harness.errors import unknown_name
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.deepseek_ocr import (
    CLEAN_UPS,
    FOLD,
    SETTINGS,
    CompressedViewsAdapter,
    OcrImageProcessor,
    check_views,
    library_sizes,
    released_sizes,
)
from espalier.harness.models.conversations import PLAIN, join_of
from espalier.harness.models.loader import config_of, load_part
from espalier.harness.models.random_weights import (
    Built,
    built_processor,
    of,
    text_config,
    vision_config,
)
from espalier.harness.specs.run_spec import ModelSpec

#: Sizes of SAM.
STEM = {
    "hidden_size": of("facts.stem.hidden"),
    "mlp_dim": of("facts.stem.intermediate"),
    "num_hidden_layers": of("facts.stem.layers"),
    "num_attention_heads": of("facts.stem.heads"),
}

#: Sizes of the decoder; a part class adds the types of its layers.
EXPERTS = text_config(n_routed_experts=of("facts.text.experts"))


def full_layers(**text: Any) -> dict[str, Any]:
    """Return the arguments of a decoder with full attention in all layers."""
    return {**text, "layer_types": ["full_attention"] * text["num_hidden_layers"]}


def ocr_vision(encoder: Built) -> Built:
    """Return how the configuration of SAM and an encoder is built."""
    sam = Built(dict, STEM, ("architecture.stem",))
    return Built(dict, {"sam_config": sam, "encoder_config": encoder})


def ocr_processor(processor_class: Any) -> Built:
    """Return how a processor is built: cells, newlines and separators are tokens."""
    return built_processor(
        processor_class,
        image_processor=lambda spec, _: OcrImageProcessor(
            **{name: value for name, value in spec.processor.items() if name in SETTINGS}
        ),
        patch_size=of("architecture.stem.patch_size"),
        downsample_ratio=FOLD,
    )


class DeepseekOcrAdapter(CompressedViewsAdapter):
    """`UnlimitedOcrForConditionalGeneration`: crops stitched to one plane (view 1), then the global view (view 0)."""

    data = FamilyData(
        model_class=UnlimitedOcrForConditionalGeneration,
        # That of the release, which refers to remote code, and that of the library's class.
        types=("deepseek_vl_v2", UnlimitedOcrConfig.model_type),
        settings={**{name: ("", hint) for name, hint in SETTINGS.items()}, "clean_up": ("", Any)},
        conversation="plain",
        pieces="begun",
        # The release's config.json belongs to remote code, which holds the image settings.
        self_described=False,
        blocks="vision_encoder.encoder.layers",
        vision=ocr_vision(vision_config()),
        text=replace(EXPERTS, part_class=full_layers),
        processor=ocr_processor(UnlimitedOcrProcessor),
    )

    @classmethod
    def format(cls, name: str | None, join: str | None = None, thinking: bool = False) -> str:
        """Return the only format: begin-of-sequence, a line for each image, the text.

        Raises:
            UserError: another format or media rule.
        """
        if name not in (None, cls.data.conversation):
            raise unknown_name("model.conversation", name, (cls.data.conversation,))
        join_of(join, cls.data.joins)
        return PLAIN

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return a processor with the checkpoint's tokenizer; `model.processor` replaces the remote code's settings."""
        return cls.new_processor(spec, cls.data.tokenizer(spec))

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the library's configuration with the sizes in the checkpoint's config.json.

        That file belongs to remote code; values that it omits come from the model's config file.
        """
        config, config_class = config_of(spec), cls.data.model_class.config_class
        sizes = released_sizes(config)
        if config.get("model_type") == config_class.model_type:
            sizes = library_sizes(load_part(spec, config_class))
        stated = {
            name: {**spec.architecture.get(name, {}), **table} for name, table in sizes.items()
        }
        stated_spec = replace(spec, architecture={**spec.architecture, **stated})
        return cls.configuration(stated_spec, cls.data.tokenizer(spec))

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for unknown settings and clean-ups, and for values that make no views."""
        super().check_settings(spec)
        check_views(cls.processor_settings(spec))
        clean_up = spec.processor.get("clean_up")
        if clean_up is not None and clean_up not in CLEAN_UPS:
            raise unknown_name("model.processor.clean_up", str(clean_up), (*CLEAN_UPS, "null"))

    def decode(self, ids: Tensor) -> list[str]:
        """Return answers with the special tokens around labels and boxes, cleaned up by `model.processor.clean_up`.

        Without these tokens, labels and boxes could not be distinguished from text.
        """
        tokenizer = self.processor.tokenizer
        ends = (tokenizer.eos_token_id, self.pad_id)
        answers = [takewhile(lambda token: token not in ends, row) for row in ids.tolist()]
        texts = [tokenizer.decode([*answer]) for answer in answers]
        clean_up = self.spec.processor.get("clean_up")
        clean = str if clean_up is None else CLEAN_UPS[clean_up]
        return [clean(text.strip()).strip() for text in texts]
