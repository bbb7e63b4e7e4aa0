"""`model.facts` matches the model: every different fact is refused by name, before weights are read."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from espalier.harness.cost.facts import LinearFacts, ModelFacts, StackFacts
from espalier.harness.cost.flops import tower_flops
from espalier.harness.errors import UserError
from espalier.harness.models import build_adapter as base
from espalier.harness.models.build_adapter import build_skeleton, load_adapter
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.measured_facts import UNCONFIRMED, check_facts
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.specs.run_spec import ModelSpec
from tests.commands import MODELS
from tests.families import FAMILIES
from tests.families.onevision import video, watch
from tests.family_runs import saved
from tests.refused import refused
from tests.tiny import chat, model_of, picture, random_model

STACK = [field.name for field in fields(StackFacts)]
#: Families that have everything between them: a stem, experts, a dense first layer; windows, three axes; DeepStack;
#: linear layers; tokens joined inside the tower.
NAMES = ("llava", "qwen2_5_vl", "qwen3_vl", "deepseek_ocr", "qwen3_5", "qwen3_5_moe", "minicpm_v")


def keys_of(facts: ModelFacts) -> list[str]:
    """Every fact by its key in the config file."""
    keys = []
    for field in fields(ModelFacts):
        if isinstance(getattr(facts, field.name), StackFacts):
            keys += [f"{field.name}.{name}" for name in STACK]
        else:
            keys.append(field.name)
    return keys


def other(key: str, value: Any) -> Any:
    """A value that a careless hand might write."""
    if isinstance(value, bool):
        return not value
    if key == "class_attention":
        return "mean" if value == "token" else "token"
    if key.endswith("linear"):
        return LinearFacts(1, 2, 3, 4, 5) if value is None else replace(value, key_dim=9)
    if isinstance(value, tuple):
        return (*value[:-1], value[-1] + 1) if value else (0,)
    return 3 if value in (None, 0) else value + 1


def changed(facts: ModelFacts, key: str) -> tuple[ModelFacts, Any, Any]:
    """Return the facts with one of them wrong, the wrong value and the right one."""
    stack, _, name = key.rpartition(".")
    owner = getattr(facts, stack) if stack else facts
    right = getattr(owner, name)
    wrong = other(key, right)
    part = replace(owner, **{name: wrong})
    return (replace(facts, **{stack: part}) if stack else part), wrong, right


def written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, LinearFacts):
        value = f"{{{', '.join(f'{name}: {size}' for name, size in vars(value).items())}}}"
    return (
        str(list(value) if isinstance(value, tuple) else value)
        .replace("True", "true")
        .replace("False", "false")
    )


def confirmed(name: str) -> list[str]:
    """The facts of a family that its model confirms."""
    exact = {"visual_tokens"} if name == "llava" else set()
    missing = set(UNCONFIRMED) - exact
    return [key for key in keys_of(FAMILIES[name].spec.facts) if key not in missing | {"stem"}]


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in NAMES for key in confirmed(name)]
)
def test_a_wrong_fact_is_refused_by_name_before_weights_are_read(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(FAMILIES[name].spec, path=saved(name), weights="trained")
    facts, wrong, right = changed(spec.facts, key)
    monkeypatch.setattr(base, "load_checkpoint", lambda *_: pytest.fail("weights were read"))
    line = refused(load_adapter, replace(spec, facts=facts))
    assert f"model.facts.{key}={written(wrong)}, the loaded model has {written(right)}" in line


def test_a_stem_that_is_not_there_is_refused_and_one_that_is_missing_too() -> None:
    llava, ocr = (FAMILIES[name].spec for name in ("llava", "deepseek_ocr"))
    assert "model.facts.stem" in refused(
        load_adapter, replace(llava, facts=replace(llava.facts, stem=ocr.facts.stem))
    )
    model = random_model(ocr)
    processor = ADAPTERS.load("deepseek_ocr").new_processor(ocr, byte_tokenizer())
    without = replace(ocr, facts=replace(ocr.facts, stem=None))
    with pytest.raises(UserError, match=r"model\.facts\.stem=null, the loaded model has one"):
        check_facts(ADAPTERS.load("deepseek_ocr")(model, processor, without))


def test_each_projector_of_deep_features_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    family, spec = ADAPTERS.load("qwen3_vl"), FAMILIES["qwen3_vl"].spec
    adapter = family(
        random_model(spec), family.new_processor(spec, byte_tokenizer(family.data.special)), spec
    )
    wide = torch.nn.Linear(3, 4)
    monkeypatch.setattr(family, "deepstack", lambda self: dict.fromkeys(range(3), wide))
    with pytest.raises(
        UserError, match=r"model\.facts\.projector=.*, the loaded model has \[3, 4\]"
    ):
        check_facts(adapter)


def test_every_fact_is_confirmed_or_stands_on_the_list_with_its_reason() -> None:
    every = {key for name in NAMES for key in keys_of(FAMILIES[name].spec.facts)}
    tested = {key for name in NAMES for key in confirmed(name)}
    assert every - tested - {"stem"} == set(UNCONFIRMED) - {"visual_tokens"}
    assert all(len(reason) > 20 for reason in UNCONFIRMED.values())


def test_what_was_loaded_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library makes of a checkpoint, it is not the sketch that is judged alone."""
    spec = FAMILIES["llava"].spec
    wider = replace(spec, facts=replace(spec.facts, text=replace(spec.facts.text, intermediate=80)))
    monkeypatch.setattr(base, "load_checkpoint", lambda *_: random_model(wider))
    line = refused(load_adapter, replace(spec, path=saved("llava"), weights="trained"))
    assert "model.facts.text.intermediate=48, the loaded model has 80" in line


