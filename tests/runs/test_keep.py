"""A run with `keep`: its row, the samples with fewer tokens, and the number in every label."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import tell_once
from espalier.harness.runs import console
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from espalier.harness.store.run_entries import entries, table_cells
from espalier.harness.store.stored_answers import AnsweredRun
from espalier.harness.store.sweep_files import find
from tests.runs import helpers
from tests.runs.helpers import Bench, make_bench

#: Visual tokens of the three samples: smaller and larger than a picture of nominal size, and none.
TOKENS = (40, 200, 0)


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    """Runs of samples with other numbers of tokens."""
    usual = helpers.fake_record

    def record(spec: RunSpec, method: Any, sample: str) -> Any:
        tokens = TOKENS[int(sample.partition("/")[2])]
        facts = replace(spec.model.facts, visual_tokens=tokens)
        return usual(replace(spec, model=replace(spec.model, facts=facts)), method, sample)

    monkeypatch.setattr(helpers, "fake_record", record)
    return make_bench(tmp_path / "store", capsys, monkeypatch)


@pytest.mark.slow
def test_the_row_has_what_was_set_what_was_reached_and_what_was_clipped(bench: Bench) -> None:
    done = bench.success("method=fastv", "keep=64")
    row = done.last
    assert list(row)[7:10] == ["ratio", "keep", "budget_rule"]
    assert (row["keep"], row["extra"]["clipped"]) == (64, 1)
    assert row["ratio"] == pytest.approx(1 - (40 + 64) / 240)
    assert row["tokens"]["requested_keep"] == row["tokens"]["kept_final"] == (40 + 64) / 3
    assert row["extra"]["achieved"]["kept"] == (40 + 64) / 3
    # Stored, and served under the same key.
    assert bench("method=fastv", "keep=64").last == row | {"status": "cached"}
    assert '"keep": 64' in (bench.store / "runs" / row["run_key"] / "spec.json").read_text()


def test_more_than_there_are_keeps_all_and_clips_every_picture(bench: Bench) -> None:
    tell_once.cache_clear()
    done = bench("method=fastv", "keep=100000")
    assert "keep=100000: 2 of 3 samples have fewer visual tokens, and keep all" in done.err
    row = done.last
    assert (row["ratio"], row["keep"], row["extra"]["clipped"]) == (0, 100_000, 2)
    assert row["tokens"]["kept_final"] == row["tokens"]["visual"] == 80
    assert row["flops"]["share_of_full"] == 1


def test_a_ratio_adds_nothing_to_a_row(bench: Bench) -> None:
    row = bench("method=fastv", "ratio=0.9").last
    assert "keep" not in row
    assert "clipped" not in row["extra"]
    assert bench("method=fastv", "keep=10%").last == row | {"status": "cached"}


def test_every_label_has_the_number(bench: Bench) -> None:
    done = bench.success("-m", "method=fastv,none", "keep=64,1", "json=true")
    assert "64 tokens" in done.out
    assert "1 token " in done.out
    row = next(row for row in done.rows if row.get("keep") == 64)
    sheet = io.StringIO()
    console.print_rows([row], sheet, full=True)
    assert "fastv official, 64 tokens (kept), seedling_rec" in sheet.getvalue()
    assert "1 of the samples have fewer than 64 visual tokens, and keep all" in sheet.getvalue()
    stored = {entry.key: table_cells(entry) for entry in entries(bench.store)}
    assert stored[row["run_key"]][4] == "64 tokens"
    assert AnsweredRun(row, "acc_at_50", higher=True).name == "fastv official 64 tokens"
    sweep = find(bench.store, None)
    titles = [cell.title for cell in sweep.cells]
    assert "seedling fastv official 64 tokens seedling_rec" in titles
    # A method that acts nowhere has one run, whatever is kept.
    assert {cell.title for cell in sweep.cells if cell.method == "none"} == {
        "seedling none 0 seedling_rec"
    }


def test_dry_lists_numbers_and_shares(bench: Bench) -> None:
    done = bench.success("-m", "--dry", "method=fastv", "keep=64,10%")
    assert "ratios     64 tokens, 0.9" in done.out


def test_a_refused_count_is_named(bench: Bench) -> None:
    line = (
        "keep=2 cannot be met under budget=average: FastV acting before layer 2 of 6 reaches 49 <="
    )
    assert line in bench("method=fastv", "budget=average", "keep=2").err
    done = bench("-m", "method=fastv,random", "budget=average", "keep=2", "refused=skip")
    assert "left out: fastv official 2 tokens seedling_rec: keep=2 cannot be met" in done.out


def test_a_count_of_another_key_is_no_row(bench: Bench) -> None:
    key = bench("method=fastv", "keep=64").last["run_key"]
    path = Store(bench.store).run(key).path / "row.json"
    path.write_text(path.read_text().replace('"keep": 64', '"keep": "many"'))
    assert "keep is 'many'" in bench("method=fastv", "keep=64").err
