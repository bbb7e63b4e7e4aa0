"""What `generate` is given is what the run states: nothing beside a checkpoint adds to it."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from espalier.harness.config.composer import compose_section
from espalier.harness.config.model_section import model_spec
from espalier.harness.errors import UserError
from espalier.harness.specs.generation import (
    CANVAS,
    DENOISING,
    GENERATION,
    check_generation,
    check_settings,
    settings,
)
from tests import commands
from tests.commands import MODELS
from tests.family_runs import Tiny, saved
from tests.tiny import CHATS, LLAVA, load_tiny

#: As releases have it, and some that would change greedy answers too.
INHERITED = {
    "do_sample": True,
    "temperature": 0.01,
    "top_k": 1,
    "top_p": 0.001,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 4,
    "suppress_tokens": [5, 6],
    "num_beams": 2,
    "max_new_tokens": 2,
}

PENALTIES = {"hunyuan_ocr_1b": 1.08}


@pytest.fixture(scope="module")
def heir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint that states a lot."""
    folder = tmp_path_factory.mktemp("heir") / "llava"
    shutil.copytree(saved("llava"), folder)
    file = folder / "generation_config.json"
    stated = {**json.loads(file.read_text()), **INHERITED, "eos_token_id": [2, 7]}
    file.write_text(json.dumps(stated))
    return load_tiny(LLAVA, folder)


@pytest.mark.parametrize(
    "generation",
    [{}, {"max_new_tokens": 5}, {"temperature": 0.7}, {"do_sample": True}, {"num_beams": 3}],
    ids=str,
)
def test_generate_resolves_to_the_settings_of_the_run(
    heir: Any, generation: dict[str, Any]
) -> None:
    stated = settings(generation, {"repetition_penalty": 1.0}).generate
    resolved, plain = (
        adapter.model._prepare_generation_config(None, **stated)[0].to_dict()
        for adapter in (heir, Tiny("llava").adapter)
    )
    assert resolved == {**plain, "eos_token_id": [2, 7]}
    assert stated.items() <= resolved.items()
    # Of sampling nothing is left to defaults that no row would tell.
    if stated["do_sample"]:
        assert {"temperature", "top_p", "top_k"} <= set(stated)


def test_greedy_answers_are_the_plain_ones(heir: Any) -> None:
    stated = {**settings({"max_new_tokens": 6}).generate, "eos_token_id": None}
    answers = [
        adapter.model.generate(**adapter.encode(CHATS), **stated)
        for adapter in (heir, Tiny("llava").adapter)
    ]
    assert torch.equal(*answers)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_file_states_its_penalty(name: str) -> None:
    expected = 1.05 if name.startswith("qwen2_5_vl") else PENALTIES.get(name, 1.0)
    stated = model_spec({**compose_section("model", name), "device": "cpu"}).generation
    assert stated["repetition_penalty"] == expected


#: Settings with values that act where they act at all, and those with no effect at them.
ACTING = {
    **{"temperature": 0.7, "top_k": 3, "top_p": 0.5, "top_h": 0.5, "typical_p": 0.5, "min_p": 0.1},
    **{"epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "renormalize_logits": True},
    **{"length_penalty": 2.0, "early_stopping": True},
}
NEUTRAL = {
    **{"temperature": 0, "top_k": 50, "top_p": 1.0, "top_h": 1.0, "typical_p": 1.0, "min_p": 0.0},
    **{"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "renormalize_logits": False},
    **{"length_penalty": 1.0, "early_stopping": False},
}


@pytest.mark.parametrize("table", ["model", "benchmark"])
@pytest.mark.parametrize("name", ACTING)
def test_a_setting_that_changes_nothing_is_refused(name: str, table: str) -> None:
    setting = {name: ACTING[name]}
    on_beams = name in ("length_penalty", "early_stopping")
    needed = "num_beams=2 or more" if on_beams else "do_sample=true"
    line = (
        rf"^{table}\.generation\.{name}=.* changes nothing without benchmark\.generation\.{needed}"
    )
    for others in ({}, {"do_sample": False}, {"num_beams": 1}):
        with pytest.raises(UserError, match=line):
            settings(others, **{table: setting})
        # Tasks of lmms-eval state such settings for models of all kinds, and null leaves one unset.
        settings({**others, **{name: NEUTRAL[name]}})
        settings(others, **{table: {name: NEUTRAL[name]}})
        settings(others, **{table: {name: None}})
        if name != "temperature":
            settings({**others, **setting})
    acting = {"num_beams": 3} if on_beams else {"do_sample": True}
    assert settings({}, benchmark={**setting, **acting}).generate[name] == ACTING[name]


def test_whatever_the_library_ignores_is_among_them() -> None:
    # It scales all words alike, which the library does not report.
    for name, value in ACTING.items() - {("renormalize_logits", True)}:
        with pytest.raises(ValueError, match=name):
            GenerationConfig(**{name: value}).validate(strict=True)


def test_a_task_draws_by_its_temperature_unless_somebody_unsets_it() -> None:
    task = {"temperature": 0.7}
    assert settings(task).generate["do_sample"] is True
    assert settings(task, {"top_p": 0.5}).generate["top_p"] == 0.5
    assert settings(task, benchmark={"temperature": None}).generate["do_sample"] is False
    assert settings(task, benchmark={"temperature": 0}).generate["do_sample"] is False


def test_drawing_at_temperature_0_is_refused_where_somebody_asks_for_it() -> None:
    task = {"temperature": 0, "do_sample": True}
    assert settings(task).generate["do_sample"] is False
    with pytest.raises(UserError, match=r"^benchmark\.generation\.do_sample=true .*temperature=0"):
        settings(task, benchmark={"do_sample": True})
    assert settings(task, benchmark={"temperature": 0.5}).generate["do_sample"] is True


INSTEAD = {name: known.instead for name, known in GENERATION.items() if known.instead is not None}
VALUES = {name for name, known in GENERATION.items() if known.hint is not None}


@pytest.mark.parametrize("name", sorted({*GenerationConfig().to_dict()} - {*VALUES, *INSTEAD}))
def test_settings_of_the_library_that_no_answer_depends_on_are_refused(name: str) -> None:
    def check() -> None:
        check_settings("benchmark.generation", {name: 3})
        check_generation({name: 3})

    with pytest.raises(UserError):
        check()


def test_settings_are_the_library_s_or_denoising() -> None:
    library = {*GenerationConfig().to_dict()}
    assert {*INSTEAD} <= library
    assert VALUES - library == {"until", "thinking", *DENOISING, *CANVAS}


@pytest.mark.parametrize(("name", "remedy"), INSTEAD.items())
def test_settings_under_another_name_say_it(name: str, remedy: str) -> None:
    with pytest.raises(UserError, match=rf"^generation\.{name}=3 .*valid: generation\.{remedy}$"):
        check_settings("generation", {name: 3})


@pytest.mark.parametrize("table", ["model", "benchmark"])
def test_escapes_of_a_shell_are_read_in_stop_strings(table: str) -> None:
    line = [
        rf'+{table}.generation.until=["\n\n", "\\text", "\boxed", "a\tb", " "]',
        rf'+{table}.generation.stop_words="\n"',
    ]
    generation = getattr(commands.spec_of(*line), table).generation
    assert list(generation["until"]) == ["\n\n", r"\text", r"\boxed", "a\tb", " "]
    assert generation["stop_words"] == "\n"
