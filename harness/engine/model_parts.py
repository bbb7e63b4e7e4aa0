"""The engine's interface to a loaded model: its modules, the halves of a tower block, the contents of its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.harness.cost.facts import CanvasFacts, ModelFacts
from espalier.harness.engine.engine_guards import check_full
from espalier.harness.engine.layout import Layout, VisualItem, read_layout
from espalier.harness.engine.pixels import PixelGrids, coarse
from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import ModelSpec, Separators

if TYPE_CHECKING:
    # Imports transformers, which a finished run does without.
    from espalier.harness.engine.layer_inputs import LayerTypes
    from espalier.harness.specs.generation import CanvasSettings


class ModelParts(ABC):
    """The parts of a loaded model. A family implements the abstract methods; the other defaults fit most models."""

    model: Any
    processor: Any
    spec: ModelSpec
    facts: ModelFacts

    @property
    def decoder(self) -> Any:
        """The text stack: a module with `.layers`, `.config` and the keyword arguments of a decoder."""
        return self.model.model.language_model

    @property
    def canvas(self) -> Any:
        """The stack that denoises canvases against the decoder's cache, layer by layer; None: there is none."""
        return None

    def canvas_config(self, settings: CanvasSettings) -> Any:
        """Return the library's settings of an answer on canvases; None: there are none."""
        return None

    @property
    def canvas_facts(self) -> CanvasFacts | None:
        """The sizes of a canvas; None: there is none."""
        return None

    @property
    def layer_types(self) -> LayerTypes | None:
        """The types of the decoder's layers; None if masks and tables of all layers are alike."""
        return None

    def holds_prompt(self, layer: int) -> bool:
        """Return whether a decoder layer's cache has an entry for every token of a prompt."""
        slides = self.layer_types is not None and self.layer_types.slides(layer)
        return not slides and not self.facts.text.is_linear(layer)

    def decoder_attention(self, layer: int) -> nn.Module:
        """Return the attention of a decoder layer.

        Raises:
            MethodError: the layer has linear attention; the line names the nearest layers that have scores.
        """
        check_full(self.facts.text, layer)
        attention: nn.Module = self.decoder.layers[layer].self_attn
        return attention

    @property
    def tower(self) -> nn.Module:
        """The vision tower (the clock of the vision phase starts with it)."""
        tower: nn.Module = self.model.model.vision_tower
        return tower

    @property
    def projector(self) -> nn.Module:
        """The module that maps tower features to the decoder's width, unit by unit."""
        projector: nn.Module = self.model.model.multi_modal_projector
        return projector

    @property
    def vision_end(self) -> nn.Module:
        """The module that ends the vision phase; default: the projector, which each call of the tower calls once."""
        return self.projector

    @abstractmethod
    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention module of a tower layer; None means the layer that feeds the projector."""

    def tower_layers(self) -> nn.ModuleList:
        """Return all layers of the tower, from the one module list that contains the attention."""
        attention = self.tower_attention(None)
        for module in self.tower.modules():
            if isinstance(module, nn.ModuleList) and any(
                attention in layer.modules() for layer in module
            ):
                return module
        raise ValueError(f"{type(self.tower).__name__} has no list of layers")

    def tower_windows(self) -> int:
        """Return the number of tower layers with attention inside windows."""
        return 0

    def stem_layers(self) -> Sequence[Any]:
        """Return the layers of the stack that runs before the tower, if any."""
        return ()

    def stem_joins(self) -> int:
        """Return the tokens of the stem that one step between it and the tower joins; 0: there is none."""
        return 0

    def image_tokens(self) -> int | None:
        """Return the visual tokens of every image; None if they depend on its shape."""
        return None

    def deepstack(self) -> Mapping[int, nn.Module]:
        """Return, by tower layer, the projectors with outputs that the decoder's first layers add to visual tokens."""
        return {}

    def unread_blocks(self) -> Sequence[nn.Module]:
        """Return the tower's blocks after the one that the projector reads, in order."""
        return ()

    def tower_blocks(self) -> Sequence[TowerBlock]:
        """Return the tower's blocks in two halves each, up to the one that the projector reads.

        Raises:
            UserError: methods cannot act inside this tower.
        """
        raise UserError(
            f"model={self.spec.name!r} has visual tokens that are not its tower's patches one to one; a method that "
            "acts inside the tower needs model.facts.patch_tokens=true"
        )

    def pooling_attention(self) -> nn.MultiheadAttention:
        """Return the attention with one learned query by which a head pools the tower's output.

        Raises:
            UserError: this tower has no such head.
        """
        raise UserError(
            f"model.facts.class_attention='probe' needs a tower with an attention-pooling head, "
            f"model={self.spec.name!r} has none; valid: mean"
        )

    def to_units(self, values: Tensor) -> Tensor:
        """Turn per-patch values (images, patches, ...) of one tower call into per-unit ones (units, ...)."""
        return values.flatten(0, 1)

    def features(self, projector_input: Tensor) -> Tensor:
        """Return the projector's input as (units, D)."""
        return projector_input.flatten(0, -2)

    def project(self, features: Tensor) -> Tensor:
        """Project (units, D) features to (units, D_text)."""
        projected: Tensor = self.projector(features.unsqueeze(0))
        return projected.squeeze(0)

    @abstractmethod
    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Describe a batch's images and videos, in the order of their placeholders, for each placeholder id.

        Units are numbered over all calls of the projector in their order.
        """

    def layout(self, inputs: Mapping[str, Any], separators: Separators = "keep") -> Layout:
        """Read visual positions, grid coordinates and projector units from encoded inputs.

        With `separators="candidates"` newline and separator tokens are visual tokens as well, with no place in the grid
        and no units.
        """
        valid = inputs["attention_mask"].bool()
        return read_layout(inputs["input_ids"], valid, self.items(inputs), separators)

    def without_pixels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch's inputs without pixels: enough for its prompts and their positions."""
        return {name: value for name, value in inputs.items() if not name.startswith("pixel_")}

    def coarse_inputs(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return a batch's inputs with pictures of the same size that have the detail of a share of their pixels."""
        return {
            name: coarse(value, share) if name.startswith("pixel_") else value
            for name, value in inputs.items()
        }

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the pixels that the tower sees, cell by cell in the order of the projector's units.

        Raises:
            UserError: this family's pixels are not images of one size with cells that are units.
        """
        del inputs
        raise UserError(
            f"signal 'luma' needs images with cells that are visual tokens, model={self.spec.name!r} has none "
            "(model.facts.lacking)"
        )

    def colours(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return mean and standard deviation by which the processor normalises pixels."""
        images = self.processor.image_processor
        return tuple(images.image_mean), tuple(images.image_std)

    @property
    def answer_lead(self) -> str:
        """The tag by which prompts open the reasoning of answers; "" for prompts without one."""
        return ""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        end_ids = self.model.generation_config.eos_token_id
        return () if end_ids is None else (end_ids,) if isinstance(end_ids, int) else tuple(end_ids)

    @property
    def device(self) -> torch.device:
        """Device of the first parameter, where inputs go."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that computes: all GPUs with parameters, else the one of the first parameter."""
        devices = dict.fromkeys(parameter.device for parameter in self.model.parameters())
        return tuple(device for device in devices if device.type == "cuda") or (self.device,)


class TowerBlock:
    """One pre-norm block: `attend`, then `transform`, compute its forward.

    Args:
        module: the block.
    """

    def __init__(self, module: Any) -> None:
        self.module: nn.Module = module
        self.attention: nn.Module = module.self_attn
        self._block = module

    @property
    def kernel(self) -> str:
        """Name of the attention implementation."""
        return str(self._block.self_attn.config._attn_implementation)

    def attend(self, hidden: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Return the residual stream (P, S, D) after the attention; `mask` is added to its logits."""
        states = self._block.layer_norm1(hidden)
        mixed: Tensor = self._block.self_attn(hidden_states=states, attention_mask=mask, **kwargs)[
            0
        ]
        return hidden + mixed

    def values(self, hidden: Tensor) -> Tensor:
        """Return (P, H, S, Dh) the values that the attention computes from the residual stream (P, S, D)."""
        attention = self._block.self_attn
        flat = attention.v_proj(self._block.layer_norm1(hidden))
        values: Tensor = flat.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        return values

    def transform(self, hidden: Tensor) -> Tensor:
        """Return the residual stream (P, S, D) after the MLP."""
        states: Tensor = hidden + self._block.mlp(self._block.layer_norm2(hidden))
        return states


@contextmanager
def replaced_forwards(
    pairs: Iterable[tuple[nn.Module, Callable[..., Any]]],
) -> Iterator[None]:
    """Let functions run in place of the forwards of their modules inside the block.

    Where a model is spread over several cards, the functions get their arguments on the module's card.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    for module, forward in pairs:
        attributes = vars(module)
        # accelerate's forward moves the arguments, and then calls the module's own by this name.
        name = "_old_forward" if "_hf_hook" in attributes else "forward"
        saved.append((attributes, name, attributes.get(name)))
        attributes[name] = forward
    try:
        yield
    finally:
        for attributes, name, former in saved:
            del attributes[name]
            if former is not None:
                attributes[name] = former
