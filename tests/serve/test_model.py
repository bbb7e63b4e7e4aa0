"""The model's half of the plug-in over a stub of vLLM's model: the tokens that stay, and their positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.methods.base import Site, View
from espalier.serve import digits
from espalier.serve.clock import Stopwatch
from espalier.serve.families import FAMILIES, Family
from espalier.serve.model import PrunedModel, tower_name
from espalier.serve.places import item, rectangle
from espalier.serve.processor import LAYOUT, shortened
from espalier.serve.setting import Setting
from tests.serve.stubs import ModelConfig, llava_config, put_module, split

WIDTH, PATCHES = 8, 16

NAME = "LlavaForConditionalGeneration"


class Base:
    """vLLM's model: pictures (n, 16, 8) pass the projector, which doubles them."""

    def __init__(self, channelled: bool = True) -> None:
        self.architecture, self.channelled = NAME, channelled
        self.config = llava_config()
        self.stopwatch = Stopwatch()
        self.word_embeddings = nn.Embedding(20, WIDTH)
        self.multi_modal_projector = Doubling()
        self.vision_tower = SimpleNamespace()

    def modules(self) -> Any:
        return iter([nn.Identity()] * 3)

    def embed_multimodal(self, pixel_values: Tensor) -> list[Tensor]:
        return [*self.multi_modal_projector(pixel_values)]

    def load_weights(self, weights: Any) -> list[str]:
        return [name for name, _ in weights]


