"""The processor's half of the plug-in over a stub of vLLM's: cache keys, shortened prompts, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.serve.families import FAMILIES
from espalier.serve.places import item, rectangle
from espalier.serve.processor import (
    COUNTS,
    LAYOUT,
    QUESTION,
    REQUEST,
    SETTING,
    PrunedProcessor,
    built_layers,
    check_plan,
    check_served,
    read_fields,
    shortened,
)
from espalier.serve.setting import KEY, Setting, SettingError
from tests.serve.stubs import ModelConfig, llava_config, put_module

#: The placeholder, and its 16 copies in vLLM's replacement of a picture of LLaVA.
PICTURE, PATCHES = 9, 16


@dataclass(frozen=True)
class Inputs:
    """vLLM's `ProcessorInputs`."""

    prompt: list[int]
    hf_processor_mm_kwargs: dict[str, Any] = field(default_factory=dict)
    media_io_kwargs: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ("cat",)

    @property
    def mm_data_items(self) -> Any:
        return Items(self.pictures)


class Items(dict):
    def __init__(self, pictures: tuple[str, ...]) -> None:
        super().__init__(image=pictures)

    def get_all_counts(self) -> dict[str, int]:
        return {name: len(values) for name, values in self.items() if values}


@dataclass(frozen=True)
class Content:
    """vLLM's `PromptUpdateDetails`."""

    full: list[int]
    is_embed: Any = None

    @classmethod
    def from_seq(cls, ids: list[int]) -> Content:
        return cls(ids)


@dataclass(frozen=True)
class Update:
    """vLLM's `PromptReplacement`, and what it gives for an item."""

    replacement: Any
    modality: str = "image"

    def resolve(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(content=self.replacement(number))


class Base:
    """vLLM's processor: `apply` runs the steps that the plug-in takes part in, and returns what they gave."""

    def __init__(self, config: Any) -> None:
        self.info = SimpleNamespace(ctx=SimpleNamespace(model_config=config))
        #: What vLLM's cache has of items, by their keys.
        self.cache: dict[str, Any] = {}

    def get_dummy_inputs(self, seq_len: int, *, mm_counts: dict[str, int]) -> Inputs:
        return Inputs([1, PICTURE], {}, {}, ("white",) * mm_counts["image"])

    def apply(self, inputs: Inputs, timing_ctx: Any) -> SimpleNamespace:
        keys = [f"{name}-{inputs.media_io_kwargs['image']}" for name in inputs.pictures]
        cached = [key in self.cache for key in keys]
        missing = [name for name, old in zip(inputs.pictures, cached, strict=True) if not old]
        data: list[dict[str, Any]] = [{} for _ in missing]
        items = Items(tuple(missing))
        updates = self._get_prompt_updates(items, {}, {"image": data})
        variants = [[update.resolve(n) for update in updates] for n in range(len(missing))]
        for key, fresh in zip([k for k in keys if k not in self.cache], variants, strict=True):
            self.cache[key] = fresh
        whole = {"image": [self.cache[key] for key in keys]}
        ids, _ = self._apply_prompt_updates(inputs.prompt, whole)
        return SimpleNamespace(
            kwargs=inputs.hf_processor_mm_kwargs,
            options=inputs.media_io_kwargs,
            hashes=keys,
            processed=missing,
            ids=ids,
            data=[{name: element.data for name, element in entry.items()} for entry in data],
        )

    def _get_prompt_updates(self, mm_items: Any, kwargs: Any, out: Any) -> Any:
        return [Update(lambda number: Content([PICTURE] * PATCHES))]

    def _apply_prompt_updates(self, prompt: list[int], updates: Any) -> Any:
        ids: list[int] = []
        places = []
        items = iter(updates["image"])
        for token in prompt:
            content = next(items)[0].content.full if token == PICTURE else [token]
            if token == PICTURE:
                places.append(
                    SimpleNamespace(start_idx=len(ids), length=len(content), is_embed=None)
                )
            ids += content
        return ids, {"image": places}


class Processor(PrunedProcessor, Base):
    """As the plug-in builds it."""


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        @staticmethod
        def batched(modality: str, *, keep_on_cpu: bool) -> tuple[str, bool]:
            return modality, keep_on_cpu

    class Kwargs:
        @staticmethod
        def from_hf_inputs(values: Any, configs: Any) -> Any:
            assert set(configs.values()) == {("image", True)}
            return {
                "image": [{name: SimpleNamespace(data=rows[0]) for name, rows in values.items()}]
            }

    names = {"MultiModalFieldConfig": Config, "MultiModalKwargsItems": Kwargs}
    put_module(monkeypatch, "vllm.multimodal.inputs", **names)
    put_module(monkeypatch, "vllm.multimodal.processing", PromptUpdateDetails=Content)


def processor(**setting: Any) -> Processor:
    config = ModelConfig(llava_config(espalier=setting))
    config.hf_text_config.rope_parameters["mrope_section"] = [2, 0, 0]
    return Processor(config)


def outcome_of(prompt: list[int], *pictures: str, **setting: Any) -> Any:
    """The prompt's outcome on an engine whose default keeps four tokens."""
    inputs = Inputs(
        prompt, {"espalier": setting, "crop": 1}, {"video": {"fps": 1}}, pictures or ("cat",)
    )
    return processor(method="random", keep=4).apply(inputs, None)


def test_the_key_of_a_method_that_reads_words_holds_the_prompt() -> None:
    first, second = ([1, PICTURE, word] for word in (2, 3))
    for setting, equal in (
        ({"method": "cdpruner"}, False),
        ({"method": "cdpruner", "params": {"relevance": "none"}}, True),
        ({"method": "divprune"}, True),
        ({"method": "none"}, True),
    ):
        keys = [outcome_of(prompt, **setting).hashes for prompt in (first, first, second)]
        assert keys[0] == keys[1]
        assert (keys[1] == keys[2]) is equal, setting


def test_the_key_of_a_picture_holds_the_setting_and_what_stands_beside_it() -> None:
    prompt = [1, PICTURE, 2]
    settings: list[dict[str, Any]] = [{"keep": 4}, {"keep": 5}, {"ratio": 0.5}, {"method": "none"}]
    settings += [{"seed": 1}, {"sample": "a"}, {"method": "cdpruner", "keep": 4}]
    keys = [outcome_of(prompt, **setting).hashes[0] for setting in settings]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("cat-") for key in keys)
    first, second = outcome_of(prompt).options, outcome_of(prompt).options
    assert first == second
    assert first["video"] == {"fps": 1}  # a video's own options stay


