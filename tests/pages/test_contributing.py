"""The recipe in CONTRIBUTING.md works as printed."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml

from harness.budget import Budget
from harness.engine.session import Session
from tests.tiny import CHATS, load_llava, save_llava

ROOT = Path(__file__).resolve().parents[2]


def recipe(name: str) -> str:
    """Return the code block that follows the marker of a file."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"<!-- recipe: {re.escape(name)} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found, f"no block for {name}"
    return found.group(1)


@pytest.fixture
def norm(tmp_path, monkeypatch):
    file = tmp_path / "norm.py"
    file.write_text(recipe("methods/norm.py"))
    spec = spec_from_file_location("recipe_norm", file)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recipe_norm", module)
    spec.loader.exec_module(module)
    return module.Norm


def test_the_example_method_runs_through_the_engine(norm, tmp_path):
    params = yaml.safe_load(recipe("conf/method/norm.yaml"))["params"]
    adapter = load_llava(save_llava(tmp_path), "float32")
    inputs = adapter.encode(CHATS[:1])
    with Session(adapter, norm(**params), Budget("kept", 0.75)) as session:
        record = session.generate(inputs, max_new_tokens=3, do_sample=False).records[0]
    assert record.kept == (4,)
    with torch.inference_mode():
        features = adapter.model.model.get_image_features(pixel_values=inputs["pixel_values"])
    lengths = torch.cat(list(features.pooler_output)).norm(dim=-1)
    assert set(record.origin.tolist()) == set(lengths.topk(4).indices.tolist())


def test_the_example_config_names_the_registry_entry():
    config = yaml.safe_load(recipe("conf/method/norm.yaml"))
    assert (
        f'METHODS.add("{config["name"]}", "methods.norm:Norm")'
        in (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert set(config) == {"name", "variant", "params"}


def test_the_example_refuses_a_bad_hyper_parameter(norm):
    with pytest.raises(ValueError, match=r"method\.params\.p"):
        norm(p=-1.0)
