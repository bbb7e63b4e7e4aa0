"""What `generate` is given is what the run states: nothing beside a checkpoint adds to it."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from espalier.harness.config.model_section import model_spec
from espalier.harness.config.single_section import compose_section
from espalier.harness.paths import CONF
from espalier.harness.specs.generation import settings
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

MODELS = sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
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
    "asked",
    [{}, {"max_new_tokens": 5}, {"temperature": 0.7}, {"do_sample": True}, {"num_beams": 3}],
    ids=str,
)
def test_generate_resolves_to_the_settings_of_the_run(heir: Any, asked: dict[str, Any]) -> None:
    stated = settings(asked, {"repetition_penalty": 1.0}).generate
    found, _ = heir.model._prepare_generation_config(None, **stated)
    plain, _ = Tiny("llava").adapter.model._prepare_generation_config(None, **stated)
    ends = {"eos_token_id": [2, 7]}
    assert {**found.to_dict(), **ends} == {**plain.to_dict(), **ends}
    assert found.eos_token_id == [2, 7]
    for name, value in stated.items():
        assert getattr(found, name) == value
    # Of sampling nothing is left to defaults that no row would tell.
    if stated["do_sample"]:
        assert {"temperature", "top_p", "top_k"} <= set(stated)


def test_greedy_answers_are_the_plain_ones(heir: Any) -> None:
    stated = {**settings({"max_new_tokens": 6}).generate, "eos_token_id": None}
    said = [
        adapter.model.generate(**adapter.encode(CHATS), **stated)
        for adapter in (heir, Tiny("llava").adapter)
    ]
    assert torch.equal(*said)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_file_states_its_penalty(name: str) -> None:
    expected = 1.05 if name.startswith("qwen2_5_vl") else PENALTIES.get(name, 1.0)
    stated = model_spec({**compose_section("model", name), "device": "cpu"}).generation
    assert stated["repetition_penalty"] == expected
