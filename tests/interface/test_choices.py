"""Lists of methods, models and benchmarks: complete, and fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import espalier
import espalier.methods.fastv
from espalier.harness.config.group_lists import choices
from espalier.harness.config.method_names import KINDS, method_kind
from espalier.harness.paths import ROOT
from espalier.harness.specs.catalogue import METHODS
from espalier.methods.base import Decoder, TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer
from tests.plugins.packages import config, imported_from, install, method

CLASSES = (DenoisingReducer, TokenReducer, CacheCompressor, Decoder)


def test_every_file_is_listed() -> None:
    frames = (espalier.methods(), espalier.models(), espalier.benchmarks())
    for group, frame in zip(("method", "model", "benchmark"), frames, strict=True):
        assert sorted(frame.index) == choices(group)
        assert frame.title.str.len().min() > 0


def test_kinds_are_those_of_the_classes() -> None:
    for name in METHODS.names():
        method_class = METHODS.load(name)
        base = next(base for base in CLASSES if issubclass(method_class, base))
        assert method_kind(name) == KINDS[base.__name__], name
    assert set(espalier.methods().kind) == set(KINDS.values())
    # The package of methods is still a package.
    assert espalier.methods.fastv.FastV is METHODS.load("fastv")


def test_what_is_here_comes_first() -> None:
    models, benchmarks = espalier.models(), espalier.benchmarks()
    assert models.offline["seedling"]
    assert benchmarks.offline["seedling_vqa"]
    for frame in (models, benchmarks):
        assert list(frame.offline) == sorted(frame.offline, reverse=True)
    assert benchmarks.samples["gqa"] == 12578


@pytest.mark.slow
def test_lists_need_no_torch() -> None:
    code = (
        "import sys, espalier\n"
        "espalier.methods(), espalier.models(), espalier.benchmarks()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_those_of_installed_plugins_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "m.py": method("FirstTokens"),
        "conf/method/first.yaml": config("first", "listed_plugin.m:FirstTokens"),
        "conf/method/lacking.yaml": "name: lacking\ncode: listed_plugin.m:FirstTokens\n",
        "conf/model/twin.yaml": "# A twin.\ndefaults: [seedling, _self_]\nname: twin\n",
        "conf/benchmark/twice.yaml": "# Again.\ndefaults: [seedling_vqa, _self_]\nname: twice\n",
    }
    install(tmp_path, "listed_plugin", files)
    with imported_from(tmp_path, monkeypatch):
        methods, models = espalier.methods(), espalier.models()
        assert methods.loc["first", ["kind", "params", "title"]].tolist() == [
            methods.kind["fastv"],
            "K",
            "About first",
        ]
        assert "lacking" not in methods.index
        assert models.loc["twin", ["family", "offline", "title"]].tolist() == [
            models.family["seedling"],
            True,
            "A twin",
        ]
        assert "twice" in espalier.benchmarks().index
    assert "lacking.yaml: lacks params; valid: name" in capsys.readouterr().err
    assert "first" not in espalier.methods().index
