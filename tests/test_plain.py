"""Foreign text steers no terminal, no page and no batch script."""

from __future__ import annotations

import io
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from espalier.harness.cli import curves, report
from espalier.harness.errors import JudgeLost, StoreLost, UserError, plain, plain_page, plain_values
from espalier.harness.paths import DEMO
from espalier.harness.reports.curves.curve_points import POINT, CurvePanel
from espalier.harness.reports.curves.curve_table import markdown
from espalier.harness.reports.tables import rebuild
from espalier.harness.runs import streams
from espalier.harness.runs.cluster import launchers
from espalier.harness.runs.cluster.resources import (
    ClusterSpec,
    ResourceRequest,
    _read_options,
)
from espalier.harness.settings import defaults, read_section
from espalier.harness.store.answer_view import write, write_table
from tests.refused import refused

STEERING = {
    "\x1b[2J": "\\x1b[2J",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "\x9b31m": "\\x9b31m",
    "\u202egnp.exe": "\\u202egnp.exe",
    "\u2066a\u2069": "\\u2066a\\u2069",
    "a\u200bb": "a\\u200bb",
    "\x08\x7f": "\\x08\\x7f",
    "\u2028next": "\\u2028next",
    "\ud800": "\\ud800",
    "\U000e0041": "\\U000e0041",
}


@pytest.mark.parametrize("text", STEERING)
def test_letters_that_steer_are_escaped(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = STEERING[text]
    assert plain(text) == shown
    assert plain_values({"a": [text, 1, None]}) == {"a": [shown, 1, None]}
    for kind in (UserError, StoreLost, JudgeLost):
        assert str(kind(f"file {text}")) == f"file {shown}"
    streams.print_error(ValueError(text))
    streams.tell(text)
    assert capsys.readouterr().err == f"error: {shown}\n{shown}\n"


@pytest.mark.slow
def test_commands_escape_typed_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, shown = tmp_path / "a\x1b[31mb", f"{tmp_path}/a\\x1b[31mb"
    store = ["--store", str(DEMO)]
    assert curves.main([*store, "--benchmarks", "seedling_rec", "--out", str(folder / "c")]) == 0
    assert f"{shown}/c.md\n" in capsys.readouterr().out
    chosen = ["benchmark=seedling_rec", "method=fastv", "--no-overlays"]
    assert report.main([str(DEMO), *chosen, "--out", str(folder / "r.html")]) == 0
    assert capsys.readouterr().out.startswith(f"{shown}/r.html\n{shown}/r.")
    assert rebuild.main(["d2pruner", "--out", str(folder / "t")]) == 0
    assert capsys.readouterr().out.startswith(f"{shown}/t/d2pruner_")
    with pytest.raises(SystemExit, match="2"):
        report.main([f"--{folder.name}=1"])
    assert r"unrecognized arguments: --a\x1b[31mb=1" in capsys.readouterr().err


def test_text_of_any_language_stays() -> None:
    for text in ("数据 ä é — ± “x”", "עברית العربية", "e\u0301", "👍"):
        assert plain(text) == text
    assert plain("a\tb\r\nc") == "a b c"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("text", STEERING)
def test_answers_and_runs_are_shown_without_what_steers(text: str, terminal: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    shown = io.StringIO()
    for print_lines in (lambda lines, out: write(lines, out, None), write_table):
        out = Stream()
        print_lines((("sample", "answer", "media"), [("a", text, "m")]), out)
        shown.write(out.getvalue())
    assert text not in shown.getvalue()
    assert STEERING[text] in shown.getvalue()


def test_html_of_names_is_text_in_markdown() -> None:
    hostile = "<script>alert(1)</script>"
    panel = CurvePanel(hostile, hostile, 1, full=None, points=pd.DataFrame(columns=POINT))
    page = plain_page(markdown([panel]))
    assert "<script" not in page
    assert "</script" not in page
    assert "&lt;script>" in page
    assert plain_page("p < 0.05, a <b>, <!-- c -->") == "p < 0.05, a &lt;b>, &lt;!-- c -->"


@pytest.mark.parametrize("value", ["a\nb", "a\rtouch x", "a\x1b[2J", "a\u2028b", "\x00"])
def test_settings_of_a_job_stay_in_their_line(value: str) -> None:
    with pytest.raises(UserError, match="one line without control characters"):
        read_section(ResourceRequest, "cluster", {**defaults(ResourceRequest), "partition": value})
    assert "one line without control characters" in refused(
        _read_options, "cluster.options", {"comment": value}
    )
    assert "is not an option of sbatch" in refused(
        _read_options, "cluster.options", {f"comment{value}": "a"}
    )
    for odd in ([value], {"a": value}):
        assert "must be a text, a number" in refused(
            _read_options, "cluster.options", {"comment": odd}
        )
    assert _read_options("cluster.options", {"qos": "long", "requeue": True, "nice": 5}) == {
        **{"qos": "long", "requeue": True, "nice": 5}
    }


@pytest.mark.parametrize(
    "name", ["a b", "$(touch ran)", "`touch ran`", '"; touch ran; "', "it's", "a;touch ran"]
)
def test_the_repository_s_path_is_no_code_in_a_batch_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / name
    monkeypatch.setattr(launchers, "IMPORTED_FROM", root)

    class Pack:
        model = "seedling"

        class resources:
            minutes, memory, cpus, gpus, partition = 10, 2**30, 1, 0, None

    pack: Any = Pack
    (line,) = launchers.Slurm(ClusterSpec(), tmp_path).parameters(pack)["setup"]
    shown = subprocess.run(
        ["bash", "-c", f'{line}; printf %s "$PYTHONPATH"'],
        cwd=tmp_path,
        env={"PYTHONPATH": "before"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"{root}:before"
    assert not (tmp_path / "ran").exists()
    assert shlex.split(line)
