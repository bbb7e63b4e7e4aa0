"""The table of methods, how the config becomes one, and the config files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml

from harness.catalogue import METHODS, build_method, names_of, typed
from harness.errors import UserError
from methods.base import Decoder, TokenReducer
from methods.compressor import CacheCompressor
from methods.fastv import FastV

CONF = Path(__file__).resolve().parents[2] / "conf" / "method"
FILES = sorted(CONF.glob("*.yaml"))


@pytest.mark.parametrize("name", METHODS.names())
def test_every_name_loads_and_builds_with_the_defaults(name: str):
    assert isinstance(build_method(name, {}), TokenReducer | Decoder)


def test_names_come_kind_by_kind():
    reducers, decoders = names_of(TokenReducer), names_of(Decoder)
    assert set(reducers) | set(decoders) == set(METHODS.names())
    assert {"fastv", "specvlm", "none"} <= set(reducers)
    assert {"autoregressive", "specvlm_sd", "std"} <= set(decoders)
    assert not set(reducers) & set(decoders)
    assert names_of(CacheCompressor) == ()


def test_a_name_can_be_taken_once_only():
    with pytest.raises(ValueError, match="registered twice"):
        METHODS.add("fastv", "methods.fastv:FastV")


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(UserError, match=r"method='fastw' is unknown .*fastv.*visionzip"):
        build_method("fastw", {})


def test_parameters_arrive():
    assert build_method("fastv", {"K": 3, "queries": "mean"}) == FastV(K=3, queries="mean")
    assert build_method("d2pruner", {"alpha": 1}).alpha == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "params", "line"),
    [
        ("fastv", {"k": 3}, r"method\.params='k' is unknown.*valid: K, queries"),
        (
            "pooled",
            {"K": 3},
            r"method\.params\.K is unknown; method pooled has no hyper-parameters",
        ),
        ("fastv", {"K": "two"}, r"method\.params\.K='two' must be an integer"),
        ("fastv", {"K": 2.5}, r"method\.params\.K=2\.5 must be an integer"),
        ("fastv", {"K": True}, r"method\.params\.K=True must be an integer"),
        ("fastv", {"K": None}, r"method\.params\.K=None must be an integer"),
        ("fastv", {"K": 0}, r"method\.params\.K=0 is out of range; valid: 1 or more"),
        ("fastv", {"queries": "all"}, r"method\.params\.queries='all' must be one of last, mean"),
        ("d2pruner", {"alpha": 1.5}, r"method\.params\.alpha=1\.5 .*from 0 to 1"),
        ("d2pruner", {"alpha": float("nan")}, r"method\.params\.alpha=nan .*from 0 to 1"),
        ("d2pruner", {"pivot_exclusion": 1}, r"pivot_exclusion=1 must be true or false"),
        (
            "d2pruner",
            {"selection": "random"},
            r"selection='random' must be one of graph, importance",
        ),
        (
            "pearl",
            {"gamma": 0},
            r"method\.params\.gamma=0 is out of range; valid: 1 or more, auto or best",
        ),
        ("pearl", {"gamma": "many"}, r"gamma='many' must be an integer or one of auto, best"),
        ("visionzip", {"dominant_share": -0.1}, r"dominant_share=-0\.1 .*from 0 to 1"),
    ],
)
def test_a_bad_parameter_is_one_line_with_its_key(name: str, params: dict, line: str):
    with pytest.raises(UserError, match=line) as caught:
        build_method(name, params)
    assert "\n" not in str(caught.value)


def test_lists_and_optional_values_are_typed():
    assert typed("method.params.layers", [1, 2], tuple[int, ...]) == (1, 2)
    assert typed("method.params.layer", None, int | None) is None
    with pytest.raises(UserError, match=r"layers\[1\]='b' must be an integer"):
        typed("method.params.layers", [1, "b"], tuple[int, ...])
    with pytest.raises(UserError, match="must be an integer or null"):
        typed("method.params.layer", "b", int | None)


def test_the_config_files_cover_the_registry():
    named = {yaml.safe_load(path.read_text())["name"] for path in FILES}
    assert named == set(METHODS.names())
    assert {path.stem for path in FILES} >= named


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_file_builds_and_shows_every_parameter(path: Path):
    config = yaml.safe_load(path.read_text())
    assert config["variant"] in ("paper", "official")
    method = build_method(config["name"], config["params"])
    of_draft = isinstance(method, Decoder) and method.source == "model"
    draft = {"draft", "draft_options"} if of_draft else set()
    assert set(config) == {"name", "variant", "params"} | draft
    method.sites(6)  # every file works on the smallest model, whose decoder has six layers
    assert set(config["params"]) == {field.name for field in fields(method)}


def test_two_config_files_are_never_the_same_method():
    built = [
        build_method(config["name"], config["params"])
        for config in (yaml.safe_load(path.read_text()) for path in FILES)
    ]
    assert len({(type(method), method) for method in built}) == len(FILES)


def test_a_method_is_hashable_and_frozen():
    @dataclass(frozen=True)
    class Other(FastV):
        pass

    assert hash(FastV()) == hash(FastV(K=2))
    assert FastV() != Other()
    with pytest.raises(AttributeError):
        FastV().K = 3  # type: ignore[misc]