@pytest.mark.parametrize(
    ("family", "architecture", "words"),
    [
        ("llava", {"text": {"num_hidden_layers": 7}}, "text.layers=5, the loaded model has 7"),
        ("llava", {"text": {"head_dim": 16}}, "text.head_dim=8, the loaded model has 16"),
        ("llava", {"unused_layers": 0}, "tower.layers=2, the loaded model has 1"),
        (
            "internvl",
            {"vision": {"intermediate_size": 9}},
            "tower.intermediate=48, the loaded model has 9",
        ),
        (
            "deepseek_ocr",
            {"text": {"num_experts_per_tok": 1}},
            "text.intermediate=36, the loaded model has 24",
        ),
        ("qwen3_vl_moe", {"text": {"num_experts": 8}}, "text.experts=4, the loaded model has 8"),
        (
            "deepseek_ocr",
            {"stem": {"global_attn_indexes": []}},
            "stem.window_layers=1, the loaded model has 2",
        ),
    ],
)
def test_random_weights_refuse_an_architecture_that_contradicts_the_facts(
    family: str, architecture: dict[str, Any], words: str
) -> None:
    spec = FAMILIES[family].spec
    merged = dict(spec.architecture)
    for name, part in architecture.items():
        merged[name] = {**merged.get(name, {}), **part} if isinstance(part, dict) else part
    assert f"model.facts.{words}" in refused(load_adapter, replace(spec, architecture=merged))


def test_methods_inside_the_tower_are_not_promised_where_there_are_no_blocks() -> None:
    spec = FAMILIES["qwen2_vl"].spec
    line = refused(load_adapter, replace(spec, facts=replace(spec.facts, patch_tokens=True)))
    assert "model.facts.patch_tokens=true" in line


@cache
def spec_of(name: str) -> ModelSpec:
    """The model's part of a run with a file of conf/model."""
    return model_of(f"model={name}")


def without_weights(spec: ModelSpec) -> Any:
    """The adapter of a model at full size, built without weights."""
    family = ADAPTERS.load(spec.adapter)
    tokenizer = byte_tokenizer(family.data.special)
    skeleton = build_skeleton(family.data.model_class, family.configuration(spec, tokenizer), spec)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    return family(skeleton, family.new_processor(spec, tokenizer), spec)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", MODELS)
def test_the_facts_of_every_config_are_those_of_its_real_architecture(name: str) -> None:
    """The embedded models' checkpoints are loaded by other tests."""
    spec = spec_of(name)
    if not spec.architecture:
        assert load_adapter(spec).facts == spec.facts
        return
    adapter = without_weights(spec)
    check_facts(adapter)
    assert spec.facts.vocabulary == adapter.model.get_output_embeddings().weight.shape[0]


#: Pictures of nominal size, where they are not of 640x480 pixels: what fills all views, tiles, places.
SHAPE = {
    **{"llava_next": (672, 672), "internvl": (1344, 896), "diffusion_gemma": (1000, 700)},
    **dict.fromkeys(("deepseek_ocr", "deepseek_ocr2"), (900, 1300)),
    **dict.fromkeys(("llava_onevision", "llada_v", "lavida", "lavida_dream"), (768, 768)),
}
#: Frames of models with a video as their nominal input.
FILMS = {"llava_video_7b": 64, "seedling_video": 112}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", MODELS)
def test_the_tower_is_estimated_on_a_picture_of_nominal_size_as_a_row_counts_it(name: str) -> None:
    spec = spec_of(name)
    adapter = without_weights(spec) if spec.architecture else load_adapter(spec)
    shape = SHAPE.get(spec.adapter, (640, 480))
    frames = FILMS.get(name.removesuffix("_draft"))
    shown = (
        chat("w", picture(0, *shape)) if frames is None else watch("w", video(0, frames, rate=1))
    )
    ((item,),) = filter(None, adapter.items(adapter.prepare([shown])).values())
    assert item.work == spec.facts.expected_work
    cells = len(item) if item.prunable is None else int(item.prunable.sum())
    assert cells + (name.startswith("seedling_video")) == spec.facts.visual_tokens


@pytest.mark.slow
def test_frames_are_counted_with_the_class_token_of_their_tower(monkeypatch) -> None:
    adapter = load_adapter(replace(spec_of("seedling_video"), attention="eager"))
    inputs = adapter.prepare([watch("w", video(0, 3, rate=1))])
    ((item,),) = filter(None, adapter.items(inputs).values())
    for block in adapter.unread_blocks():
        monkeypatch.setattr(block, "forward", lambda states, *_, **__: states)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        adapter.tower(inputs["pixel_values_videos"].flatten(0, 1))
    counts = counter.get_flop_counts()["Global"]
    assert counts.pop(torch.ops.aten.convolution) > 0
    assert tower_flops(adapter.facts, item.work) == sum(counts.values())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llava_next_13b", 13.4),
        ("llava_next_34b", 34.8),
        ("qwen2_5_vl_72b", 73.4),
        ("qwen3_vl_32b", 33.4),
        ("internvl3_38b", 38.4),
        ("internvl3_78b", 78.4),
    ],
)
def test_larger_sizes_have_the_parameters_of_their_cards(name: str, billions: float) -> None:
    model = without_weights(model_of(f"model={name}", "model.weights=random")).model
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("deepseek_ocr2", "stem"),
        ("diffusion_gemma_26b", "canvas"),
        ("diffusion_gemma_26b", "text.wide"),
        ("minicpm_v_4_6", "stem"),
        ("qwen3_5_35b_a3b", "text.linear"),
    ],
)
def test_a_fact_from_which_a_random_model_is_built_may_not_be_null(model, name):
    spec = model_of(f"model={model}", "model.weights=random", f"model.facts.{name}=null")
    assert f"model.facts.{name}=null: model='{model}'" in refused(load_adapter, spec)
