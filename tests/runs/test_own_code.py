"""The digest of a method that no module holds: all that runs counts, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.runs import own_code as own_code_module
from espalier.harness.runs.own_code import is_importable, own_code, source_file
from espalier.methods.fastv import FastV

CELL = '''
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.select.topk import top

POWER, NAMES, WEIGHTS = 2.0, {"a", "b", "c"}, torch.arange(3.0)
UNUSED = object()


def length(tokens, scale=1.0):
    """Length of tokens."""
    return tokens.float().norm(p=POWER, dim=-1) * scale


class Base(TokenReducer):
    shift = 0

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)


@dataclass(frozen=True)
class Mine(Base):
    """Longest tokens."""

    scale: float = 1.0

    @torch.no_grad()
    def plan(self, view: View, keep: int) -> Plan:
        # the longest
        scores = [length(row, self.scale) for row in view.tokens]
        choose = lambda values: np.abs(values) in NAMES
        return Plan(top(torch.stack(scores) + self.shift + WEIGHTS.sum() * 0, keep))
'''


def digest(**changes: str) -> str:
    source = CELL
    for before, after in changes.values():
        assert before in source
        source = source.replace(before, after)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "cell", "exec", dont_inherit=True), names)
    return own_code(names["Mine"]).digest


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("POWER, NAMES, WEIGHTS = 2.0", "POWER, NAMES, WEIGHTS = 3.0"),
        ('"b", "c"}', '"b", "d"}'),
        ("arange(3.0)", "arange(1.0, 4.0)"),
        (" * scale", " / scale"),
        ("scale=1.0):", "scale=2.0):"),
        ("shift = 0", "shift = 1"),
        ("scale: float = 1.0", "scale: float = 2.0"),
        ('Site("prefix")', 'Site("layer", 2)'),
        ("np.abs", "np.sign"),
        ("@torch.no_grad()", ""),
        ("WEIGHTS.sum() * 0", "WEIGHTS.sum() * 2"),
    ],
)
def test_what_runs_counts(before: str, after: str) -> None:
    assert digest(change=(before, after)) != digest()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# the longest", "# another comment"),
        ("Longest tokens.", "Other words."),
        ("Length of tokens.", "Other words."),
        ("UNUSED = object()", "UNUSED = 1"),
        ("view: View, keep: int", "view, keep"),
        ('{"a", "b", "c"}', '{"c", "b", "a"}'),
    ],
)
def test_what_does_not_run_does_not_count(before: str, after: str) -> None:
    assert digest(change=(before, after)) == digest()


@pytest.mark.slow
def test_it_is_equal_in_every_process() -> None:
    code = (
        f"{CELL}\nfrom espalier.harness.runs.own_code import own_code\nprint(own_code(Mine).digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest()


def test_modules_that_it_uses_count_by_their_files() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "cell", "exec", dont_inherit=True), names)
    assert own_code(names["Mine"]).modules == {
        *("espalier.methods.plans", "espalier.methods.reducers", "espalier.methods.views"),
        "espalier.methods.select.topk",
    }
    assert not is_importable(names["Mine"])
    assert is_importable(FastV)


@pytest.mark.parametrize(
    ("root", "file", "is_library"),
    [
        # A checkout that holds its environment, as `make` builds it.
        ("checkout", "checkout/.venv/lib/python3.11/site-packages/numpy/linalg.py", True),
        ("checkout", "checkout/methods/fastv.py", False),
        ("checkout", "checkout/mine.py", False),
        # An installed package, in the environment.
        ("env/lib/site-packages/espalier", "env/lib/site-packages/numpy/linalg.py", True),
        ("env/lib/site-packages/espalier", "env/lib/site-packages/espalier/methods/a.py", False),
        ("env/lib/site-packages/espalier", "home/mine.py", False),
        # An environment elsewhere, and a package of Debian's.
        ("checkout", "env/lib/site-packages/numpy/linalg.py", True),
        ("checkout", "usr/lib/python3/dist-packages/numpy/linalg.py", True),
    ],
)
def test_a_library_counts_by_its_version_wherever_its_environment_lies(
    root: str, file: str, is_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("placed")
    module.__file__ = str(tmp_path / file)
    monkeypatch.setitem(sys.modules, "placed", module)
    monkeypatch.setattr(own_code_module, "ROOT", tmp_path / root)
    assert source_file("placed") == (None if is_library else tmp_path / file)


def test_values_of_a_function_count() -> None:
    def method_with(value: Any) -> type:
        class Local(FastV):
            def fractions(self, share: float, n_sites: int) -> Any:
                return value

        return Local

    assert own_code(method_with(1)).digest != own_code(method_with(2)).digest
    assert own_code(method_with([1, (2,)])).digest == own_code(method_with([1, (2,)])).digest
    for value, words in (
        (object(), "is a object"),
        (nn.Linear(1, 1), "is a Linear"),
    ):
        with pytest.raises(UserError, match=rf"method Local: value {words}.*valid: a number"):
            own_code(method_with(value))
