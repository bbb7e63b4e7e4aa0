"""Options that are checked by value before anything is computed, in run.py and in every command that reads a store."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from espalier.harness.cli import curves
from espalier.harness.reports import results
from espalier.harness.runs import wandb_log
from tests.refused import refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tags": 5}, "log.options.tags=5"),
        ({"project": ["a"]}, "log.options.project"),
        ({"mode": "sometimes"}, "log.options.mode='sometimes'"),
    ],
)
def test_options_of_wandb_have_their_types(options: dict[str, object], words: str) -> None:
    wandb_log.check_values({"project": "espalier", "group": None, "tags": ["a"], "mode": "offline"})
    assert words in refused(wandb_log.check_values, options)


@pytest.mark.parametrize("store", ["/no/such/store", __file__])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("reports.tables.rebuild", ("d2pruner", "1")),
        ("cli.curves", ("--benchmarks", "seedling_rec", "--out", "{out}")),
        ("reports.curves.cache_report", ("--write", "{out}")),
        ("reports.curves.decoder_report", ("--write", "{out}")),
        ("reports.curves.diffusion_report", ("--write", "{out}")),
        ("reports.tables.anchors", ()),
        ("cli.report", ("--out", "{out}")),
        ("cli.wandb", ("--dry",)),
        ("cli.store", ("ls",)),
        ("cli.store", ("verify",)),
        ("cli.store", ("gc",)),
        ("cli.sweep", ("status",)),
    ],
)
def test_a_store_that_is_not_there_is_an_error(
    module: str,
    arguments: tuple[str, ...],
    store: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = importlib.import_module(f"espalier.harness.{module}")
    filled = [text.format(out=tmp_path / "out") for text in arguments]
    assert command.main([*filled, "--store", store]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: --store=")
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_report_is_of_some_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert curves.main(["--benchmarks", "", "--out", str(tmp_path / "x")]) == 2
    assert "--benchmarks='' is empty" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_rows_are_loaded_from_a_folder_that_is_there() -> None:
    assert "does not exist" in refused(results.load, "/no/such/store")
    assert "is not a folder" in refused(results.samples, __file__)
