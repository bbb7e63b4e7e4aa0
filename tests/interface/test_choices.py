"""Lists of methods, models and benchmarks: complete, and fast."""

from __future__ import annotations

import subprocess
import sys

import espalier
from espalier.harness.config.group_lists import choices
from espalier.harness.config.method_kinds import KINDS, method_kind
from espalier.harness.paths import ROOT
from espalier.harness.specs.catalogue import METHODS
from espalier.methods.base import Decoder, TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer

CLASSES = (DenoisingReducer, TokenReducer, CacheCompressor, Decoder)


def test_every_file_is_listed() -> None:
    for group, frame in (
        ("method", espalier.methods()),
        ("model", espalier.models()),
        ("benchmark", espalier.benchmarks()),
    ):
        assert sorted(frame.index) == choices(group)
        assert frame.title.str.len().min() > 0


def test_kinds_are_those_of_the_classes() -> None:
    for name in METHODS.names():
        method_class = METHODS.load(name)
        base = next(base for base in CLASSES if issubclass(method_class, base))
        assert method_kind(name) == KINDS[base.__name__], name
    assert set(espalier.methods().kind) == set(KINDS.values())


def test_what_is_here_comes_first() -> None:
    models, benchmarks = espalier.models(), espalier.benchmarks()
    assert models.offline["seedling"]
    assert benchmarks.offline["seedling_vqa"]
    for frame in (models, benchmarks):
        assert list(frame.offline) == sorted(frame.offline, reverse=True)
    assert benchmarks.samples["gqa"] == 12578


def test_lists_need_no_torch() -> None:
    code = (
        "import sys, espalier\n"
        "espalier.methods(), espalier.models(), espalier.benchmarks()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_package_of_methods_is_still_a_package() -> None:
    import espalier.methods.fastv

    assert espalier.methods.fastv.FastV is METHODS.load("fastv")
