"""Any image-text-to-text class of transformers, by the interfaces that these share; proved on probes at loading.

The decoder is `get_decoder()`, placeholders are `config.image_token_id`, features come from `get_image_features`.
Methods act where harness/models/generic_proof.py proves them: on the tokens that enter the decoder, between its layers,
on its cache, and inside an encoder whose patches become tokens one to one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from espalier.harness.engine.engine_guards import check_text_config
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.model_parts import TowerBlock
from espalier.harness.engine.signals.table import DECLARED
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter, FamilyData
from espalier.harness.models.chat_media import Chat, Media
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.generic_proof import prove
from espalier.harness.models.loader import load_part, unreadable
from espalier.harness.models.measured_facts import ATTENTION, OUTPUT
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec

#: Signals of the encoder, of places in the picture, and of denoising steps.
UNKNOWN = {
    *(name for name, signal in DECLARED.items() if signal.units),
    *("pixels", "tile", "prior"),
    *("decider_attention", "masked_attention", "first_kept", "layer_normed"),
}

#: Kinds of site where no class is proved, and why.
NOWHERE = {
    "vision": "the modules between its encoder of pictures and its decoder are unknown",
    "decode": "no reference covers steps that attend to a part of the cache",
    "block": "it generates token by token",
}

#: Parts of a block that `TowerBlock` runs.
BLOCK = ("layer_norm1", "self_attn", "layer_norm2", "mlp")

#: Picture from which the marks around pictures are read.
PROBE = Image.new("RGB", (64, 64))


class GenericAdapter(Adapter):
    """A class of transformers without a file here: each picture is a grid of one row, without places in the picture."""

    data = FamilyData(
        model_class=AutoModelForImageTextToText,
        types=tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        conversation=CHECKPOINT,
        text=None,
        joins=JOINS,
        lacking=tuple(sorted(UNKNOWN)),
        unplaced=True,
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Check that the class has the interfaces."""
        config, decoder = model.config, model.get_decoder()
        layers = getattr(decoder, "layers", None)
        last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
        attention = next((getattr(last, n) for n in ATTENTION if hasattr(last, n)), None)
        lacks = {
            "get_image_features": not hasattr(model, "get_image_features")
            and not hasattr(model.base_model, "get_image_features"),
            "config.image_token_id": not isinstance(getattr(config, "image_token_id", None), int),
            "an encoder of pictures apart from the decoder": model.get_encoder(modality="image")
            in (model, decoder),
            "a decoder with layers and a final norm": last is None or not hasattr(decoder, "norm"),
            "attention with one output map": not any(hasattr(attention, n) for n in OUTPUT),
            "an MLP in each layer": not hasattr(last, "mlp"),
            "a chat template": not getattr(processor, "chat_template", None)
            and not getattr(processor.tokenizer, "chat_template", None),
        }
        missing = [name for name, absent in lacks.items() if absent]
        if missing:
            raise UserError(
                f"model={spec.name}: {type(model).__name__}, which has no file here, cannot be used: it lacks "
                f"{', '.join(missing)}"
            )
        super().__init__(model, processor, spec)

    @classmethod
    def class_of(cls, config: Any) -> Any:
        """Return the class of a configuration in the library's table of image-text-to-text models."""
        return AutoModelForImageTextToText._model_mapping[type(config)]

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's configuration.

        Raises:
            UserError: layers of its decoder see a window.
        """
        config = load_part(spec, AutoConfig)
        where = f"model={spec.name}: {config.model_type}, which has no file here, cannot be used"
        check_text_config(config.get_text_config(decoder=True), where)
        return config

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor.

        Raises:
            UserError: it is no processor of pictures and text.
        """
        processor = load_part(spec, AutoProcessor)
        if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
            raise unreadable(spec, TypeError(f"its processor is a {type(processor).__name__}"))
        return processor

    @property
    def unproved(self) -> Mapping[str, str]:
        """Kinds of site that no class has, or this one lacks the modules for, and why."""
        lacking = {}
        if not all(hasattr(layer, "self_attn") for layer in self.decoder.layers):
            lacking = dict.fromkeys(("layer", "cache"), "its decoder layers have no self_attn")
        # One list of pre-norm blocks, as CLIP's and SigLIP's.
        layers = self.tower_layers()
        if not len(layers) or not all(hasattr(layers[0], part) for part in BLOCK):
            lacking["tower"] = f"its {type(self.tower).__name__} has no list of pre-norm blocks"
        return {**NOWHERE, **lacking}

    def verify(self) -> None:
        """Prove features, answers and sites on probes; sites that fail leave the adapter's facts.

        Raises:
            UserError: features, answers or the prefix site failed; the line names the check.
        """
        name = type(self.model).__name__
        where = f"model={self.spec.name}: {name}, which has no file here, cannot be used"
        failed = prove(self, self.features_of, where)
        self.facts = replace(self.facts, unproved={**self.facts.unproved, **failed})

    @property
    def decoder(self) -> Any:
        """The text stack."""
        return self.model.get_decoder()

    @property
    def tower(self) -> nn.Module:
        """The encoder of pictures, which starts and stops the clock of the vision phase."""
        return cast("nn.Module", self.model.get_encoder(modality="image"))

    @property
    def projector(self) -> nn.Module:
        """The encoder of pictures: the module after it is unknown."""
        return self.tower

    def tower_layers(self) -> nn.ModuleList:
        """Return the encoder's list of layers; empty if it has none or several."""
        lists = [part for part in self.tower.modules() if isinstance(part, nn.ModuleList)]
        return lists[0] if len(lists) == 1 else nn.ModuleList()

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of an encoder layer; None: of the one that the class reads."""
        layer = len(self.tower_blocks()) - 1 if index is None else index
        block: Any = self.tower_layers()[layer]
        return cast("nn.Module", block.self_attn)

    def unread_blocks(self) -> Sequence[nn.Module]:
        """Return the encoder's layers after that of `config.vision_feature_layer`, if the class has it."""
        feature = getattr(self.model.config, "vision_feature_layer", -1)
        layers = list(self.tower_layers())
        # Entry 0 of the hidden states is the embeddings.
        end = len(layers) + 1 + feature if isinstance(feature, int) and feature < 0 else feature
        return layers[end:] if isinstance(end, int) else ()

    def tower_blocks(self) -> Sequence[TowerBlock]:
        """Return the encoder's layers up to the one that the class reads."""
        layers = list(self.tower_layers())
        return [TowerBlock(layer) for layer in layers[: len(layers) - len(self.unread_blocks())]]

    def prompt_text(self, chat: Chat, media: Media) -> str:
        """Return the prompt of a chat; texts may not hold the placeholder."""
        tokenizer, image = self.processor.tokenizer, self.model.config.image_token_id
        mark: str = tokenizer.convert_ids_to_tokens(image)
        self.data = replace(self.data, placeholders=(mark,))  # type: ignore[misc]
        return super().prompt_text(chat, media)

    @torch.inference_mode()
    def features_of(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the features (units, D) of a batch's pictures by `get_image_features`."""
        # Some outer classes lack the method, or pass on whatever they get.
        places = (self.model, self.model.base_model)
        methods = [p.get_image_features for p in places if hasattr(p, "get_image_features")]
        accepted = {name for method in methods for name in inspect.signature(method).parameters}
        arguments = {name: value for name, value in inputs.items() if name in accepted}
        output = methods[0](**arguments, return_dict=True)
        features = getattr(output, "pooler_output", output)
        parts = features if isinstance(features, list | tuple) else [features]
        return torch.cat([part.flatten(0, -2) for part in parts])

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: runs of placeholders up to a gap with the marks of `border`."""
        image = int(self.model.config.image_token_id)
        items: list[VisualItem] = []
        first = 0
        for row in inputs["input_ids"].cpu():
            lengths: list[int] = []
            gap: list[int] = []
            for is_image, run in groupby(row.tolist(), lambda token: token == image):
                if not is_image:
                    gap = list(run)
                elif lengths and not _holds(gap, self.border):
                    lengths[-1] += len(list(run))
                else:
                    lengths.append(len(list(run)))
            for length in lengths:
                units = torch.arange(first, first + length).view(-1, 1)
                items.append(VisualItem(rectangle(1, 1, length), units))
                first += length
        return {image: items}

    @cached_property
    def border(self) -> tuple[int, ...]:
        """Tokens between the placeholders of two pictures, in this order: the last of one and the first of the other.

        Marks of rows and tiles inside a picture lack them. Empty for classes that write none. Cost: one picture.
        """
        chat: Chat = [{"role": "user", "content": [{"type": "image", "image": PROBE}]}]
        text, tokenizer = self.prompt_text(chat, Media([PROBE])), self.processor.tokenizer
        kinds = {"images_kwargs": {"return_tensors": "pt"}}
        batch = self.processor(
            text=[text], images=[[PROBE]], return_text_replacement_offsets=True, **kinds
        )
        ((place,),) = batch["text_replacement_offsets"]
        ids = list(tokenizer(place["replacement"], add_special_tokens=False)["input_ids"])
        image = int(self.model.config.image_token_id)
        before, after = ids[: ids.index(image)], ids[::-1][: ids[::-1].index(image)]
        return (*after[:1], *before[:1])


def _holds(gap: Sequence[int], marks: Sequence[int]) -> bool:
    """Return whether all marks are in a gap, in their order."""
    remaining = iter(gap)
    return all(mark in remaining for mark in marks)
