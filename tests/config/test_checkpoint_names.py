"""A hub id or a folder in the place of a model's name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import espalier
from espalier.harness.config.checkpoint_names import hub_names, model_choice
from espalier.harness.config.compose import read_command
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.models.families import ADAPTERS, GENERIC, MODEL_TYPES, family_of
from espalier.harness.paths import ROOT
from espalier.harness.specs.revisions import model_revision
from espalier.harness.store.files.digests import Digests
from tests import commands
from tests.refused import refused

SEEDLING = ROOT / "harness" / "seedling" / "weights" / "seedling"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(home: Path) -> dict[str, str]:
    """Write the cache of a hub that holds one repository, and return the environment that names it."""
    repository = home / "hub" / "models--me--tiny"
    shutil.copytree(SEEDLING, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return {**os.environ, "HF_HOME": str(home)}


def test_a_hub_id_of_conf_is_another_name_of_its_file() -> None:
    by_id, by_name = (
        commands.cells_of(f"model={name}", "method=fastv")
        for name in ("llava-hf/llava-1.5-7b-hf", "llava15_7b")
    )
    assert by_id == by_name
    assert [
        cell["model"]["name"]
        for cell in commands.cells_of("-m", "model=seedling,Qwen/Qwen2-VL-7B-Instruct")
    ] == ["seedling", "qwen2_vl_7b"]
    assert len(set(hub_names().values())) == len(hub_names()) > 20


@pytest.mark.parametrize("name", ["ckpt", "my ckpt, v=1 (数)~%41"])
def test_a_folder_of_any_name_is_read_by_its_own_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SEEDLING, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    named, known = (
        commands.spec_of(f"model=./{name}", "method=fastv"),
        commands.spec_of("method=fastv"),
    )
    model = named.model
    assert (model.name, model.path, model.hub) == (name, tmp_path / name, None)
    assert (model.adapter, model.conversation) == ("llava", "checkpoint")
    # Which signals a family's code has is not in a checkpoint, nor whether tokens are patches.
    stated = replace(known.model.facts, signals=frozenset(SIGNALS), patch_tokens=False)
    assert replace(model.facts, patch_tokens=False) == stated
    assert model_revision(model, Digests()) == model_revision(known.model, Digests())
    for quoted in (f"{tmp_path / name}", f'"{tmp_path / name}"'):
        assert commands.spec_of(f"model={quoted}", "method=fastv").model == model


def test_a_folder_can_draft() -> None:
    draft = SEEDLING.with_name("seedling_draft")
    spec = commands.spec_of("method=pearl", f"method.draft={draft}").method.draft
    assert (spec.name, spec.path, spec.facts.text.layers) == ("seedling_draft", draft, 2)


WRONG = (
    ("llava-hf/llava-1.5-7b", "(did you mean llava-hf/llava-1.5-7b-hf?)"),
    ("llava-hf/llava-1.5-7b", "hf download llava-hf/llava-1.5-7b"),
    ("https://huggingface.co/Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2-VL-7B-Instruct?"),
    ("./nosuch", "is not a folder"),
    ("/etc", "holds no config.json"),
    ("a/b/c", "hf download <owner>/<name>"),
)


@pytest.mark.parametrize(("name", "words"), WRONG)
def test_a_wrong_name_is_one_line_with_the_nearest(name: str, words: str) -> None:
    for key, use in {
        "model": lambda: read_command([f"model={name}"]),
        "method.draft": lambda: commands.spec_of("method=pearl", f"method.draft={name}"),
        "name": lambda: espalier.load(name),
    }.items():
        line = refused(use)
        assert f"{key}={name!r}" in line
        assert words in line


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_config.json", {}, "holds no config.json but a LoRA adapter, to be merged"),
        ("model-q4.gguf", {}, "holds no config.json but GGUF, the format of llama.cpp"),
        (
            "config.json",
            {"model_type": "gpt2"},
            ": model_type='gpt2' is unknown; valid: deepseek_ocr2, deepseek_vl_v2, diffusion_gemma, gemma3, glm46v",
        ),
        ("config.json", {}, ": model_type='None' is unknown"),
        (
            "config.json",
            {"model_type": "llava", "quantization_config": {"quant_method": "awq"}},
            "(quantization_config: awq)",
        ),
        (
            "config.json",
            {"model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"]},
            "llava-hf/ on the hub",
        ),
        ("config.json", [], "config.json cannot be read"),
    ],
)
def test_a_checkpoint_that_no_family_supports_is_one_line(
    file: str, content: object, words: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    assert words in refused(model_choice, str(tmp_path))


def test_the_types_of_checkpoints_are_those_of_the_families() -> None:
    types = {name: ADAPTERS.load(name).types() for name in ADAPTERS.names()}
    assert all(name in types[family] for name, family in MODEL_TYPES.items())
    # The generic family reads what no other does.
    del types[GENERIC]
    for family, names in types.items():
        assert all(family_of(name) in (family, MODEL_TYPES[name]) for name in names)
    assert "model_type='nosuch' is unknown" in refused(family_of, "nosuch")


CHOICE = "from espalier.harness.config.checkpoint_names import *; print(model_choice('me/tiny'))"


def test_an_id_of_the_local_cache_is_found(tmp_path: Path) -> None:
    environment = hub_cache(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", CHOICE], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("checkpoint:me%2Ftiny\n", "")


@pytest.mark.slow
def test_an_id_of_the_local_cache_runs(tmp_path: Path) -> None:
    line = ["model=me/tiny", "method=fastv", "limit=2", f"store={tmp_path}", "engine.paired=0"]
    done = subprocess.run(
        [sys.executable, "run.py", "json=true", *line],
        cwd=ROOT,
        env=hub_cache(tmp_path / "hf"),
        capture_output=True,
        text=True,
    )
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["model"], row["settings"]["model"]["revision"]) == ("tiny", f"me/tiny@{COMMIT}")
