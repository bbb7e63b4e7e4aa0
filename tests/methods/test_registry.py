"""The table of methods, how the config becomes one, and the config files."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import compose_section
from espalier.harness.config.method_names import former_name, setting_names
from espalier.harness.config.resolvers import register
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.kinds.kind import label
from espalier.harness.paths import ROOT
from espalier.harness.settings import read_value
from espalier.harness.specs.catalogue import METHODS, MethodCatalogue, build_method, names_of
from espalier.methods.base import Decoder, TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.fastv import FastV
from espalier.methods.readings import readings_of
from espalier.serve.setting import build as served
from tests.methods.cases import BLOCKS, DEPTH
from tests.methods.released import TABLE
from tests.methods.twins import DECLARED

CONF = ROOT / "conf" / "method"
FILES = sorted(CONF.glob("*.yaml"))

#: Files of a folder of methods, one of which inherits from another and one of which is a base.
SOURCES = {
    "one": "from espalier.methods.fastv import FastV\nclass One(FastV): ...\nAlias = One\nclass _Helper(One): ...",
    "two": "from espalier.methods.fastv import FastV\nclass Left(FastV): ...\nclass Right(FastV): ...",
    "empty": "from espalier.methods.fastv import FastV",
    "helpers": "from espalier.methods.base import TokenReducer\nclass Base(TokenReducer): ...",
}


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MethodCatalogue]:
    """A folder of methods of its own; `wanted` is a config without a file."""
    package = "found_by_name"
    for name, source in SOURCES.items():
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / f"{name}.py").write_text(source)
    (tmp_path / "conf" / "method").mkdir(parents=True)
    for name in ("one", "two", "empty", "wanted", "one_official"):
        (tmp_path / "conf" / "method" / f"{name}.yaml").write_text("name: one")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield MethodCatalogue(package, tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@pytest.mark.parametrize("name", METHODS.names())
def test_every_name_builds_a_hashable_and_frozen_method(name: str):
    method = build_method(name, {})
    assert isinstance(method, TokenReducer | Decoder | CacheCompressor)
    assert hash(method) == hash(METHODS.load(name)())
    with pytest.raises(AttributeError):
        method.anything = 3  # type: ignore[union-attr]


def test_names_come_kind_by_kind():
    reducers, decoders = names_of(TokenReducer), names_of(Decoder)
    compressors = names_of(CacheCompressor)
    denoisers = names_of(DenoisingReducer)
    assert sorted([*reducers, *decoders, *compressors, *denoisers]) == list(METHODS.names())


def test_a_method_is_a_file_with_a_config_and_imported_when_it_is_asked_for(
    catalogue: MethodCatalogue,
):
    assert catalogue.names() == ("empty", "one", "two")
    assert "helpers" not in catalogue  # which has no config
    assert "wanted" not in catalogue  # which has no file
    assert f"{catalogue.package}.one" not in sys.modules
    assert catalogue.load("one").__name__ == "One"
    assert f"{catalogue.package}.two" not in sys.modules


@pytest.mark.parametrize(("name", "classes"), [("two", "Left, Right"), ("empty", "none")])
def test_a_file_of_no_or_several_methods_is_one_line(
    catalogue: MethodCatalogue, name: str, classes: str
):
    line = (
        rf"method='{name}': .*{name}\.py must define one class of a method; it defines: {classes}$"
    )
    with pytest.raises(UserError, match=line):
        catalogue.load(name)


def test_a_name_without_a_file_lists_the_valid_ones(catalogue: MethodCatalogue):
    with pytest.raises(
        UserError, match=r"method='onw' .*did you mean one\?.*valid: empty, one, two"
    ):
        catalogue.load("onw")


def test_every_file_is_a_method_with_its_config_or_used_by_others():
    """A method without a config would be found by nobody."""
    modules = {path.stem for path in (ROOT / "methods").glob("*.py")} - {"__init__"}
    files = [path for folder in ("methods", "harness") for path in (ROOT / folder).rglob("*.py")]
    sources = "".join(path.read_text() for path in files)
    unused = {name for name in modules if f"from espalier.methods.{name} import" not in sources}
    assert unused <= set(METHODS.names())


def test_every_choice_has_a_slow_version_and_all_released_vectors_are_used():
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        import_module(f"tests.methods.{path.stem}")
    methods = {name: build_method(name, {}) for name in METHODS.names()}
    # The others act nowhere: no reduction, and decoders that do not guide the draft.
    choosing = {name for name, method in methods.items() if method.read_sites(BLOCKS, DEPTH)}
    assert set(DECLARED) == choosing
    assert set().union(*DECLARED.values()) == set(TABLE)


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
        ("dycoke", {"reading": "both"}, r"\.reading='both' must be one of paper, official"),
        ("lookm", {"merging": "sum"}, r"\.merging='sum' must be one of pivot, average"),
        ("aircache", {"alpha": 1.5}, "alpha=1.5"),
        ("aircache", {"window": "best"}, "elite, all, continuous, visual"),
        ("snapkv", {"kernel": 4}, "kernel=4"),
        ("elastic", {"merged": 2}, "merged=2"),
        ("h2o", {"allocation": "lorentz"}, "uniform, pyramid, lorenz"),
        ("h2o", {"scope": "words"}, "visual, prompt"),
        ("visionzip", {"dominant_share": -0.1}, r"dominant_share=-0\.1 .*from 0 to 1"),
    ],
)
def test_a_bad_parameter_is_one_line_with_its_key(name: str, params: dict, line: str):
    with pytest.raises(UserError, match=line):
        build_method(name, params)


def test_lists_and_optional_values_are_read():
    assert read_value("method.params.layers", [1, 2], tuple[int, ...]) == (1, 2)
    assert read_value("method.params.layer", None, int | None) is None
    with pytest.raises(UserError, match=r"layers\[1\]='b' must be an integer"):
        read_value("method.params.layers", [1, "b"], tuple[int, ...])
    with pytest.raises(UserError, match="must be an integer or null"):
        read_value("method.params.layer", "b", int | None)


def test_the_config_files_cover_the_registry():
    named = {yaml.safe_load(path.read_text())["name"] for path in FILES}
    assert named == set(METHODS.names())
    assert {path.stem for path in FILES} >= named


def config_of(name: str) -> dict[str, Any]:
    """Return the section that a name composes, on the embedded benchmarks."""
    register()
    return compose_section("method", name)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", setting_names())
def test_every_setting_builds_and_shows_every_parameter(name: str):
    config = config_of(name)
    assert config["variant"] in ("paper", "official")
    method = build_method(config["name"], config["params"])
    of_draft = isinstance(method, Decoder) and method.source == "model"
    draft = {"draft", "draft_options"} if of_draft else set()
    assert set(config) - {"variants"} == {"name", "variant", "params"} | draft
    method.sites(6)  # every file works on the smallest model, whose decoder has six layers
    assert set(config["params"]) == {field.name for field in fields(method)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_variants_set_the_same_parameters_and_the_released_code_is_the_default(path: Path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    listed = config.get("variants", {})
    assert config["variant"] == next(iter(listed), config["variant"])
    assert tuple(listed) in ((), ("official", "paper"))
    left_open = {key for key, value in config["params"].items() if value == "${variant:}"}
    assert all(set(values) == left_open for values in listed.values())
    assert bool(left_open) == bool(listed)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_single_reading_has_the_name_of_what_it_follows(path: Path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    text = " ".join(
        (inspect.getdoc(import_module(f"espalier.methods.{config['name']}")) or "").split()
    )
    follows_code = re.search(r"\bfollowed is\b|\bis followed for\b", text.lower()) is not None
    assert "variants" in config or (config["variant"] == "official") == follows_code
    assert not follows_code or "Differs: " in text


@pytest.mark.sampled
@pytest.mark.parametrize("name", METHODS.names())
def test_harness_and_server_build_the_same_method_for_a_name(name: str):
    register()
    section = compose_section("method", name)
    readings = readings_of(name)
    assert served(name, {}) == build_method(name, section["params"])
    assert section["variant"] == readings.default
    for variant, sets in readings.variants.items():
        section = compose_section("method", name, values=[f"method.variant={variant}"])
        assert served(name, sets) == build_method(name, section["params"])


@pytest.mark.sampled
@pytest.mark.parametrize("name", setting_names())
def test_a_label_says_which_of_two_readings_ran_and_nothing_that_it_sets(name: str):
    config = config_of(name)
    method, variants = build_method(config["name"], config["params"]), config.get("variants") or {}
    words = label(method, config["variant"], variants, Budget("kept", 0.5))
    named = former_name(name)
    changed = [] if named is None else [f"{key}={value}" for key, value in named.params.items()]
    assert len(changed) == words.count("=")
    assert words.endswith(config["variant"]) == bool(variants)


@pytest.mark.slow
def test_a_bare_name_is_the_released_code_and_former_names_stay(capsys: pytest.CaptureFixture[str]):
    argv = ["-m", "method=fastv,none", "method.variant=paper,official"]
    assert [spec[:2] for spec in specs(*argv)] == [
        ("fastv", "paper"),
        ("fastv", "official"),
        ("none", "paper"),
        ("none", "paper"),
    ]
    assert "method=none has one reading, paper, which runs" in capsys.readouterr().err
    assert specs("method=scope", "method.variant=paper") == specs("method=scope")
    assert "method=scope has one reading, official, which runs" in capsys.readouterr().err
    assert specs("method=elastic") == specs("method=elastic", "method.variant=official")
    for name, line in (
        ("elastic_official", "method=elastic method.variant=official"),
        ("elastic_paper", "method=elastic method.variant=paper"),
        ("divprune_layer2", "method=divprune method.params.layer=2"),
        (
            "sparsevlm_official_64",
            "method=sparsevlm method.variant=official method.params.schedule=[82,32,18]",
        ),
    ):
        assert specs(f"method={name}") == specs(*line.split())
        assert capsys.readouterr().err == f"method={name} is a former name of {line}\n"
    values = ("method.params.K=3", "method.params.queries=last")
    assert specs("method=fastv_paper", *values) == [("fastv", "paper", {"K": 3, "queries": "last"})]
    with pytest.raises(
        UserError, match=r"method\.variant=.other. is unknown; valid: official, paper"
    ):
        specs("method=fastv", "method.variant=other")
    with pytest.raises(UserError, match="method='dart_official' is unknown"):
        specs("method=dart_official")


def specs(*argv: str) -> list[tuple[str, str, Any]]:
    built = [build_spec(cell).method for cell in read_command(argv, typed=True).cells]
    return [(method.name, method.variant, method.params) for method in built]


@pytest.mark.slow
def test_methods_import_torch_and_each_other_alone():
    blocked = ("hydra", "omegaconf", "transformers", "lmms_eval", "espalier.harness")
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from importlib import import_module; "
        f"[import_module('espalier.methods.' + name) for name in {('fastv', *METHODS.names())!r}]"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
