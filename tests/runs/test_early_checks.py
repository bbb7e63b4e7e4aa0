"""What needs no torch is refused before torch, and a stored result is reported without the libraries of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import run
from espalier.harness.config.compose import read_command
from espalier.harness.config.group_lists import choices
from espalier.harness.config.method_names import method_kind
from espalier.harness.errors import Refused
from espalier.harness.paths import ROOT
from espalier.harness.runs.early_checks import check_cells
from espalier.harness.specs.catalogue import names_of
from espalier.methods.base import Decoder, TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer
from tests import commands
from tests.refused import refused
from tests.runs.test_refusals import REFUSALS

RUN = """
import sys
import run
codes = [run.main(line.split()) for line in {lines!r}]
print(codes, [name for name in ("torch", "transformers", "lmms_eval", "datasets") if name in sys.modules])
"""


def outcome(tmp_path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run command lines in a fresh process with an empty Hugging Face cache."""
    return subprocess.run(
        [sys.executable, "-c", RUN.format(lines=lines)],
        cwd=ROOT,
        env={
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": "",
        },
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
def test_wrong_pairs_and_missing_files_are_refused_before_torch(tmp_path: Path) -> None:
    commands = [" ".join(command) for command, _ in REFUSALS["before torch"]]
    store = f"store={tmp_path}"
    done = outcome(
        tmp_path, *(line if "store=" in line else f"{line} {store}" for line in commands)
    )
    assert done.stdout.splitlines()[-1] == f"{[2] * len(commands)} []"
    lines = done.stderr.splitlines()
    for (_, words), line in zip(REFUSALS["before torch"], lines, strict=True):
        assert line.startswith("error: ")
        assert all(word in line for word in words)


@pytest.mark.slow
def test_a_stored_result_is_reported_without_torch_and_transformers(tmp_path: Path) -> None:
    line = f"method=fastv ratio=0.5 limit=2 engine.paired=0 model.device=cpu json=true store={tmp_path}"
    # In a process of its own: folders that other tests have added to the path would be another state.
    first = json.loads(outcome(tmp_path, line).stdout.splitlines()[-2])
    # The second is another cell of the same run: its key is computed, by the method.
    for repeated, libraries in ((line, []), (line.replace("true", "auto"), ["torch"])):
        *_, row, codes = outcome(tmp_path, repeated).stdout.splitlines()
        assert codes == f"[0] {libraries}"
        assert json.loads(row) == first | {"status": "cached"}


@pytest.mark.slow
def test_a_stored_result_needs_no_data_set(tmp_path: Path) -> None:
    line = [
        "benchmark.dataset.path=nobody/nothing",
        "model.closed_vocabulary=false",
        f"store={tmp_path}",
    ]
    cells = commands.cells_of(*line)
    check_cells(cells, dry=True)
    assert "'nobody/nothing' is not in the local Hugging Face cache" in refused(
        check_cells, cells, dry=False
    )
    other = commands.cells_of("benchmark=seedling_vqa", *line)
    assert run.main([*line[1:], "limit=1", "engine.paired=0", "model.device=cpu"]) == 0
    check_cells(cells, dry=False)
    assert "benchmark='seedling_vqa'" in refused(check_cells, other, dry=False)


def test_a_sweep_leaves_wrong_pairs_to_refused_skip(tmp_path: Path) -> None:
    line = ["-m", "method=fastv,pearl", "compressor=h2o", f"store={tmp_path}"]
    command = read_command(line)
    with pytest.raises(Refused, match=r"method='pearl' .*keeps its caches whole"):
        check_cells(command.cells, dry=False)
    check_cells(commands.cells_of(*line, "refused=skip"), dry=False)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "benchmark", [*(name for name in choices("benchmark") if "seedling" in name), "latency"]
)
def test_benchmarks_made_here_need_none(benchmark: str) -> None:
    check_cells(commands.cells_of(f"benchmark={benchmark}"), dry=False)


def test_kinds_are_those_of_the_classes() -> None:
    bases: dict[str, type[object]] = {
        **{"reducer": TokenReducer, "compressor": CacheCompressor},
        **{"decoder": Decoder, "denoiser": DenoisingReducer},
    }
    kinds = {name: method_kind(name) for name in choices("method")}
    for kind, base in bases.items():
        assert names_of(base) == tuple(name for name in kinds if kinds[name] == kind)
    assert method_kind("base") is None
    assert method_kind("nosuch") is None
