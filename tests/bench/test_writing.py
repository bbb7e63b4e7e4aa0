"""How benchmarks end, and what they leave: pages in docs/ are those of the figures beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from lab.bench import decode_bench as decode
from lab.bench import diffusion_page
from lab.bench import engine_bench as engine
from lab.bench import onepass_bench as onepass
from lab.bench import selection_bench as select
from lab.bench import speculative_bench as sd
from lab.bench.bench_page import (
    CORES,
    LOAD,
    OFFLINE,
    bench_command,
    finish,
    goal,
    leave,
    measured_on,
    parser,
)
from lab.bench.bench_setup import Figure

Result = dict[str, Any]


def of_engine(result: Result, folder: Path) -> None:
    engine.write(result, [Figure.from_entry(one) for one in result["figures"]], folder)


#: What writes page and figures, by the name of both.
WRITERS: dict[str, Callable[[Result, Path], None]] = {
    "bench_decode": decode.write,
    "bench_diffusion": lambda result, folder: leave(
        folder, "bench_diffusion", diffusion_page.page(result), result
    ),
    "bench_engine": of_engine,
    "bench_onepass": lambda result, folder: leave(
        folder, "bench_onepass", onepass.page(result), result
    ),
    "bench_sd": lambda result, folder: sd.write(result, sd.page_lines(result), folder),
    "bench_select": select.write,
}


@pytest.mark.parametrize("name", WRITERS)
def test_pages_are_those_of_the_figures_beside_them(name: str, tmp_path: Path) -> None:
    docs = ROOT / "lab" / "measured"
    WRITERS[name](json.loads((docs / f"{name}.json").read_text()), tmp_path)
    for suffix in (".json", ".md"):
        assert (tmp_path / f"{name}{suffix}").read_bytes() == (
            docs / f"{name}{suffix}"
        ).read_bytes()


def test_a_command_is_offline_and_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)

    @bench_command
    def main(wrong: bool) -> int:
        assert all(os.environ[name] == "1" for name in OFFLINE)
        if wrong:
            raise UserError("--clips=1 must be at least 2")
        return 1

    assert main(True) == 2
    assert capsys.readouterr() == ("", "error: --clips=1 must be at least 2\n")
    assert main(False) == 1


def test_without_a_folder_figures_are_said_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parser("any", "bench_any").parse_args([])
    finish(options.write, "bench_any", "# Page", {"schema": 1})
    assert capsys.readouterr().out == '{"schema": 1}\n'
    options = parser("any", "bench_any").parse_args(["--write", str(tmp_path / "new" / "docs")])
    finish(options.write, "bench_any", "# Page", {"schema": 1})
    assert (options.write / "bench_any.md").read_text() == "# Page\n"
    assert (options.write / "bench_any.json").read_text() == '{\n "schema": 1\n}\n'
    assert not hasattr(parser("any").parse_args([]), "write")


def test_a_figure_that_is_no_number_leaves_what_was_there(tmp_path: Path) -> None:
    leave(tmp_path, "bench_any", "before", {"value": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        leave(tmp_path, "bench_any", "after", {"value": float("nan")})
    assert (tmp_path / "bench_any.md").read_text() == "before\n"


def test_machines_and_goals_are_told_in_the_same_words() -> None:
    here = {
        "device_name": "EPYC",
        "cores": 2,
        "load_average": 0.123,
        "torch": "2",
        "transformers": "5",
    }
    assert measured_on(here, CORES, LOAD) == "EPYC (2 cores, load 0.1), torch 2, transformers 5"
    assert goal("a step", True, "1.2") == "- met: a step (1.2)"
    assert goal("a step", False, "0.9") == "- missed: a step (0.9)"
