"""Tiny random models of the real architectures, saved to disk and loaded the way a real checkpoint is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import build_adapter, build_skeleton, random_processor
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.random_weights import build_random, byte_tokenizer
from espalier.harness.specs.run_spec import ModelSpec
from espalier.methods.base import Assignment, Need, Plan, Site, TokenReducer, View
from tests import commands

DEPTH = 5
VOCABULARY = 288
IMAGE = 28

TEXT = StackFacts(DEPTH, 32, 48, 4, 2, 8, gated=True, causal=True)
TOWER = StackFacts(2, 32, 48, 4, 4, 8, gated=False, causal=False)


def tiny_spec(adapter: str, **changes: Any) -> ModelSpec:
    """The spec of a tiny model of a family; facts are given by name among the changes."""
    facts = ModelFacts(
        text=changes.pop("text", TEXT),
        tower=changes.pop("tower", TOWER),
        stem=changes.pop("stem", None),
        projector=changes.pop("projector", (32, 32, 32)),
        vocabulary=VOCABULARY,
        visual_tokens=16,
        class_attention=changes.pop("class_attention", "token"),
        rotary_axes=changes.pop("rotary_axes", 1),
        signals=frozenset(SIGNALS),
        diffusion=changes.pop("diffusion", None),
        stem_joins=changes.pop("stem_joins", 0),
    )
    spec = ModelSpec(
        name="tiny",
        adapter=adapter,
        path=None,
        hub=None,
        revision=None,
        dtype="float32",
        attention="sdpa",
        weights="random",
        device="cpu",
        facts=facts,
    )
    return replace(spec, **changes)


def model_of(*overrides: str) -> ModelSpec:
    """The model's part of the run that a command line describes."""
    return commands.spec_of(*overrides).model


