"""Installed packages with an entry point: found by every command, and harmless to all others when they are broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import espalier
from espalier.harness.config.composer import compose_section
from espalier.harness.errors import UserError
from espalier.harness.models.families import ADAPTERS, family_of
from espalier.harness.paths import ROOT
from tests.plugins.packages import config, imported_from, install, method
from tests.runs.helpers import Bench, make_bench

FAMILY = """
from dataclasses import replace

from espalier.harness.models.llava import LlavaAdapter


class Twin(LlavaAdapter):
    data = replace(LlavaAdapter.data, types=("twin", "llava"))


class Other: ...
"""

MODEL = """# A twin of the embedded model.
defaults: [seedling, _self_]
name: {name}
adapter: good_plugin.family:{adapter}
"""

PRESET = """# @package _global_
defaults: [{{override /method: {}}}, _self_]
"""

SWEEP = """# @package _global_
hydra: {mode: MULTIRUN, sweeper: {params: {method: "first,shared"}}}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """One good plug-in, one that takes names, and three that cannot be used."""
    place = tmp_path / "site"
    good = {
        "m.py": method("FirstTokens"),
        "family.py": FAMILY,
        "conf/method/first.yaml": config("first", "good_plugin.m:FirstTokens"),
        "conf/method/shared.yaml": config("shared", "good_plugin.m:FirstTokens"),
        "conf/model/twin.yaml": MODEL.format(name="twin", adapter="Twin"),
        "conf/model/none_such.yaml": MODEL.format(name="none_such", adapter="Other"),
        "conf/method/listed.yaml": "- a\n",
        "conf/method/nameless.yaml": "variant: paper\nparams: {}\n",
        "conf/experiment/both.yaml": PRESET.format("first"),
        "conf/experiment/takes.yaml": PRESET.format("shared"),
        "conf/experiment/sweeps.yaml": SWEEP,
    }
    install(place, "good_plugin", good)
    second = {
        "m.py": method("SecondTokens"),
        "conf/method/shared.yaml": config("shared", "second_plugin.m:SecondTokens"),
        "conf/method/fastv.yaml": config("faster", "second_plugin.m:SecondTokens"),
        "conf/experiment/both.yaml": PRESET.format("fastv"),
    }
    install(place, "second_plugin", second)
    bad = config("bad", "broken_plugin.m:Tokens")
    install(place, "broken_plugin", {"m.py": "import nothing_here\n", "conf/method/bad.yaml": bad})
    install(place, "bare_plugin", {})
    install(place, "lost_plugin", {}, "lost_package")
    return place


@pytest.fixture
def bench(
    site: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    with imported_from(site, monkeypatch):
        yield make_bench(tmp_path / "store", capsys, monkeypatch)


def test_its_names_run_and_rows_name_it(bench: Bench, site: Path) -> None:
    done = bench.success("method=first", "method.params.K=3")
    (plugin,) = done.last["extra"]["plugins"]
    assert plugin["name"] == "good_plugin 1.0"
    assert compose_section("method", "first")["code"] == "good_plugin.m:FirstTokens"
    assert bench("method=good_plugin.m:FirstTokens").last["extra"]["plugins"] == [plugin]
    # Any of its files counts, those of its configs do not.
    for file, counts in (("conf/method/more.yaml", False), ("helpers.py", True)):
        (site / "good_plugin" / file).write_text("# nothing\n")
        again = bench("method=first", "method.params.K=3").last["run_key"]
        assert (again != done.last["run_key"]) == counts


def test_other_names_are_not_concerned(bench: Bench) -> None:
    done = bench("method=uniform")
    assert "plug" not in done.err
    assert "plugins" not in done.last["extra"]
    done = bench("method=fastv")
    assert done.code == 0
    line = "method=fastv is that of conf; second_plugin 1.0 has the name, too, and is passed over"
    assert line in done.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            ("method=shared",),
            ("method='shared' is a file of good_plugin 1.0 and second_plugin 1.0",),
        ),
        (("+experiment=both",), ("experiment='both' is a file of good_plugin 1.0 and second",)),
        (("+experiment=takes",), ("method='shared' is a file of good_plugin 1.0 and second",)),
        (("+experiment=sweeps",), ("method='shared' is a file of good_plugin 1.0 and second",)),
        (("method=listed",), ("listed.yaml must be a table",)),
        (("method=nameless",), ("config key method.name is missing",)),
        (("method=bad",), ("No module named 'nothing_here'", "broken_plugin/m.py:1")),
        (("model=none_such",), ("model.adapter='good_plugin.family:Other' is no model family",)),
        (
            ("method=frist",),
            (
                "did you mean first?",
                "plug-in bare_plugin 1.0 is passed over",
                "plug-in lost_plugin 1.0 is passed over: its entry point it = 'lost_package'",
            ),
        ),
    ],
)
def test_its_own_names_tell_what_is_wrong(
    bench: Bench, line: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = bench(*line)
    assert (done.code, done.out) == (2, "")
    assert len([text for text in done.err.splitlines() if text.startswith("error: ")]) == 1
    assert all(word in done.err for word in words), done.err


def test_listings_name_each_problem(bench: Bench, site: Path) -> None:
    names = bench("method=?").out
    assert "\nfirst " in names
    assert "\nshared " not in names
    assert "\nof good_plugin 1.0: first\n" in names
    for file, reason in (
        ("good_plugin/conf/method/shared.yaml", "is a file of good_plugin 1.0 and second_plugin"),
        ("second_plugin/conf/method/fastv.yaml", "is a file of conf and second_plugin 1.0"),
        ("broken_plugin/conf/method/bad.yaml", "cannot be imported: ModuleNotFoundError"),
    ):
        (line,) = [
            text for text in names.splitlines() if text.startswith(f"passed over: {site / file}")
        ]
        assert reason in line
    assert "plug-in bare_plugin 1.0 is passed over" in names
    assert "has no folder" in names
    models = bench("model=?").out
    assert "\ntwin " in models
    assert "good_plugin.family:Other' is no model family" in models


def test_a_family_is_found_by_its_name_and_its_checkpoints(bench: Bench) -> None:
    done = bench.success("model=twin", "method=none")
    assert done.last["settings"]["model"]["adapter"] == "good_plugin.family:Twin"
    assert done.last["extra"]["plugins"][0]["name"] == "good_plugin 1.0"
    assert family_of("llava") == "llava"
    assert ADAPTERS.load(family_of("twin")).__name__ == "Twin"
    with pytest.raises(UserError, match=r"unknown.*good_plugin.family:Other' is no model family"):
        family_of("nothing")
    assert espalier.load("twin").spec.adapter == "good_plugin.family:Twin"


def test_nothing_is_imported_before_its_name_is_asked_for(site: Path) -> None:
    """Neither the plug-ins nor, without one, the library that reads their metadata."""
    code = (
        "import sys, run\n"
        "run.main(['rato=3'])\n"
        "print(*(name for name in sys.modules if 'plugin' in name.partition('.')[0]))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "\nFalse\n", done.stderr
