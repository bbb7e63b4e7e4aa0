"""Every door of a command line: what only looks, ranges without end, paths with signs; one line or what is valid."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run
from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT, located
from espalier.harness.specs.secrets import masked, typed

#: Command lines that look, or sweep, with a mistake in them; words that the line holds.
MISTAKES = (
    (("--cfg=job", "method=nosuch"), "method='nosuch' is unknown"),
    (("--cfg", "job", "nosuch=1"), "nosuch is not a config key"),
    (("--help", "nosuch=1"), "nosuch is not a config key"),
    (("--info", "all", "model=nosuch"), "unrecognized arguments: --info"),
    (("method=nosuch", "--cfg", "job", "ratio=0.5"), "method='nosuch' is unknown"),
    (("--cfg", "job", "ratio=0.1,0.2"), "ratio=0.1,0.2 is a sweep, and --cfg"),
    (("--multirun", "--cfg", "job", "ratio=0.1,0.2"), "not allowed with argument --multirun"),
    (("--cfg", "job", "--package", "nosuch"), "--package='nosuch' is no part"),
    (("--cfg", "job", "--resolve", "seed=${nothing}"), "seed: Interpolation key"),
    (("--resolve",), "--resolve goes with --cfg"),
    (("-sc", "x=y"), "Expecting one subcommand"),
    (("=1",), "'=1' is not an override"),
    (("-m", "+hydra.sweeper.params.nosuch=1,2"), "-m with the key itself"),
    (("-m", "+hydra.sweeper.params={ratio:5}"), "-m with the key itself"),
    (("-m", "seed=range(0,3,0)"), "by a step other than 0"),
    (("-m", "seed=range(0,1e9)"), "at most 100000"),
    (("-m", "seed=shuffle(range(0,1000000000))"), "at most 100000"),
    (("-m", "seed=range(0,999)", "ratio=range(0,999)"), "the sweep has 998001 cells"),
    (("-m", "seed=choice(range(1,3))"), "seed=choice(range(1,3))"),
    (("-m", "grids=5"), "grids=5 is no list of tables"),
    (("grids=[{ratio:0.5}]",), "grids lists the grids of a sweep; add -m"),
    (("hydra.searchpath=[file:///etc]",), "file:///etc holds no configs"),
    (("hydra.searchpath=[nosuch://x]",), "nosuch://x holds no configs"),
    (("benchmark.text=What(is)this",), "'benchmark.text=\"What(is)this\"'"),
    (("store=/d/a,b",), "'store=\"/d/a,b\"'"),
    (("judge.options={api_key: sk-0123456789}",), "judge.options.api_key is not for options"),
)

#: Folders as people name them.
FOLDERS = (
    *("/d/a=b", "/d/a(1)", "/d/[a]", "/d/{a}", "/d/a#b", "/d/a&b", "/d/a;b", "/d/a!b", "/d/a~b"),
    *("/d/数据", "/d/ünï", "/d/a'b", '/d/a"b', "/d/a\\b", "/d/$a", "rel=a", "/d/a b", "/d/a:b"),
    *("/d/a|b", "/d/a<b>", "/d/a*?", "/d/a^`b", "/d/%a", "(a)", "数据"),
)


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    code = run.main(list(arguments))
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err
    assert "sk-0123456789" not in printed.err
    assert time.monotonic() - start < 60


def test_looking_prints_one_config_whatever_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (
        ("--cfg", "job", "ratio=0.5", "method=fastv"),
        ("ratio=0.5", "--cfg", "job", "method=fastv"),
        ("ratio=0.5", "method=fastv", "--cfg=job"),
    )
    printed = []
    for line in lines:
        assert run.main(list(line)) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1
    assert "ratio: 0.5" in printed[0]


def test_looking_heeds_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--cfg", "job", "compressor=h2o", "--package", "compressor.name"]) == 0
    assert capsys.readouterr().out.strip() == "h2o"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_path_holds_any_sign(folder: str) -> None:
    keys = ("store", "model.path", "benchmark.path", "curves", "judge.prompt")
    command = read_command(["limit=1", *(f"{key}={folder}" for key in keys)])
    assert command is not None
    spec = build_spec(command.cells[0])
    expected = located(folder)
    assert (spec.store, spec.model.path, spec.curves) == (expected, expected, expected)
    assert (spec.benchmark.path, spec.judge.prompt) == (expected, expected)


def test_a_home_is_somebodys() -> None:
    assert located("~/d") == Path.home() / "d"
    with pytest.raises(UserError, match="begins at no user's home"):
        located("~nobody_of_that_name/d")


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
    with pytest.raises(UserError, match="working directory, which is gone"):
        located("results")


def test_secrets_stay_out_of_lines() -> None:
    arguments = ["judge.options={api_key: abcdef}", "x.token=ghijkl", "max_new_tokens=12345"]
    line = masked("bad abcdef and ghijkl of 12345", typed(arguments))
    assert line == "bad *** and *** of 12345"


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
        command = read_command(shlex.split(example, comments=True)[2:])
        assert command is not None
        assert command.cells


COMPLETE = """
eval "$({python} run.py -sc install=bash)"
COMP_LINE="python run.py {typed}"; COMP_POINT=${{#COMP_LINE}}; COMP_CWORD=2
hydra_bash_completion
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("method=faste", {"method=fastervlm"}),
        ("engine.ba", {"engine.backend=", "engine.batch_size="}),
    ],
)
def test_the_tab_key_completes_keys_and_values(typed: str, offered: set[str]) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    script = COMPLETE.format(python=shlex.quote(sys.executable), typed=typed)
    found = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(found.stdout.split()) == offered
