"""The input of a method: where it acts, what it reads there, and the tensors that it gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

Where = Literal["tower", "vision", "prefix", "layer", "block", "cache", "decode"]

#: Kinds of site that take effect on the input of decoder layer 0.
BEFORE_DECODER: tuple[Where, ...] = ("tower", "vision", "prefix")


class MethodError(ValueError):
    """A method cannot work with these hyper-parameters or on this model."""


@dataclass(frozen=True)
class Site:
    """A place where a method acts.

    `tower` is the inside of the vision tower's block `layer` (0-based), between its attention and its MLP, or the input
    of block 0 for `layer` -1; `vision` is the tower's output before the projector, `prefix` the projected tokens before
    decoder layer 0, `layer` the hidden states that enter decoder layer `layer` (0-based: layers 0..layer-1 still see
    every token), `block` the inside of decoder layer `layer`, between its attention, which still sees every token, and
    its MLP, `cache` the key-value cache after prefill, `decode` the generation loop: for a token reducer the steps in
    which one new token enters decoder layer `layer`, when the layers below still see every entry of the cache.

    `stage` counts the sites of a method that acts in another way at each; the engine does not read it.
    """

    where: Where
    layer: int = 0
    stage: int = field(default=0, repr=False)

    @property
    def shortens(self) -> int | None:
        """The decoder layer that gets a shorter input: 0 for sites before it; None: the prompt stays whole."""
        if self.where in BEFORE_DECODER:
            return 0
        if self.where == "block":
            return self.layer + 1
        return self.layer if self.where == "layer" else None

    @property
    def in_tower(self) -> bool:
        """Whether it is inside the vision tower."""
        return self.where == "tower"

    @property
    def on_features(self) -> bool:
        """Whether it is between tower and projector."""
        return self.where == "vision"


@dataclass(frozen=True)
class Need:
    """A signal that must be in the view. `layer=None` means the default layer.

    For attention signals that is the decoder layer just before the site; for tower signals the layer that feeds the
    projector. With a `depth`, `layer` is meant for a tower of so many layers, and another tower's layer at the
    same share of its depth is read.
    """

    signal: str
    layer: int | None = None
    depth: int | None = None

    @property
    def key(self) -> str:
        """Name of the tensor in `View.signals`."""
        share = "" if self.depth is None else f"/{self.depth}"
        return self.signal if self.layer is None else f"{self.signal}@{self.layer}{share}"


class _Signals(dict[str, Tensor]):
    """The signals of a view; the error for a missing one lists those that `needs` requests."""

    def __missing__(self, key: str) -> Tensor:
        raise KeyError(f"view.signals has no {key!r}; valid: {_signals(self)}")


def _signals(names: Iterable[str]) -> str:
    keys = ", ".join(repr(key) for key in names) or "none"
    return (
        f"view.signals[...] holds what `needs` asks for, here {keys} "
        "(return (Need(name),) there; names in docs/methods.md)"
    )


@dataclass(frozen=True)
class View:
    """What a method may read at one site. Rectangular: all B rows have the same number N of visual tokens.

    At `tower` sites a row is a picture (an image, a crop, a frame), a token is a slot of the tower, and a class token
    is never among them. The engine groups the rows of a batch by their token count and budget, so a method never meets
    padding.

    Every tensor of a view is on the device of `tokens`: signals, masks and tables too, on however many cards the model
    lies. Signals of several layers, and of the tower, meet there: `Signals.collect` moves them, and nothing else does.
    A method moves nothing, and returns its plan on that device.

    Attributes:
        site: where the method acts.
        tokens: (B, N, D) visual tokens as they stand at the site, in sequence order.
        grid: (B, N, 4) integer coordinates of each token: image or frame, view, row, column. Views are an image's
            global view (0), its stitched crops (1), or its single tiles where a model does not stitch them. Tokens of
            one view stand together and fill one rectangle.
        signals: tensors requested through `TokenReducer.needs`, by `Need.key`.
        generators: of a method that `draws`, one CPU `torch.Generator` for each row, seeded by (run seed, sample); the
            only source of chance.
        step: denoising step of a diffusion model, 0 otherwise.
    """

    site: Site
    tokens: Tensor
    grid: Tensor
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    generators: Sequence[torch.Generator] = ()
    step: int = 0

    if not TYPE_CHECKING:  # or any name would be an attribute to a type checker

        def __getattr__(self, name: str) -> Any:
            """Raise an error that lists the fields: signals are in `signals`."""
            valid = ", ".join(field.name for field in fields(View))
            signals = _signals(self.__dict__.get("signals", ()))
            raise AttributeError(f"View has no {name!r}; valid: {valid}; {signals}")

    def __post_init__(self) -> None:
        """Raise MethodError unless the grid has one place for each token."""
        object.__setattr__(self, "signals", _Signals(self.signals))
        if self.grid.shape != (*self.tokens.shape[:2], 4):
            raise MethodError(
                f"a grid {tuple(self.grid.shape)} does not match tokens {tuple(self.tokens.shape)}"
            )
