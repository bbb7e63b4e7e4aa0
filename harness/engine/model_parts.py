"""The engine's interface to a loaded model: its modules, halves of a tower block, contents and pixels of its inputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, unfold
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.facts import CanvasFacts, ModelFacts
from espalier.harness.engine.engine_guards import check_full
from espalier.harness.engine.layer_inputs import LayerTypes
from espalier.harness.engine.layout import Layout, VisualItem, read_layout
from espalier.harness.errors import UserError
from espalier.harness.specs.generation import CanvasSettings
from espalier.harness.specs.run_spec import ModelSpec, Separators


class ModelParts(ABC):
    """The parts of a loaded model. A family implements the abstract methods; the other defaults fit most models."""

    model: Any
    processor: Any
    spec: ModelSpec
    facts: ModelFacts

    @property
    def generate(self) -> Callable[..., Any]:
        """The class's own `generate`: that of the instance leads to the engine inside a user's block."""
        return partial(type(self.model).generate, self.model)

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The text stack: a module with `.layers`, `.config` and the keyword arguments of a decoder."""

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
    @abstractmethod
    def layer_types(self) -> LayerTypes | None:
        """The types of the decoder's layers; None if masks and tables of all layers are alike."""

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
        return cast("nn.Module", self.decoder.layers[layer].self_attn)

    @property
    @abstractmethod
    def tower(self) -> nn.Module:
        """The vision tower (the clock of the vision phase starts with it)."""

    @property
    @abstractmethod
    def projector(self) -> nn.Module:
        """The module that maps tower features to the decoder's width, unit by unit."""

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
        raise UserError(
            f"signal 'luma' needs images with cells that are visual tokens, model={self.spec.name!r} has none "
            "(model.facts.lacking)"
        )

    def colours(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return mean and standard deviation by which the processor normalises pixels."""
        images = self.processor.image_processor
        return tuple(images.image_mean), tuple(images.image_std)

    @property
    @abstractmethod
    def answer_lead(self) -> str:
        """The tag by which prompts open the reasoning of answers; "" for prompts without one."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return ends_of(self.model.generation_config)

    @property
    def device(self) -> torch.device:
        """Device of the first parameter, where inputs go."""
        return cast("torch.device", next(self.model.parameters()).device)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that computes: all GPUs with parameters, else the one of the first parameter."""
        devices = dict.fromkeys(parameter.device for parameter in self.model.parameters())
        return tuple(device for device in devices if device.type == "cuda") or (self.device,)


def ends_of(generation: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer under a generation configuration."""
    ends = generation.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


class TowerBlock:
    """One pre-norm block: `attend`, then `transform`, compute its forward.

    Args:
        module: the block.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.attention = module.self_attn

    def attend(self, hidden: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Return the residual stream (P, S, D) after the attention; `mask` is added to its logits."""
        states = self.module.layer_norm1(hidden)
        mixed: Tensor = self.attention(hidden_states=states, attention_mask=mask, **kwargs)[0]
        return hidden + mixed

    def values(self, hidden: Tensor) -> Tensor:
        """Return (P, H, S, Dh) the values that the attention computes from the residual stream (P, S, D)."""
        flat = self.attention.v_proj(self.module.layer_norm1(hidden))
        return cast("Tensor", flat.unflatten(2, (self.attention.num_heads, -1)).transpose(1, 2))

    def transform(self, hidden: Tensor) -> Tensor:
        """Return the residual stream (P, S, D) after the MLP."""
        added: Tensor = self.module.mlp(self.module.layer_norm2(hidden))
        return hidden + added


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


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and their handles from the list."""
    while handles:
        handles.pop().remove()


class StopForward(BaseException):
    """Ends a model's forward early. Not an error: nothing may catch it inside the model."""


@contextmanager
def hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks after the block."""
    try:
        yield
    finally:
        remove_hooks(handles)


#: ITU-R BT.601.
RED, GREEN, BLUE = 0.299, 0.587, 0.114


@dataclass(frozen=True, eq=False)
class PixelGrids:
    """Normalised pixels as the tower gets them, and their division into the projector's units.

    Attributes:
        pixels: (n, 3, H, W) each, in the order of the projector's calls. Their cells, image by image in raster order,
            are its units.
        cells: cells along an edge of each; images are square.
        side: pixels along the edge of a cell.
        mean: of each colour, by which pixels in [0, 1] were normalised.
        std: standard deviation of each colour.
    """

    pixels: Sequence[Tensor]
    cells: Sequence[int]
    side: int
    mean: Sequence[float]
    std: Sequence[float]

    def luma(self) -> Tensor:
        """Return (units, side + 2, side + 2) luma in [-1, 1]: cells with a border of one pixel, 0 outside an image.

        Cost: O(pixels), and about as much memory again in fp32.
        """
        cells = [
            _cells(self._luma(pixels), count, self.side)
            for pixels, count in zip(self.pixels, self.cells, strict=True)
        ]
        return torch.cat(cells)

    def _luma(self, pixels: Tensor) -> Tensor:
        """Return (n, H, W) luma of normalised pixels."""
        wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
        mean, std = wide.new_tensor(self.mean), wide.new_tensor(self.std)
        weight = wide.new_tensor((RED, GREEN, BLUE))
        scale, shift = 2 * weight * std, (weight * (2 * mean - 1)).sum()
        return (wide * scale.view(-1, 1, 1)).sum(dim=1) + shift


def _cells(luma: Tensor, count: int, side: int) -> Tensor:
    """Cut (n, H, W) into (n * count^2, side + 2, side + 2) overlapping cells in raster order."""
    height, width = (count * side - size for size in luma.shape[1:])
    # Patches that do not fill the image leave out pixels at the right and at the bottom (negative padding).
    framed = pad(luma, (1, 1 + width, 1, 1 + height))
    return framed.unfold(1, side + 2, side).unfold(2, side + 2, side).flatten(0, 2)


#: Both ways, with a low-pass filter in reducing: what image processors do.
resize = partial(interpolate, mode="bicubic", antialias=True, align_corners=False)


def coarse(pixels: Tensor, share: float) -> Tensor:
    """Return pixels (..., C, H, W) with the detail of pictures of sqrt(share) H x sqrt(share) W, at least 1 x 1.

    Cost: O(pixels), in fp32 for narrower types.
    """
    size = pixels.shape[-2:]
    small = [max(1, round(math.sqrt(share) * edge)) for edge in size]
    wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
    flat = wide.reshape(-1, *pixels.shape[-3:])
    enlarged: Tensor = resize(resize(flat, size=small), size=size)
    return enlarged.view(pixels.shape).to(pixels.dtype)


class PatchPixels:
    """Holds the pixels of the running tower call, as (P, N, F) numbers in [0, 1].

    Args:
        tower: its first convolution cuts pictures into patches.
        mean: of each colour, by which pixels in [0, 1] were normalised.
        std: standard deviation of each colour.
    """

    def __init__(self, tower: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        self._embedding = next(part for part in tower.modules() if isinstance(part, nn.Conv2d))
        self._mean, self._std = mean, std
        self.pixels: Tensor

    def open(self) -> RemovableHandle:
        """Watch the convolution until the handle is removed."""
        return self._embedding.register_forward_pre_hook(self._store)

    def _store(self, embedding: nn.Conv2d, arguments: tuple[Tensor]) -> None:
        pictures = arguments[0].to(torch.promote_types(arguments[0].dtype, torch.float32))
        std, mean = (
            pictures.new_tensor(values).view(-1, 1, 1) for values in (self._std, self._mean)
        )
        patches = unfold(pictures * std + mean, embedding.kernel_size, stride=embedding.stride)
        self.pixels = patches.transpose(1, 2)
