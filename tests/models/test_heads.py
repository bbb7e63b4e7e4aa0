"""The output head of a checkpoint is stored or is the embedding, as its file in conf/model and its files state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

import espalier
from espalier.harness.models import build_adapter as base
from espalier.harness.models.build_adapter import load_adapter, weight_bytes
from espalier.harness.specs.run_spec import ModelSpec
from tests.families import FAMILIES
from tests.refused import refused
from tests.tiny import save_tiny

KEY = "tie_word_embeddings"
HEAD = "lm_head.weight"

#: One way of feeding each family, and each way of saying that a model is tied.
UNTIED = (
    *(
        "llava",
        "llava_next",
        "onevision_image",
        "llava_video",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
    ),
    *("internvl", "internvl_qwen3", "deepseek_ocr", "deepseek_ocr2", "glm4v", "paddleocr_vl"),
    *("molmo2", "minicpm_v", "llava_onevision1_5", "qwen3_5_moe"),
)
TIED = (
    ("onevision_image", "text"),
    ("qwen2_5_vl", "model"),
    ("qwen3_vl", "model"),
    ("internvl", "model"),
    ("minicpm_v", "model"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], Path]:
    """Saves each model once, untied or with a tied head that is stated in a part of its architecture."""
    folders: dict[tuple[str, str | None], Path] = {}

    def save(name: str, tied: str | None = None) -> Path:
        if (name, tied) not in folders:
            folders[name, tied] = save_tiny(spec_of(name, tied), tmp_path_factory.mktemp(name))
        return folders[name, tied]

    return save


def spec_of(name: str, tied: str | None = None, path: Path | None = None) -> ModelSpec:
    spec = FAMILIES[name].spec
    if tied is not None:
        part = {**spec.architecture.get(tied, {}), KEY: True}
        spec = replace(spec, architecture={**spec.architecture, tied: part})
    return spec if path is None else replace(spec, path=path, weights="trained", dtype="float32")


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "model"))


def state(folder: Path, value: bool | None, *parts: str) -> None:
    """Set the head's key in config.json, for the model and the named parts; None: remove it everywhere."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    for table in (config, *(part for part in config.values() if isinstance(part, dict))):
        table.pop(KEY, None)
    if value is not None:
        for table in [config[part] for part in parts] or [config]:
            table[KEY] = value
    file.write_text(json.dumps(config))


def head_of(tensors: dict[str, Any]) -> str:
    """The name that a checkpoint has for the head; some have one of an earlier format."""
    return next(name for name in tensors if name.endswith(HEAD))


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    """Tied checkpoints have none."""
    for name in [name for name in tensors if name.endswith(HEAD)]:
        del tensors[name]


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load(file.read_bytes())
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def has_head(spec: ModelSpec) -> bool:
    """Whether the loaded model has a head besides its embedding."""
    model = load_adapter(spec).model
    return model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def refusal(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the line of a refusal, which comes before any weight is read."""
    monkeypatch.setattr(base, "load_checkpoint", None)
    return refused(load_adapter, spec)


@pytest.mark.sampled
@pytest.mark.parametrize("stated", [None, True, False])
@pytest.mark.parametrize("name", UNTIED)
def test_a_missing_head_is_refused_whatever_the_checkpoint_states(
    name, stated, saved, tmp_path, monkeypatch
):
    folder = copied(saved(name), tmp_path)
    state(folder, stated)
    change(folder, drop_head)
    line = refusal(spec_of(name, path=folder), monkeypatch)
    assert f"has no {HEAD}, and {KEY} is false; valid: all files" in line


@pytest.mark.sampled(18)
@pytest.mark.parametrize("stated", [None, True])
@pytest.mark.parametrize("name", UNTIED)
def test_a_head_that_is_stored_is_used_and_counted(name, stated, saved, tmp_path, monkeypatch):
    """The checked memory includes embedding and head, even if config.json does not state them or ties them."""
    folder = copied(saved(name), tmp_path)
    state(folder, stated)
    change(folder, lambda tensors: tensors[head_of(tensors)].add_(1))
    wanted = []
    monkeypatch.setattr(base, "check_memory", lambda spec, needed, *room: wanted.append(needed))
    model = load_adapter(spec_of(name, path=folder)).model
    tensors = load((folder / "model.safetensors").read_bytes())
    assert torch.equal(model.lm_head.weight, tensors[head_of(tensors)])
    assert wanted == [weight_bytes(model)]


@pytest.mark.parametrize(("name", "part"), TIED)
def test_a_tied_model_needs_no_head_unless_its_checkpoint_denies_it(
    name, part, saved, tmp_path, monkeypatch
):
    folder = copied(saved(name, part), tmp_path)
    spec = spec_of(name, part, folder)

    def doubled(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = next(v for k, v in tensors.items() if "embed_tokens" in k).clone()

    change(folder, doubled)
    assert not has_head(spec)  # a copy of the embedding is no second tensor
    change(folder, drop_head)
    assert not has_head(spec)
    state(folder, None)
    assert not has_head(spec)
    state(folder, False)
    assert f"has no {HEAD}" in refusal(spec, monkeypatch)


def test_the_index_of_several_files_is_read(saved, tmp_path, monkeypatch):
    folder = copied(saved("internvl"), tmp_path)
    tensors = load((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
    }
    file = folder / "model.safetensors.index.json"
    state(folder, None)
    file.write_text(json.dumps(index))
    assert has_head(spec_of("internvl", path=folder))
    for names in (tensors, index["weight_map"]):
        drop_head(names)
    save_file(tensors, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    file.write_text(json.dumps(index))
    assert f"has no {HEAD}" in refusal(spec_of("internvl", path=folder), monkeypatch)


def test_a_folder_alone_is_tied_as_its_files_state(saved, tmp_path):
    """Without a file of conf/model, and under the class's default where they state nothing: tied for InternVL."""
    folder = copied(saved("internvl", "model"), tmp_path)
    state(folder, None)
    with espalier.load(folder, device="cpu").open_adapter() as adapter:
        assert adapter.model.lm_head.weight is adapter.model.get_input_embeddings().weight
    state(folder, False, "text_config")
    assert f"has no {HEAD}" in refused(espalier.load, folder, device="cpu")
    whole = copied(saved("internvl"), tmp_path / "whole")
    state(whole, None)
    with espalier.load(whole, device="cpu").open_adapter() as adapter:
        assert adapter.model.lm_head.weight is not adapter.model.get_input_embeddings().weight