def test_where_words_count_several_items_are_processed_in_every_prompt() -> None:
    """Words of an item that comes out of the cache are not known."""
    pair = [1, PICTURE, PICTURE, 2]
    for method, processed in (("divprune", []), ("cdpruner", ["cat", "dog"])):
        server = processor(method=method, keep=4)
        for expected in (["cat", "dog"], processed):
            outcome = server.apply(Inputs(pair, {}, {}, ("cat", "dog")), None)
            assert outcome.processed == expected
            assert len(outcome.ids) == 10
    server = processor(method="cdpruner", keep=4)
    for processed in (["cat"], []):
        outcome = server.apply(Inputs([1, PICTURE, 2]), None)
        assert (outcome.processed, len(outcome.ids)) == (processed, 6)


def test_a_prompt_is_shortened_by_the_request_over_the_engine() -> None:
    for setting, kept in (({}, 4), ({"keep": 3}, 3), ({"ratio": 0.5}, 8), ({"method": "none"}, 16)):
        outcome = outcome_of([1, PICTURE, 2], **setting)
        assert outcome.ids == [1, *[PICTURE] * kept, 2]
        assert outcome.kwargs == {"crop": 1}  # the model's own options alone go on
        read, counts, layout, question = read_fields(outcome.data[0])
        assert (counts, read.kept(16)) == ((16, 16, kept), kept)
        assert layout.numel() == question.numel() == 0
    assert REQUEST.get(None) is None  # a request leaves nothing to the next one


def test_the_question_is_the_prompt_without_pictures() -> None:
    outcome = outcome_of([1, PICTURE, 2, PICTURE, 3], "cat", "dog", method="cdpruner")
    assert [entry[QUESTION].tolist() for entry in outcome.data] == [[1, 2, 3]] * 2
    assert outcome_of([1, PICTURE, 2]).data[0][QUESTION].numel() == 0


def test_the_encoder_is_sized_for_whole_pictures_and_they_do_not_count() -> None:
    server, counted = processor(method="divprune", keep=4), []
    server.counts = SimpleNamespace(add=lambda *numbers: counted.append(numbers))
    outcome = server.apply(server.get_dummy_inputs(512, mm_counts={"image": 1}), None)
    assert outcome.ids == [1, *[PICTURE] * PATCHES]
    assert counted == []
    server.apply(Inputs([1, PICTURE, PICTURE], {}, {}, ("cat", "dog")), None)
    server.apply(Inputs([1, PICTURE], {KEY: {"method": "none"}}), None)
    assert counted == [("divprune", 32, 8), ("none", 16, 16)]


def test_a_refused_request_is_one_line_and_the_next_one_runs() -> None:
    for setting, line in (
        ({"keep": 0}, "espalier.keep=0 is no count"),
        ({"method": "fastv"}, "acts before decoder layer 2"),
        ({"method": "prumerge"}, "and vLLM builds the 3 of 4 that the projector needs"),
        ({"method": "none", "params": {"a": 1}}, "espalier.params.a is unknown"),
        ({"method": "evs"}, "'evs' compares frames; valid: videos"),
    ):
        with pytest.raises(SettingError, match=line):
            outcome_of([1, PICTURE], **setting)
    assert len(outcome_of([1, PICTURE]).ids) == 5


