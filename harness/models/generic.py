"""Any image-text-to-text class of transformers, by the interfaces that these share; proved on probes at loading.

The decoder is `get_decoder()`, placeholders are `config.image_token_id`, features come from `get_image_features`. The
path from pixels to features is unknown, so methods act on the tokens that enter the decoder, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from espalier.harness.engine.engine_guards import check_text_config
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.errors import UserError, foreign
from espalier.harness.models.adapter import Adapter, FamilyData
from espalier.harness.models.chat_media import Chat, Media
from espalier.harness.models.conversations import JOINS
from espalier.harness.models.generic_proof import prove
from espalier.harness.models.loader import MALFORMED, load_part, unreadable
from espalier.harness.models.measured_facts import ATTENTION, OUTPUT
from espalier.harness.specs.run_spec import CHECKPOINT

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Signals of the tokens as they enter the decoder, and of their places.
PROVED = frozenset(
    {"projected", "all_projected", "text_embeddings"}
    | {"text_positions", "visual_positions", "all_positions"}
)

#: Picture from which the marks around pictures are read.
PROBE = Image.new("RGB", (64, 64))


class GenericAdapter(Adapter):
    """A class of transformers without a file here: each picture is a grid of one row, without places in the picture."""

    data = FamilyData(
        model_class=AutoModelForImageTextToText,
        types=tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        conversation=CHECKPOINT,
        joins=JOINS,
        lacking=tuple(sorted(set(SIGNALS) - PROVED)),
        proved_sites=("prefix",),
        unplaced=True,
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Check that the class has the interfaces."""
        self._check(model, processor, spec)
        super().__init__(model, processor, spec)

    @classmethod
    def class_of(cls, config: Any) -> Any:
        """Return the class of a configuration in the library's table of image-text-to-text models."""
        return AutoModelForImageTextToText._model_mapping[type(config)]

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's configuration."""
        return load_part(spec, AutoConfig)

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor.

        Raises:
            UserError: it is no processor of pictures and text.
        """
        processor = load_part(spec, AutoProcessor)
        if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
            error = TypeError(f"its processor is a {type(processor).__name__}")
            raise unreadable(spec, error)
        return processor

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Refuse random weights, which need a description of the model.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"model={spec.name}: model.weights=random needs a family; valid: a checkpoint's folder"
        )

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Refuse random weights, as `configuration`."""
        return cls.configuration(spec, tokenizer)

    def verify(self) -> None:
        """Prove features, answers and the prefix site on probes.

        Raises:
            UserError: one of the checks failed; the line names it.
        """
        name = type(self.model).__name__
        problem = f"model={self.spec.name}: {name}, which has no file here, cannot be used: a probe ends with an error"
        with foreign(problem, "a class that answers to its own processor", MALFORMED):
            prove(self, self.features_of)

    @property
    def decoder(self) -> Any:
        """The text stack."""
        return self.model.get_decoder()

    @property
    def tower(self) -> nn.Module:
        """The encoder of pictures, which starts and stops the clock of the vision phase."""
        tower: nn.Module = self.model.get_encoder(modality="image")
        return tower

    @property
    def projector(self) -> nn.Module:
        """The encoder of pictures: the module after it is unknown."""
        return self.tower

    def tower_attention(self, index: int | None) -> nn.Module:
        """Refuse to look inside the encoder."""
        raise UserError(
            f"model={self.spec.name!r}: the layers of its encoder of pictures are unknown"
        )

    def prompt_text(self, chat: Chat, media: Media) -> str:
        """Return the prompt of a chat; texts may not hold the placeholder."""
        self.data = replace(self.data, placeholders=(self._placeholder(),))  # type: ignore[misc]
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

    def _placeholder(self) -> str:
        token: str = self.processor.tokenizer.convert_ids_to_tokens(
            self.model.config.image_token_id
        )
        return token

    @classmethod
    def _check(cls, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Raise UserError for the first interface that a class lacks."""
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
        where = f"model={spec.name}: {type(model).__name__}, which has no file here, cannot be used"
        if missing:
            raise UserError(f"{where}: it lacks {', '.join(missing)}")
        check_text_config(decoder.config, where)


def _holds(gap: Sequence[int], marks: Sequence[int]) -> bool:
    """Return whether all marks are in a gap, in their order."""
    remaining = iter(gap)
    return all(mark in remaining for mark in marks)
