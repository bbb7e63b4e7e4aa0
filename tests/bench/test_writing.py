"""How benchmarks end, and what they leave: pages in docs/ are those of the figures beside them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from lab.bench import (
    decode_bench,
    diffusion_bench,
    engine_bench,
    interval_coverage,
    kv_bench,
    onepass_bench,
    selection_bench,
    speculative_bench,
)
from lab.bench.bench_page import (
    CORES,
    LOAD,
    OFFLINE,
    Bench,
    Result,
    bench_command,
    goal,
    leave,
    measured_on,
    printed_page,
)

BENCHES = {
    module.BENCH.name: module.BENCH
    for module in (
        *(decode_bench, diffusion_bench, engine_bench, interval_coverage, kv_bench),
        *(onepass_bench, selection_bench, speculative_bench),
    )
}


@pytest.mark.parametrize("name", [*BENCHES, "bench_select_only"])
def test_pages_are_those_of_the_figures_beside_them(name: str, tmp_path: Path) -> None:
    measured = ROOT / "lab" / "measured"
    result = json.loads((measured / f"{name}.json").read_text())
    leave(tmp_path, name, BENCHES[name.removesuffix("_only")].page(result), result)
    for file in (f"{name}.json", f"{name}.md"):
        assert (tmp_path / file).read_bytes() == (measured / file).read_bytes()


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
    def measure(options: argparse.Namespace) -> dict[str, object]:
        print("noise from a library")
        return {"value": 2 * options.half, "conditions": {}}

    def page(result: Result) -> str:
        return f"# Page of {result['value']}"

    half = {"--half": {"type": int, "default": 1}}
    bench = Bench("any", measure, printed_page(page), page, half, name="bench_any")
    assert bench.main([]) == 0
    figures = '{"schema": 1, "value": 2, "conditions": {}}'
    assert capsys.readouterr() == (f"# Page of 2\n{figures}\n", "noise from a library\n")
    folder = tmp_path / "new" / "docs"
    assert bench.main(["--half", "2", "--write", str(folder)]) == 0
    assert (folder / "bench_any.md").read_text() == "# Page of 4\n"
    assert json.loads((folder / "bench_any.json").read_text())["value"] == 4


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