def clip_architecture(**model: Any) -> dict[str, Any]:
    return {
        "unused_layers": 1,
        "vision": {"image_size": IMAGE, "patch_size": 7, "projection_dim": 32},
        "model": {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", **model},
    }


def causal(visual: torch.Tensor, layer: int) -> torch.Tensor:
    """Return (L, L): each token sees those up to itself; `visual` (L,) changes nothing."""
    return torch.ones(len(visual), len(visual), dtype=torch.bool).tril()


@dataclass(frozen=True)
class Family:
    """One family and one way of feeding it: its spec, and three chats that need left padding.

    Attributes:
        sees: maps which tokens (L,) are visual, and a decoder layer, to what each token sees (L, L).
        most: entries that each decoder layer's cache holds at most.
        exact: largest difference of logits in double precision, as a share of the largest.
        states: bytes of a sample's states of linear attention in fp64.
    """

    spec: ModelSpec
    chats: tuple[list[dict], ...]
    sees: Callable[[torch.Tensor, int], torch.Tensor] = causal
    most: tuple[float, ...] = (float("inf"),) * DEPTH
    exact: float = 1e-9
    states: int = 0

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Decoder layers with attention, in the order of the library's attention maps."""
        return self.spec.facts.text.full_layers


def random_model(spec: ModelSpec) -> Any:
    """The model of a spec with random weights."""
    adapter = ADAPTERS.load(spec.adapter)
    tokenizer = byte_tokenizer(adapter.data.special)
    config = adapter.configuration(spec, tokenizer)
    return build_random(adapter.data.model_class, config, tokenizer, spec)


def full_model(spec: ModelSpec) -> Any:
    """The model of a spec at full size, without weights."""
    family = ADAPTERS.load(spec.adapter)
    config = family.configuration(spec, byte_tokenizer(family.data.special))
    return build_skeleton(family.class_of(config), config, spec)


def sharpen(model: Any) -> None:
    """Make random weights matter: attention that is not nearly uniform, biases and norms that are not constant."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)  # the same model in every run: what fails once fails again
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # or linear layers forget a picture within a few words
                parameter.sub_(4.0)
            elif parameter.dim() >= 2 and parameter.any():  # Gemma's projector is zero when fresh
                parameter.mul_(6.0)
            elif parameter.std() == 0:  # constant when fresh; newlines may be empty
                parameter.add_(torch.randn_like(parameter) * 0.1)


def save_tiny(spec: ModelSpec, folder: Path) -> Path:
    """Save a tiny model with real processor and tokenizer; its attention is sharper than the nearly uniform default."""
    model = random_model(spec)
    processor = random_processor(ADAPTERS.load(spec.adapter), spec)
    sharpen(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def load_tiny(
    spec: ModelSpec, folder: Path, dtype: str = "float64", attention: str = "sdpa"
) -> Adapter:
    """Load through the adapter, as a real checkpoint would be."""
    spec = replace(spec, path=folder, dtype=dtype, attention=attention, weights="trained")
    adapter = build_adapter(ADAPTERS.load(spec.adapter), spec)
    if adapter.facts.text.experts and (dtype == "float64" or attention == "eager"):
        # The grouped kernel of real runs has no double precision, and torch's counter does not see it.
        adapter.model.set_experts_implementation("eager")
    return adapter


LLAVA = tiny_spec("llava", architecture=clip_architecture(image_seq_length=16))


def save_llava(folder: Path) -> Path:
    return save_tiny(LLAVA, folder)


def load_llava(folder: Path, dtype: str = "float64", attention: str = "sdpa") -> Adapter:
    return load_tiny(LLAVA, folder, dtype, attention)


def picture(seed: int, width: int = IMAGE, height: int = IMAGE) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def chat(text: str, *media: Any) -> list[dict]:
    """One user turn with an image for each seed or picture, then the text."""
    images = [
        {"type": "image", "image": picture(medium) if isinstance(medium, int) else medium}
        for medium in media
    ]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


#: Three rows that need left padding: other text lengths, and two images in the second.
CHATS = [chat("w1 w2 w3", 0), chat("w4", 1, 2), chat("w5 w6 w7 w8 w9", 3)]

#: Rows of other shapes and token counts, for families whose token count follows the image.
SHAPES = [
    chat("w1 w2 w3", picture(0, 50, 40)),
    chat("w4", picture(1, 28, 56), picture(2, 60, 30)),
    chat("w5 w6 w7 w8 w9", picture(3, 56, 25)),
]


@dataclass(frozen=True)
class Scatter(TokenReducer):
    """A test reducer for any sites: keeps tokens by a hash of their coordinates; optionally merges the rest.

    `where` holds one entry for each site: "vision", "prefix" or a layer number.
    """

    where: tuple[str | int, ...] = ("prefix",)
    merge: bool = False

    def sites(self, depth: int) -> tuple[Site, ...]:
        return tuple(
            Site("layer", place) if isinstance(place, int) else Site(place) for place in self.where
        )

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        return tuple(share ** ((n + 1) / n_sites) for n in range(n_sites))

    def plan(self, view: View, keep: int) -> Plan:
        image, _, row, column = view.grid.unbind(-1)
        order = (image * 7 + row * 5 + column * 11 + row * column * 3) % 17
        kept = order.argsort(dim=1, stable=True)[:, :keep].sort(dim=1).values
        if not self.merge:
            return Plan(kept)
        n_tokens = view.tokens.shape[1]
        slot = torch.searchsorted(
            kept, torch.arange(n_tokens).expand(kept.shape[0], -1).contiguous()
        )
        slot = slot.clamp(max=keep - 1)
        return Plan(kept, Assignment(slot, torch.full(slot.shape, 0.5)))


@dataclass(frozen=True)
class Recorder(TokenReducer):
    """Keeps a fixed prefix of the tokens at every site and remembers what it was shown."""

    where: tuple[Site, ...] = (Site("layer", 2),)
    wants: tuple[Need, ...] = (Need("last_attention"),)
    views: list = field(default_factory=list, compare=False)

    def sites(self, depth: int) -> tuple[Site, ...]:
        return self.where

    def needs(self, site: Site) -> tuple[Need, ...]:
        return self.wants

    def plan(self, view: View, keep: int) -> Plan:
        self.views.append(view)
        return Plan(torch.arange(keep).expand(view.tokens.shape[0], -1))