def test_words_between_frames_become_embeddings_of_the_item(monkeypatch: Any) -> None:
    """Two frames of two tokens with a word between: how many of each stay is not known in advance."""
    family = replace(FAMILIES["LlavaForConditionalGeneration"], places=_two_frames)
    monkeypatch.setitem(FAMILIES, "LlavaForConditionalGeneration", family)
    ids, embedded = [9, 9, 5, 9, 9], torch.tensor([True, True, False, True, True])
    config = ModelConfig(llava_config())
    for setting, mrope, kept, whole in (
        (Setting("random", keep=3), False, [9, 9, 5, 9], True),
        (Setting("random", keep=3), True, [9, 9, 5, 9], True),
        (Setting(), True, ids, True),
        (Setting(), False, ids, False),
    ):
        if mrope:
            config.hf_text_config.rope_parameters["mrope_section"] = [2, 0, 0]
        else:
            config.hf_text_config.rope_parameters.pop("mrope_section", None)
        short = shortened(config, "video", {}, ids, embedded, setting, ())
        assert short.ids == kept
        assert bool(short.embedded.all()) is whole
        layout = [ids, embedded.long().tolist()] if whole else [[], []]
        assert short.fields[LAYOUT].tolist() == layout
        assert short.fields[COUNTS].tolist() == [4, 4, setting.kept(4)]
    assert (short.embedded.tolist(), read_fields(short.fields)[0]) == (embedded.tolist(), Setting())
    assert short.fields[SETTING].dtype == torch.uint8


def _two_frames(config: Any, modality: str, data: Any, total: int) -> Any:
    return item(rectangle(2, 1, 2))


def test_an_item_of_another_length_than_its_family_is_refused() -> None:
    """A tower with a class token among its features, or one that keeps a picture's shape."""
    config = ModelConfig(llava_config())
    for total in (PATCHES - 1, PATCHES + 1):
        embedded = torch.ones(total, dtype=torch.bool)
        with pytest.raises(SettingError, match=f"has {total} tokens for this image, .*places 16"):
            shortened(config, "image", {}, [PICTURE] * total, embedded, Setting(), ())


@pytest.mark.parametrize(("layer", "built"), [(-1, 4), (-2, 3), (4, 4), (2, 2), (0, 0)])
def test_the_tower_is_built_up_to_the_layer_that_the_projector_reads(
    layer: int, built: int
) -> None:
    assert built_layers(SimpleNamespace(vision_feature_layer=layer), 4) == built


def test_positions_and_windows_of_a_tower_are_checked() -> None:
    plain = ModelConfig(llava_config())
    with pytest.raises(SettingError, match="'original' is not possible where the engine's default"):
        check_served(Setting("divprune"), plain, None)
    check_served(Setting(), plain, None)
    check_served(Setting("divprune", positions="renumbered"), plain, None)
    vision = SimpleNamespace(depth=4, fullatt_block_indexes=[3])
    text = SimpleNamespace(num_hidden_layers=3)
    config = SimpleNamespace(get_text_config=lambda: text, vision_config=vision)
    qwen = SimpleNamespace(
        architecture="Qwen2_5_VLForConditionalGeneration", hf_config=config, uses_mrope=True
    )
    for method in ("none", "divprune"):
        with pytest.raises(SettingError, match="needs positions on one axis, this model has 3"):
            check_served(Setting(method, positions="renumbered"), qwen, None)
    with pytest.raises(SettingError, match="layer 0 of the tower, which attends in windows; valid"):
        check_served(Setting("hired"), qwen, None)
    check_served(Setting("fastervlm"), qwen, None)


def test_a_plan_that_cannot_be_carried_out_is_refused_before_the_engine() -> None:
    """Frames that stay whole, and crops that are not stitched; other methods are not tried out."""
    frames, crops = item(rectangle(2, 2, 4)), torch.cat([rectangle(1, 2, 2, n) for n in range(3)])
    check_plan(Setting("evs"), frames, 3, 8)
    with pytest.raises(SettingError, match="'evs': evs cannot keep 7 of 16 visual tokens"):
        check_plan(Setting("evs"), frames, 3, 7)
    check_plan(Setting("hired"), item(rectangle(1, 4, 4)), 3, 4)
    with pytest.raises(SettingError, match="'hired': this method must know where the crops lie"):
        check_plan(Setting("hired"), item(crops), 3, 4)
    check_plan(Setting("divprune"), item(crops), 3, 4)
