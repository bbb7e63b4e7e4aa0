"""How commands end: with closed streams, output that cannot be written, variables that are none, too little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from espalier.__main__ import COMMANDS
from espalier.__main__ import main as espalier
from espalier.harness.errors import FOREIGN, StoreLost, UserError, first_words, foreign
from espalier.harness.paths import ROOT
from espalier.harness.specs.commands import command
from espalier.harness.store.files.folder_checks import check_file
from tests.store.test_upkeep import add


def shell(line: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, **more, "PY": sys.executable},
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    add(tmp_path / "store", "aa", [1, 0])
    return tmp_path / "store"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&-", "0<&- 1>&- 2>&-", "2>&-"])
def test_closed_streams_are_no_error_and_no_file_gets_what_is_printed(
    closed: str, store: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tables"
    for line in ("ls", "verify", f"export {folder}"):
        done = shell(f"$PY -m espalier store {line} --store {store} {closed}")
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (folder / "rows.parquet").read_bytes()[:4] == b"PAR1"


@pytest.mark.slow
def test_a_run_with_closed_output_is_stored(tmp_path: Path) -> None:
    settings = f"method=none benchmark=seedling_vqa limit=1 engine.warmup=0 store={tmp_path}"
    done = shell(f"$PY run.py {settings} 1>&-")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert len([*tmp_path.glob("runs/*/row.json")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("value", ["x", "0", "-1", "4,2", "1e3"])
def test_a_number_of_threads_that_is_none_is_one_line(value: str) -> None:
    for line in ("run.py method=none limit=1", "-m espalier store ls"):
        done = shell(f"$PY {line}", OMP_NUM_THREADS=value)
        assert done.returncode == 2
        assert done.stderr == (
            f"error: OMP_NUM_THREADS={value!r} must be a number of threads; valid: 1 and more, or unset\n"
        )


def test_help_is_no_command_but_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for line in (["help"], ["--help"]):
        assert espalier(line) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "espalier run method=fastv" in printed[0]
    assert all(f"\n  {name} " in printed[0] for name in COMMANDS)


def test_too_little_address_space_is_one_line() -> None:
    done = shell("ulimit -v 500000; $PY run.py method=none limit=1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "0.5 GiB of address space (ulimit -v); valid: ulimit -v unlimited" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "espalier.__main__ store export /proc/x --store STORE",
        "espalier.__main__ store export /dev/null --store STORE",
        "espalier.__main__ tables d2pruner 1 --store STORE --out /proc/x",
        "espalier.__main__ curves --store STORE --benchmarks b --out /proc/o",
        "espalier.__main__ report --store STORE --out /proc/x.html",
        "espalier.__main__ report --store STORE --out STORE",
        "lab.pages.methods_page --write /proc/x",
        "espalier.harness.reports.curves.cache_report --store STORE --write /proc/x",
    ],
)
def test_places_that_cannot_be_written_are_one_line(
    line: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *words = line.replace("STORE", str(store)).split()
    assert import_module(module).main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (error,) = printed.err.splitlines()
    assert error.startswith("error: ")
    assert "valid: " in error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("a\nb"), 2, "error: a b\n"),
        (StoreLost("full"), 1, "error: full\n"),
        (
            OSError(28, "No space left on device", "/a/b"),
            1,
            "error: /a/b: No space left on device\n",
        ),
        (BrokenPipeError(32, "Broken pipe"), 0, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_command_ends_with_a_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @command
    def main(argv: Sequence[str] | None) -> int:
        raise error

    assert (main([]), capsys.readouterr().err) == (code, line)


@pytest.mark.parametrize("kind", FOREIGN)
def test_whatever_a_foreign_file_raises_is_one_line(kind: type[Exception]) -> None:
    with (
        pytest.raises(UserError, match=r"^x cannot be read \(.+\); valid: y$"),
        foreign("x cannot be read", "y"),
    ):
        raise kind("several\nlines")


def test_an_error_of_ours_passes_as_it_is() -> None:
    with pytest.raises(UserError, match=r"^ours$"), foreign("x", "y"):
        raise UserError("ours")


def test_a_reason_has_a_bearable_length() -> None:
    assert len(first_words(ValueError("x" * 5000))) < 300
    assert first_words(KeyError("a")) == "KeyError: 'a'"
    assert first_words(OSError(40, "Too many levels", "/a")) == "Too many levels"


def test_a_file_may_be_made_or_replaced(tmp_path: Path) -> None:
    check_file("--out", tmp_path / "deep" / "page.html")
    (tmp_path / "page.html").touch()
    check_file("--out", tmp_path / "page.html")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "loop", Path("/dev/null"), tmp_path / ("x" * 300) / "y"):
        with pytest.raises(UserError, match=r"^--out"):
            check_file("--out", path)


@pytest.mark.parametrize(
    "name",
    [
        "store",
        *(
            pytest.param(name, marks=pytest.mark.slow)  # they import torch
            for name in sorted(COMMANDS.keys() - {"run", "store"})
        ),
    ],
)
def test_each_command_shows_what_to_type(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    # argparse ends the process, other commands return.
    with suppress(SystemExit):
        espalier([name, "--help"])
    assert f"  espalier {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("store sho", "command='sho' is unknown (did you mean show?)"),
        ("store ls --sttore a", "unrecognized arguments: --sttore a; valid: espalier store --help"),
        ("tables d2pruner 1 --format markdown", "--format='markdown' is unknown"),
        ("sweep", "are required: command; valid: espalier sweep --help"),
    ],
)
def test_a_wrong_option_is_one_line(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        espalier(line.split())
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("error: ")) == ("", 1, True)
    assert words in err


@pytest.mark.parametrize(
    "name", ["report", "curves", "tables", "store ls", "store sql", "sweep status", "doctor"]
)
def test_what_reads_a_store_takes_it_as_an_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        espalier([*name.split(), "--help"])
    assert "--store STORE" in capsys.readouterr().out


def test_bash_completes_commands_and_overrides_of_runs() -> None:
    script = r"""
eval "$($PY -m espalier --completion)"
espalier() { $PY -m espalier "$@"; }
COMP_LINE="espalier st"; COMP_WORDS=(espalier st); COMP_CWORD=1; _espalier
echo "${COMPREPLY[@]}"
COMP_LINE="espalier run ratio=0.9 method=faste"; COMP_WORDS=($COMP_LINE); COMP_CWORD=3; _espalier
echo "${COMPREPLY[@]}"
"""
    assert shell(script).stdout.splitlines() == [
        "store",
        "method=fastervlm",
    ]
