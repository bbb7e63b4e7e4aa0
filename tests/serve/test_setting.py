"""What a request may ask of the plug-in, the counts that it keeps, and the modules that it is made of."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.paths import ROOT
from espalier.harness.specs.catalogue import METHODS
from espalier.methods.random import Random
from espalier.serve import digits
from espalier.serve.setting import (
    Setting,
    SettingError,
    build,
    decode,
    method_class,
    names,
    reason_of,
    served,
)
from tests.serve.stubs import split
from tests.tiny import LLAVA

#: Packages of the harness, which an environment with vLLM need not have.
OF_THE_HARNESS = ("transformers", "hydra", "omegaconf", "lmms_eval", "datasets", "pandas", "vllm")

IMPORTS = """\
import pkgutil, sys
for name in {blocked}:
    sys.modules[name] = None
from espalier import methods
from espalier.serve import adapter, child, clock, digits, families, metrics
from espalier.serve import model, places, plugin, processor, setting, signals
for module in pkgutil.walk_packages(methods.__path__, "espalier.methods."):
    __import__(module.name)
assert not any(name.startswith("espalier.harness") for name in sys.modules)
print(len(setting.served()))
"""


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"method": "fastv"}, "'fastv' cannot be served: it acts before decoder layer 2"),
        ({"method": "top_p"}, "it keeps a count of its own"),
        ({"method": "tome"}, "it acts inside the vision tower"),
        ({"method": "downsample"}, "it reduces the picture before the tower"),
        ({"method": "dycoke"}, "it chooses among the entries of the cache"),
        ({"method": "snapkv"}, "it does not remove tokens of a prompt"),
        ({"method": "random", "params": {"layer": 3}}, "acts before decoder layer 3"),
        ({"method": "fast"}, "espalier.method='fast' is unknown; valid: cdpruner, "),
        ({"method": "divprune", "params": {"a": 1}}, "espalier.params.a is unknown"),
        ({"method": "cdpruner", "params": {"relevance": "x"}}, "relevance"),
        ({"ratio": 1.0}, "espalier.ratio=1.0 is out of range; valid: 0 <= ratio < 1"),
        ({"ratio": True}, "espalier.ratio=True is out of range"),
        ({"keep": 0}, "espalier.keep=0 is no count; valid: 1 and more, null"),
        ({"positions": "new"}, "espalier.positions='new'; valid: original, renumbered"),
        ({"seed": "a"}, "espalier.seed='a'"),
        ({"seed": True}, "espalier.seed=True is no seed; valid: an integer"),
        ({"sample": None}, "espalier.sample=None is no name; valid: a text"),
        ({"sample": "\ud800"}, "is no name; valid: a text"),
        ({"ratio": 0.5, "keep": 16}, "espalier.ratio=0.5 and espalier.keep=16 contradict each"),
        ({"keep": 16, "ratio": 0.0}, "espalier.ratio=0.0 and espalier.keep=16 contradict each"),
        ({"params": None}, "espalier.params=None is no table; valid: {}"),
        ({"params": ["layer"]}, "espalier.params=['layer'] is no table; valid: {}"),
        ({"method": "none", "params": {"layer": 1}}, "espalier.params.layer is unknown"),
        (
            {"method": "random", "params": {"layer": "0"}},
            "espalier.params.layer='0' is not valid for method random; valid: an integer",
        ),
        ({"method": "dycoke", "params": {"l": 99}}, "method.params.l=99 is out of range; valid: "),
        ({"metod": "x"}, "espalier.metod is unknown; valid: method, params, ratio"),
        ("divprune", "espalier='divprune' is no table"),
    ],
)
def test_a_wrong_setting_is_one_line(values: Any, line: str) -> None:
    with pytest.raises(SettingError, match="espalier") as error:
        Setting().changed(values).sites(32)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_every_method_is_served_or_says_why() -> None:
    assert set(names()) == set(METHODS.names())
    assert {"none", "random", "divprune", "cdpruner", "visionzip", "hired"} <= set(served())
    assert all(reason_of(name) for name in names() if name not in served())


def test_a_request_changes_the_setting_of_the_engine() -> None:
    engine = Setting(method="divprune", keep=64)
    assert engine.changed({"ratio": 0.5}) == Setting(method="divprune", ratio=0.5)
    assert engine.changed({"keep": 8}).kept(100) == 8
    assert Setting(method="cdpruner", params={"relevance": "none"}).changed(
        {"method": "random"}
    ) == Setting(method="random")
    assert Setting(method="cdpruner").reads_words(32)
    assert not Setting(method="cdpruner", params={"relevance": "none"}).reads_words(32)


@pytest.mark.sampled
@pytest.mark.parametrize("name", names())
def test_a_value_of_any_type_is_read_or_refused_in_one_line(name: str) -> None:
    """Words of Python's own errors name no key; as JSON, the defaults of the class build the same method."""
    method = method_class(name)()
    defaults = asdict(method)
    assert build(name, json.loads(json.dumps(defaults))) == method
    for key in defaults:
        for value in (None, "x", "0", [], [None], {}, True, -1, 1.5, math.nan, 10**400):
            line = refusal({"method": name, "params": {key: value}})
            assert re.match(rf"espalier\.(method={name!r}|params[. ])|$", line), value
            assert not re.search(r"\n|supported between|' object|positional", line), value


def refusal(values: dict[str, Any]) -> str:
    """The line that refuses a request, empty if it is served."""
    try:
        Setting().changed(values).sites(32)
    except SettingError as error:
        return str(error)
    return ""


def test_a_request_states_a_ratio_or_a_count() -> None:
    for setting in (Setting("random", ratio=0.5, seed=3), Setting("random", keep=8, sample="a")):
        assert Setting("divprune", keep=4).changed(setting.values) == setting
        assert Setting("divprune", ratio=0.9).changed(setting.values) == setting
    assert Setting("random", keep=8).changed({"ratio": 0.5, "keep": None}).kept(10) == 5


def test_a_setting_survives_its_text() -> None:
    setting = Setting("cdpruner", {"relevance": "none"}, 0.25, None, "renumbered", 3, "a/1")
    assert decode(setting.encode()) == setting
    assert len({setting.encode(), Setting().encode()}) == 2


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.75, 0.9, 0.999])
def test_counts_are_those_of_the_budget(ratio: float) -> None:
    setting = Setting("random", ratio=ratio)
    for count in range(1, 200):
        (kept,) = Budget("kept", ratio).keep(Random(), LLAVA.facts, count, 20)
        assert setting.kept(count) == kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_exact_in_narrow_types(dtype: torch.dtype) -> None:
    numbers = torch.tensor([[0, 1, 256, 257], [1001, 65535, 2**20 + 1, 2**21 - 1]])
    embeddings = torch.randn(2, 8).to(dtype)
    channels = digits.append(embeddings, digits.encode(numbers))
    assert channels.dtype == dtype
    back, read = split(channels)
    assert torch.equal(back, embeddings)
    assert torch.equal(read, numbers)
    with pytest.raises(ValueError, match="do not fit"):
        digits.encode(numbers + 1)


@pytest.mark.slow
def test_methods_and_plug_in_import_with_torch_alone() -> None:
    root = ROOT if (ROOT / "espalier").is_dir() else Path(ROOT).parent
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(blocked=OF_THE_HARNESS)],
        capture_output=True,
        encoding="utf-8",
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(served())
