"""Every door of a command line: what only looks, ranges without end, paths with signs; one line or what is valid."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import run
from espalier.harness.config.compose import read_command
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT, located
from espalier.harness.specs.secrets import masked, typed
from tests import commands
from tests.refused import refused

#: Folders as people name them.
FOLDERS = (
    *("/d/a=b", "/d/a(1)", "/d/[a]", "/d/{a}", "/d/a#b", "/d/a&b", "/d/a;b", "/d/a!b", "/d/a~b"),
    *("/d/数据", "/d/ünï", "/d/a'b", '/d/a"b', "/d/a\\b", "/d/$a", "rel=a", "/d/a b", "/d/a:b"),
    *("/d/a|b", "/d/a<b>", "/d/a*?", "/d/a^`b", "/d/%a", "(a)", "数据"),
)


def test_one_subcommand_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["-sc", "x=y"]) == 2
    assert "Expecting one subcommand" in capsys.readouterr().err


def test_looking_prints_one_config_whatever_the_order_and_heeds_short_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = (
        ("--cfg", "job", "ratio=0.5", "method=fastv"),
        ("ratio=0.5", "--cfg", "job", "method=fastv"),
        ("ratio=0.5", "method=fastv", "--cfg=job"),
    )
    assert [run.main(line) for line in lines] == [0, 0, 0]
    printed = capsys.readouterr().out
    assert printed == 3 * printed[: len(printed) // 3]
    assert "ratio: 0.5" in printed
    assert run.main(["--cfg", "job", "compressor=h2o", "--package", "compressor.name"]) == 0
    assert capsys.readouterr().out.strip() == "h2o"


@pytest.mark.sampled(24)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_path_holds_any_sign(folder: str) -> None:
    keys = ("store", "model.path", "benchmark.path", "curves", "judge.prompt")
    spec = commands.spec_of("limit=1", *(f"{key}={folder}" for key in keys))
    paths = (spec.store, spec.model.path, spec.curves, spec.benchmark.path, spec.judge.prompt)
    assert set(paths) == {located(folder)}


def test_a_home_is_somebodys() -> None:
    assert located("~/d") == Path.home() / "d"
    assert "begins at no user's home" in refused(located, "~nobody_of_that_name/d")


@pytest.mark.parametrize("package", ["nothing_of_that_name", "", "..", "json.tool"])
def test_a_path_of_a_package_that_is_not_installed_is_refused(package: str) -> None:
    with pytest.raises(UserError, match=f"no package {re.escape(repr(package))} is installed"):
        located(f"pkg://{package}/conf")


def test_a_working_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "working directory, which is gone" in refused(located, "results")


def test_secrets_stay_out_of_lines() -> None:
    arguments = ["judge.options={api_key: abcdef}", "x.token=ghijkl", "max_new_tokens=12345"]
    assert masked("bad abcdef and ghijkl of 12345", typed(arguments)) == "bad *** and *** of 12345"


@pytest.mark.slow
def test_help_fits_two_screens_and_names_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert len(page.splitlines()) <= 48
    assert max(map(len, page.splitlines())) <= 100
    words = ("ratio=", "REMOVED", "keep=", "KEPT", "method=?", "model=?", "benchmark=?", "limit=")
    for word in (*words, "store=", "-m", "--dry", "--cfg job", "install=bash"):
        assert word in page
    examples = [line.strip() for line in page.splitlines() if line.startswith("  python run.py")]
    assert len(examples) == 4
    for example in examples:
        assert commands.cells_of(*shlex.split(example, comments=True)[2:])


COMPLETE = """
eval "$({python} run.py -sc install=bash)"
COMP_LINE="python run.py {typed}"; COMP_POINT=${{#COMP_LINE}}; COMP_CWORD=2
hydra_bash_completion
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("method=faste", {"method=fastervlm"}),
        ("engine.ba", {"engine.backend=", "engine.batch_size="}),
    ],
)
def test_the_tab_key_completes_keys_and_values(text: str, completed: set[str]) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    script = COMPLETE.format(python=shlex.quote(sys.executable), typed=text)
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == completed


def test_methods_of_a_sweep_take_the_hyper_parameters_that_they_have() -> None:
    line = ["-m", "method=none,random,fastv", "method.params.K=1,3", "method.params.layer=2"]
    cells = [
        (cell["method"]["name"], cell["method"]["params"]) for cell in read_command(line).cells
    ]
    assert [name for name, _ in cells] == ["none", "random", "fastv", "fastv"]
    assert cells[1][1]["layer"] == 2
    assert [params["K"] for _, params in cells[2:]] == [1, 3]


@pytest.mark.parametrize("line", [["method.params.K=3"], ["method.params.K=1,3"]])
def test_a_hyper_parameter_that_no_method_of_a_sweep_has_is_refused(line: list[str]) -> None:
    with pytest.raises(UserError, match=r"^method\.params\.K is not a config key"):
        read_command(["-m", "method=random,divprune", *line])
