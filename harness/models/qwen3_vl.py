"""Qwen3-VL: as Qwen2-VL, with features of earlier tower layers added in the decoder, and times between frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from espalier.harness.models.conversations import TIMED
from espalier.harness.models.qwen2_vl import Qwen2VLAdapter
from espalier.harness.models.qwen_processor import new_processor

if TYPE_CHECKING:
    from espalier.harness.cost.facts import ModelFacts
    from espalier.harness.specs.run_spec import ModelSpec


class Qwen3VLAdapter(Qwen2VLAdapter):
    """`Qwen3VLForConditionalGeneration`: each pair of a video's frames follows its time in the prompt."""

    model_class: ClassVar[Any] = Qwen3VLForConditionalGeneration
    config_class: ClassVar[Any] = Qwen3VLConfig
    processor_class = Qwen3VLProcessor
    conversation: ClassVar[str] = "qwen3"
    media = TIMED
    library_positions = True  # each pair of frames has positions of its own, after its time as text

    @classmethod
    def tower_config(cls, facts: ModelFacts) -> dict[str, Any]:
        """Return the tower's sizes under transformers' keys, and the layers with features for the decoder."""
        tower = facts.tower
        return {
            "depth": tower.layers,
            "hidden_size": tower.hidden,
            "intermediate_size": tower.intermediate,
            "num_heads": tower.heads,
            "out_hidden_size": facts.text.hidden,
            "deepstack_visual_indexes": list(facts.deepstack),
        }

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with the released normalisation."""
        half = [0.5, 0.5, 0.5]
        return new_processor(
            cls.processor_class,
            spec,
            tokenizer,
            video_class=Qwen3VLVideoProcessor,
            image_mean=half,
            image_std=half,
        )

    def deepstack(self) -> Mapping[int, nn.Module]:
        """Return the mergers of the tower layers with features that the decoder adds to visual tokens."""
        tower: Any = self.tower
        return dict(zip(tower.deepstack_visual_indexes, tower.deepstack_merger_list, strict=True))


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """`Qwen3VLMoeForConditionalGeneration`: a router sends each token to a few experts of every decoder layer."""

    model_class = Qwen3VLMoeForConditionalGeneration
    config_class = Qwen3VLMoeConfig
    loads_shared = False  # there, transformers 5.23 leaves stored experts transposed