class Doubling(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * 2


class Model(PrunedModel, Base):
    """As the plug-in builds it."""


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    attention = {"MMEncoderAttention": nn.Identity}
    put_module(monkeypatch, "vllm.model_executor.layers.attention", **attention)
    return torch.randn(2, PATCHES, WIDTH, generator=torch.Generator().manual_seed(0))


def fields_of(*settings: Setting, question: tuple[int, ...] = ()) -> dict[str, list[Tensor]]:
    """Fields of one picture for each setting, as the processor's half writes them."""
    config = ModelConfig(llava_config())
    embedded = torch.ones(PATCHES, dtype=torch.bool)
    items = [
        shortened(config, "image", {}, [9] * PATCHES, embedded, setting, question).fields
        for setting in settings
    ]
    return {name: [entry[name] for entry in items] for name in items[0]}


def plan_of(setting: Setting, features: Tensor) -> list[int]:
    """The tokens that a method keeps, straight from its class."""
    (site,) = setting.sites(3)
    view = View(
        site=Site(site.where),
        tokens=features[None],
        grid=rectangle(1, 4, 4)[None],
        signals={need.key: features[None] for need in setting.reducer.needs(site)},
        generators=[setting.generator()],
    )
    return setting.reducer.answer(view, setting.kept(PATCHES)).kept[0].tolist()


def test_each_picture_keeps_the_tokens_of_its_setting(pictures: Tensor) -> None:
    settings = (Setting("divprune", keep=5), Setting("random", keep=3, sample="a"))
    for channelled in (True, False):
        outcome = Model(channelled).embed_multimodal(pixel_values=pictures, **fields_of(*settings))
        for picture, setting, embeddings in zip(pictures, settings, outcome, strict=True):
            kept = plan_of(setting, picture * 2)
            assert torch.equal(embeddings[:, :WIDTH], (picture * 2)[kept])
            assert embeddings.shape[1] == WIDTH + channelled * digits.WIDTH
            if channelled:
                numbers = split(embeddings)[1]
                assert numbers.tolist() == [[place, place, place, PATCHES] for place in kept]


@pytest.mark.parametrize("method", ["divprune", "random", "rtprune", "cdpruner"])
@pytest.mark.parametrize(("most", "calls"), [(2**24, [4, 1]), (2 * PATCHES**2, [2, 2, 1])])
def test_pictures_that_are_alike_are_chosen_in_one_call(
    method: str, most: int, calls: list[int], pictures: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the batch go by themselves, and each picture keeps what it keeps alone."""
    pictures = torch.cat([pictures, pictures + 1, pictures * 3])
    settings = [Setting(method, keep=5, sample=name) for name in "abab"]
    settings[1:1], settings[4:4] = [Setting()], [Setting(method, keep=4)]
    monkeypatch.setattr("espalier.serve.model.PAIRS", most)
    kind, sizes = type(settings[0].reducer), []
    monkeypatch.setattr(
        kind,
        "answer",
        lambda *args, answer=kind.answer: sizes.append(len(args[1].tokens)) or answer(*args),
    )
    question = (1, 2, 3) if method == "cdpruner" else ()
    model, fields = Model(), fields_of(*settings, question=question)
    together = model.embed_multimodal(pixel_values=pictures, **fields)
    assert sizes == calls
    for number, embeddings in enumerate(together):
        item_fields = {name: values[number : number + 1] for name, values in fields.items()}
        (expected,) = model.embed_multimodal(
            pixel_values=pictures[number : number + 1], **item_fields
        )
        torch.testing.assert_close(embeddings, expected)
        assert torch.equal(split(embeddings)[1], split(expected)[1])


def test_renumbered_tokens_have_no_gaps(pictures: Tensor) -> None:
    setting = Setting("divprune", keep=5, positions="renumbered")
    (embeddings,) = Model().embed_multimodal(pixel_values=pictures[:1], **fields_of(setting))
    assert split(embeddings)[1].tolist() == [[place, place, place, 5] for place in range(5)]


def test_the_words_of_the_question_reach_the_method(pictures: Tensor) -> None:
    setting = Setting("cdpruner", keep=4)
    kept = []
    for question in ((1, 2), (11, 12, 13)):
        torch.manual_seed(0)
        fields = fields_of(setting, question=question)
        (embeddings,) = Model().embed_multimodal(pixel_values=pictures[:1], **fields)
        kept.append(split(embeddings)[1][:, 0].tolist())
    assert kept[0] != kept[1]


def test_a_model_of_another_engine_is_left_alone(pictures: Tensor) -> None:
    assert torch.equal(torch.stack(Model().embed_multimodal(pixel_values=pictures)), pictures * 2)
    whole = Model(False).embed_multimodal(pixel_values=pictures, **fields_of(*[Setting()] * 2))
    assert torch.equal(torch.stack(whole), pictures * 2)


def feature(model: Model, fields: dict[str, list[Tensor]], number: int, offset: int) -> Any:
    """vLLM's description of an item in a prompt."""
    data = {name: SimpleNamespace(data=values[number]) for name, values in fields.items()}
    length = int(fields["espalier_counts"][number][2])
    place = SimpleNamespace(offset=offset, length=length, is_embed=None)
    return SimpleNamespace(data=data, modality="image", mm_position=place)


@pytest.mark.parametrize("pieces", [[40], [3, 37], [1, 1, 1, 1, 1, 1, 34]])
def test_kept_tokens_have_their_positions_in_the_whole_prompt(
    pictures: Tensor, pieces: list[int]
) -> None:
    """Two words, a picture, a word, a picture, three words; read at once, and in pieces that split pictures."""
    settings = (Setting("divprune", keep=5), Setting("random", keep=3, sample="a"))
    model, fields = Model(), fields_of(*settings)
    embeddings = model.embed_multimodal(pixel_values=pictures, **fields)
    features = [feature(model, fields, 0, 2), feature(model, fields, 1, 8)]
    positions, delta = model.get_mrope_input_positions([0] * 14, features[::-1])
    first, second = (
        plan_of(setting, picture * 2) for setting, picture in zip(settings, pictures, strict=True)
    )
    after = 3 + 2 * PATCHES
    expected = [0, 1, *[2 + place for place in first], 2 + PATCHES]
    expected += [*[3 + PATCHES + place for place in second], after, after + 1, after + 2]
    assert delta == after + 3 - 14
    stream = torch.cat(embeddings)
    begin = done = 0
    for length in pieces:
        part, begin = stream[begin : begin + length], begin + length
        tokens, positions, delta = model.recompute_mrope_positions(None, [part], positions, done)
        assert torch.equal(tokens[0], part[:, :WIDTH])
        assert delta == after + 3 - 14
    assert positions.tolist() == [expected] * 3
    # The first four tokens come out of the prefix cache: their places stay open, and nothing enters there.
    positions, _ = model.get_mrope_input_positions([0] * 14, features)
    _, positions, delta = model.recompute_mrope_positions(None, [stream[2:]], positions, 4)
    assert positions[:, 4:].tolist() == [expected[4:]] * 3
    assert delta == after + 3 - 14


def test_words_between_frames_are_embedded_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two frames of two tokens; a word stands before each, and all words stay."""
    grid = rectangle(2, 1, 2)
    places = item(grid, positions=grid[:, [0, 2, 3]] * torch.tensor([0, 1, 1]))
    family = FAMILIES[NAME]
    framed = Family(family.module, NAME, lambda *_: places, family.tower)
    monkeypatch.setitem(FAMILIES, NAME, framed)
    ids, embedded = [7, 9, 9, 8, 9, 9], torch.tensor([0, 1, 1, 0, 1, 1]).bool()
    setting = Setting("random", keep=2)
    config = ModelConfig(llava_config())
    fields = {
        k: [v] for k, v in shortened(config, "image", {}, ids, embedded, setting, ()).fields.items()
    }
    assert fields[LAYOUT][0].numel()
    model = Model()
    frames = torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    (embeddings,) = model.embed_multimodal(pixel_values=frames, **fields)
    view = View(Site("prefix"), (frames * 2), grid[None], {}, [setting.generator()])
    kept = setting.reducer.answer(view, 2).kept[0].tolist()
    tokens, numbers = split(embeddings)
    whole = torch.stack(
        [
            model.word_embeddings.weight[7],
            *(frames[0, :2] * 2),
            model.word_embeddings.weight[8],
            *(frames[0, 2:] * 2),
        ]
    )
    stays = [0, 3, *[(1, 2, 4, 5)[place] for place in kept]]
    assert torch.equal(tokens, whole[sorted(stays)])
    columns = [0, 1, 2, 3, 4, 5]
    assert numbers[:, 2].tolist() == [columns[place] for place in sorted(stays)]
    assert numbers[:, 3].tolist() == [6] * 4


def test_towers_saved_without_a_level_are_read() -> None:
    names = ["model.vision_tower.embeddings.a", "vision_tower.vision_model.b", "lm_head.c"]
    assert [*map(tower_name, names)] == [
        "model.vision_tower.vision_model.embeddings.a",
        *names[1:],
    ]
    model, weights = Model(), [(name, None) for name in names]
    assert model.load_weights(weights) == names
    model.vision_tower.vision_model = None
    assert model.load_weights(weights) == [*map(tower_name, names)]
