"""Which prompts a run has: sets of a family, what a user sets over them, and texts of a benchmark."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from omegaconf import OmegaConf

from espalier.harness.config.composer import compose_section
from espalier.harness.config.model_section import model_spec, with_question
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.runs.run_settings import Contents, settings_of
from espalier.harness.specs.catalogue import METHODS
from espalier.harness.specs.question_templates import checked_template, is_given, question_text
from espalier.harness.specs.run_spec import ModelSpec, PromptSpec, VideoSpec
from tests import commands
from tests.commands import MODELS
from tests.refused import refused

NAMES = {"original", "lmms_eval", "hub", "vlmevalkit"}
#: Sets of OCR models for what a picture shows.
BLOCKS = {"text", "table", "formula", "chart"}


composed = partial(
    commands.spec_of, "model.weights=random", "model.device=cpu", "model.dtype=float32"
)


def model_of(
    name: str, prompt: str = "original", tasks: tuple[str, ...] = (), **changes: Any
) -> ModelSpec:
    part = compose_section("model", name) | {"device": "cpu", "prompt": prompt}
    return model_spec(part | changes, tasks)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("name", MODELS)
def test_every_set_of_every_model_can_be_had(name: str) -> None:
    sets = {
        key for key, table in compose_section("model", name)["prompts"].items() if table is not None
    }
    assert "original" in sets
    assert sets <= {*NAMES, *BLOCKS, "d3tom"}
    assert all(model_of(name, key).prompt.name == key for key in sets)


def test_a_set_chooses_frames_pixels_and_length_together() -> None:
    spec = composed("model=qwen2_vl_7b", "model.prompt=vlmevalkit").model
    assert (spec.processor["min_pixels"], spec.generation["max_new_tokens"]) == (1003520, 2048)
    ov = composed("model=llava_ov_7b", "model.prompt=vlmevalkit").model
    assert ov.video == VideoSpec(16, "fps_then_uniform", "repeat", 1.0)
    assert ov.prompt.join == "lines"


@pytest.mark.parametrize(
    ("line", "read", "value"),
    [
        (
            "model.video.frames=32",
            lambda model: model.video.frames,
            32,
        ),  # what it would be without the set
        ("model.video.rule=uniform", lambda model: model.video.rule, "uniform"),
        ("model.conversation=qwen3", lambda model: model.conversation, "qwen3"),
        ("model.join=blank", lambda model: model.prompt.join, "blank"),
        ("+model.generation.max_new_tokens=7", lambda model: model.generation["max_new_tokens"], 7),
    ],
)
def test_what_a_user_sets_goes_before_the_set(line: str, read: Any, value: Any) -> None:
    assert read(composed("model=llava_ov_7b", "model.prompt=vlmevalkit", line).model) == value
    assert read(composed("model=llava_ov_7b", "model.prompt=hub", line).model) == value


def test_settings_of_the_image_processor_go_before_the_set_without_a_plus() -> None:
    spec = composed("model=internvl2_8b", "model.processor.max_patches=3").model
    assert spec.processor == {"max_patches": 3}
    penalty = "model.generation.repetition_penalty=1.2"
    qwen = composed("model=qwen2_5_vl_7b", "model.prompt=hub", penalty)
    assert qwen.model.generation["repetition_penalty"] == 1.2


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("benchmark", "tiles"),
    [("textvqa", 6), ("chartqa", 12), ("mmmu", 12), ("docvqa", 18), ("infovqa", 24)],
)
def test_tiles_by_data_set_under_vlmevalkit(benchmark: str, tiles: int) -> None:
    line = ("model=internvl2_8b", f"benchmark={benchmark}")
    assert composed(*line, "model.prompt=vlmevalkit").model.processor["max_patches"] == tiles
    assert composed(*line).model.processor["max_patches"] == 6
    assert composed(*line, "model.prompt=hub").model.processor["max_patches"] == 12


def test_a_draft_is_prompted_as_its_target() -> None:
    spec = composed("model=llava_ov_7b", "method=pearl", "model.prompt=hub")
    draft = spec.method.draft
    assert (draft.prompt.name, draft.video) == ("hub", spec.model.video)


def test_a_benchmark_s_text_goes_before_its_texts_and_these_before_the_set_s() -> None:
    line = ("model=llava15_7b", "benchmark=mmbench_en")
    assert composed(*line).benchmark.text == composed(*line).benchmark.texts["llava"]
    assert composed(*line, "model.prompt=lmms_eval").benchmark.text is None
    assert composed(*line, "benchmark.text='What?'").benchmark.text == "What?"
    assert composed("model=qwen2_vl_7b", "benchmark=mmbench_en").benchmark.text is None
    spec = composed("model=seedling", "benchmark=seedling_exist").benchmark
    assert with_question(spec, PromptSpec(text="x")).text == "x"
    assert with_question(spec, PromptSpec()) == spec


def test_texts_of_samples() -> None:
    assert question_text("{{ a }}\n", {"a": 1}, "here") == "1\n"
    assert question_text("{{ sample['a b'] }}", {"a b": 2}, "here") == "2"
    assert checked_template("k", "a plain sentence\n") == "a plain sentence\n"
    wrong = {"b": "no column 'b'; valid: a", "a + 'x'": "", "a.__class__.__mro__": ""}
    for expression, words in wrong.items():
        assert f"here: {words}" in refused(
            question_text, f"{{{{ {expression} }}}}", {"a": 1}, "here"
        )
    assert not any(map(is_given, (None, math.nan, "", " ", "nan")))
    assert all(map(is_given, (0, 0.0, "a", False, [])))
    assert question_text("{{ 'x' if b is given else 'y' }}", {"a": 1}, "here") == "y"


def test_rows_of_a_model_under_its_original_prompts_keep_their_settings() -> None:
    spec = composed(
        "model=seedling", "model.weights=trained", "benchmark=seedling_exist", "method=none"
    )
    method = METHODS.load("none")()
    block = settings_of(spec, method, Contents("x"))
    assert not {"prompt", "join", "transparency"} & set(block["model"])
    assert block["model"]["video"] == {
        "frames": 32,
        "rule": "uniform",
        "short": "repeat",
        "rate": 2.0,
    }
    assert "text" not in block["benchmark"]
    other = composed(
        "model=llava_ov_7b", "model.prompt=vlmevalkit", "benchmark=textvqa", "method=none"
    )
    block = settings_of(other, method, Contents("x"))
    assert (block["model"]["prompt"], block["model"]["join"]) == ("vlmevalkit", "lines")
    white = composed("model=seedling", "model.transparency=white", "method=none")
    assert settings_of(white, method, Contents("x"))["model"]["transparency"] == "white"
    assert block["benchmark"]["text"] == other.benchmark.texts["vlmevalkit"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"prompts": {"original": {"frame": 1}}},
            r"model\.prompts\.original\.frame is not a config key",
        ),
        (
            {"prompts": {"original": {"tasks": {"ocr": {"join": 1}}}}},
            r"tasks\.ocr\.join is not a config key",
        ),
        ({"prompts": {"original": {"video": {"frames": 0}}}}, r"model\.video\.frames=0 must be"),
        ({"video": {"frame": 1}}, r"model\.video\.frame is not a config key"),
    ],
)
def test_mistakes_in_a_set_are_told(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        model_of("seedling", tasks=("ocr",), **changes)


@pytest.mark.slow
def test_words_of_the_sets_are_those_that_benchmarks_have() -> None:
    prompts = (compose_section("model", name)["prompts"].values() for name in MODELS)
    words = {
        word for sets in prompts for prompt in sets for word in (prompt or {}).get("words", ())
    }
    for file in (*(CONF / "base" / "texts").glob("*.yaml"), *(CONF / "benchmark").glob("*.yaml")):
        assert set(OmegaConf.load(file).get("texts") or ()) <= words | NAMES, file.stem
