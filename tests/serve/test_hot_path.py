"""What choosing adds to a batch of pictures on a card: kernels, waits of the host and sends, against the encoder's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from espalier.harness.tools.rehearsal.simulated_cards import SimulatedCards
from espalier.serve import setting as settings
from espalier.serve.families import FAMILIES, Family
from espalier.serve.model import PrunedModel
from espalier.serve.places import Places, Tower, item, rectangle
from espalier.serve.processor import shortened
from espalier.serve.setting import Setting, decode
from tests.serve.stubs import ModelConfig, llava_config, put_module
from tests.serve.test_model import NAME, WIDTH
from tests.serve.test_signals import HEADS, Attention

#: Channels of a head of `Attention`.
HEAD = 4


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    put_module(monkeypatch, "vllm.distributed", get_tensor_model_parallel_world_size=lambda: 1)


def stitched() -> Places:
    """Five views of LLaVA-NeXT, a newline after each 60 tokens."""
    prunable = torch.arange(2880 + 48) % 61 < 60
    grid = torch.cat([rectangle(1, 24, 24, view) for view in range(5)])
    return item(grid, units=len(grid), prunable=prunable)


PLACES: dict[int, Callable[[], Places]] = {
    576: lambda: item(rectangle(1, 24, 24)),
    2880: stitched,
    25088: lambda: item(rectangle(32, 28, 28)),
}


class Encoder:
    """vLLM's model on a card: pictures pass two layers with attention, and the projector."""

    def __init__(self, places: Places, pictures: int) -> None:
        self.architecture, self.channelled, self.config = NAME, True, llava_config()
        self.stopwatch = SimpleNamespace(running=torch.no_grad, end_batch=lambda: None)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.projector = nn.Identity()
        shapes = ((len(places.prunable), WIDTH), (places.units, WIDTH))
        shapes += ((places.units + 1, HEADS * HEAD),)
        self.tokens, self.units, self.states = (
            torch.rand(pictures, *shape).to("cuda") for shape in shapes
        )
        self.word_embeddings = torch.rand(20, WIDTH).to("cuda").__getitem__

    def embed_multimodal(self) -> list[Tensor]:
        for layer in self.layers:
            layer(self.states, key=self.states, value=self.states)
        self.projector(self.units)
        return [*self.tokens]


class Model(PrunedModel, Encoder):
    """As the plug-in builds it."""


def tower_of(model: Any) -> Tower:
    return Tower(
        layers=model.layers,
        compiled=(),
        depth=3,
        class_tokens=1,
        entry=model.projector,
        projector=model.projector,
        square=1,
        to_units=lambda values: values.flatten(0, 1),
    )


def cost(
    patch: pytest.MonkeyPatch, method: str, tokens: int, pictures: int = 1
) -> tuple[int, int, int]:
    """Kernels, waits and sends of choosing 64 tokens of each picture of a batch."""
    places = PLACES[tokens]()
    patch.setitem(FAMILIES, NAME, Family("llava", NAME, lambda *_: places, tower_of))
    total = len(places.prunable)
    question = (1, 2, 3) if method == "cdpruner" else ()
    fields = shortened(
        *(ModelConfig(llava_config()), "image", {}, [9] * total),
        torch.ones(total, dtype=torch.bool),
        Setting(method, keep=64),
        question,
    ).fields
    with SimulatedCards() as cards:
        model = Model(places, pictures)
        before = (cards.kernels, cards.reads + cards.waits, cards.uploads)
        model.embed_multimodal(**{name: [value] * pictures for name, value in fields.items()})
        after = (cards.kernels, cards.reads + cards.waits, cards.uploads)
    kernels, waits, sends = (end - begin for begin, end in zip(before, after, strict=True))
    return kernels, waits, sends


@cache
def encoder_kernels() -> int:
    """Of the layers of LLaVA's tower that run, as transformers computes them; as many for any number of tokens."""
    config = CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=23
    )
    tower = CLIPVisionModel(config)
    with SimulatedCards() as cards:
        for module in tower.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = tensor.detach().to("cuda")
        picture = torch.rand(1, 3, 224, 224).to("cuda")
        before = cards.kernels
        with torch.no_grad():
            tower(picture)
    return cards.kernels - before


#: Most kernels of a picture, and waits of the host: one for the conditions of a batch, and the method's own.
CEILINGS = {
    "random": (67, 1),
    "uniform": (119, 1),
    "fastervlm": (122, 1),
    "visionzip": (102, 1),
    "divprune": (356, 2),
    "cdpruner": (790, 1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("method", CEILINGS)
def test_choosing_waits_once_and_starts_as_few_kernels(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, waits = CEILINGS[method]
    # Picks one after another, and similarities of all pairs, take long on a simulated card.
    slow = method in ("divprune", "cdpruner")
    for tokens in (576, 2880) if slow else PLACES:
        spent = cost(monkeypatch, method, tokens)
        assert spent[0] <= kernels
        assert spent[1] <= waits
        assert spent[2] <= 5
        assert slow or spent[0] < encoder_kernels() / 4
    # Pictures that are alike are chosen together.
    single, batch = (cost(monkeypatch, method, 576, pictures) for pictures in (1, 3))
    assert (batch[0] < 1.3 * single[0] + 9, batch[1]) == (True, waits)


def test_a_method_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = settings.build
    monkeypatch.setattr(settings, "build", lambda *names: built.append(names) or build(*names))
    for number in range(3):
        setting = Setting("cdpruner", {"relevance": "none"}, keep=4, sample=f"a/{number}")
        assert not setting.reads_words(32)
        assert decode(setting.encode()).reducer is setting.reducer
    assert len(built) <= 1
    with pytest.raises(settings.SettingError, match="is no JSON; valid: hyper-parameters by name"):
        Setting("cdpruner", {"relevance": {"none"}}).sites(32)
