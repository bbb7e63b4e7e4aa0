"""A method that drops tokens with a cache compressor behind it: from the command line to the row and the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import run
from espalier.harness.config.build_spec import build_spec
from espalier.harness.cost.budget import BudgetMismatch
from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.engine.record import SampleRecord
from espalier.harness.kinds.compressor import cache_blocks, check_held
from espalier.harness.kinds.lookup import method_of
from espalier.harness.kinds.sample_counts import first_token
from espalier.harness.runs import console, hints
from espalier.harness.runs.admission import admit
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.comparable import name as curve_name
from espalier.harness.store.files.digests import Digests
from tests import commands

SEEDLING = ("model=seedling", "benchmark=seedling_caption", "limit=3", "engine.paired=0")
STACK = ("method=d2pruner", "compressor=aircache", "ratio=0.5", "compressor.ratio=0.9")
DEPTH, VISUAL = 6, 40


spec_of = partial(commands.spec_of, *SEEDLING)


# ------------------------------------------------------------------ the command line


def test_each_of_the_two_has_its_own_ratio_and_hyper_parameters() -> None:
    spec = spec_of(*STACK, "method.params.K=3", "compressor.params.window=all")
    method = method_of(spec.method)
    assert [type(part).__name__ for part in method.parts] == ["D2Pruner", "AirCache"]
    assert method.reducer.K == 3  # type: ignore[attr-defined]
    assert method.compressor.window == "all"  # type: ignore[attr-defined]
    assert (spec.budget.ratio, method.cache_ratio) == (0.5, 0.9)  # type: ignore[attr-defined]
    assert spec.method.title == "d2pruner+aircache"
    assert spec_of("method=d2pruner").method.compressor is None


def test_a_sweep_goes_over_compressors_and_their_ratios() -> None:
    jobs = [
        build_spec(cell).method
        for cell in commands.cells_of(
            *SEEDLING,
            "-m",
            "method=fastv",
            "compressor=none,aircache,h2o",
            "compressor.ratio=.5,.9",
        )
    ]
    assert [job.title for job in jobs[::2]] == ["fastv", "fastv+aircache", "fastv+h2o"]
    assert [job.compressor.ratio for job in jobs if job.compressor] == [0.5, 0.9, 0.5, 0.9]


def test_rows_of_different_settings_share_neither_key_nor_name(tmp_path: Path) -> None:
    base = ("method=fastv", *STACK[1:])
    more = (
        (),
        ("compressor.ratio=0.5",),
        ("compressor.params.alpha=0.5",),
        ("compressor.params.allocation=uniform",),
        ("method.params.K=3",),
        ("compressor=h2o",),
        ("compressor=none",),
    )
    named, keys = set(), set()
    for changes in more:
        stack = [
            override
            for override in base
            if not any(c.startswith(override.split("=")[0] + "=") for c in changes)
        ]
        job = admit(spec_of(*stack, *changes, f"store={tmp_path}"), Digests())
        cell = job.parts["cell"]
        row = {**cell, "extra": {"label": job.label}, "settings": job.parts["settings"]}
        named.add((curve_name(row), cell["ratio"]))
        keys.add(job.key)
    assert len(named) == len(keys) == len(more)


# ------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = tmp_path_factory.mktemp("store")
    assert run.main([*SEEDLING, *STACK, f"store={store}", "engine.warmup=0"]) == 0
    (path,) = store.glob("runs/*/row.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_row_has_what_both_achieved(row: dict[str, Any]) -> None:
    extra, tokens = row["extra"], row["tokens"]
    assert (row["method"], row["ratio"]) == ("d2pruner+aircache", 0.5)
    assert extra["label"] == "cache_ratio=0.9"
    assert set(extra["params"]) == {"D2Pruner", "AirCache", "cache_ratio"}
    assert tokens["kept_final"] == tokens["visual"] / 2
    # Two layers of whole prompts, then four of halves; a tenth of all that is left.
    assert extra["cache"]["entered"] == [144, 144, 72, 72, 72, 72]
    assert sum(extra["cache"]["entries"]) == tokens["kv_entries"] == round(0.1 * 576)
    assert extra["cache"]["share"] == pytest.approx(58 / 576)
    assert extra["discriminates"] is True
    assert extra["achieved"]["kept"] == 72


@pytest.mark.slow
def test_the_terminal_says_what_both_left(row: dict[str, Any]) -> None:
    shown = io.StringIO()
    console.print_rows([row], shown, full=True)
    text = shown.getvalue()
    assert "d2pruner+aircache cache_ratio=0.9, ratio 0.5" in text
    assert "144, asked to keep 72, kept 72" in text
    assert "58 of 576 left in the KV cache (10.1%, asked 10.0%)" in text
    single = {**row, "extra": {**row["extra"], "discriminates": False}}
    table = io.StringIO()
    console.print_rows([single, {**row, "run_key": "other", "ratio": 0.75}], table, full=False)
    assert "10.1%" in table.getvalue()
    assert f"on seedling_caption: {console.ONE_TOKEN_NOTE}" in table.getvalue()


@pytest.mark.slow
def test_the_next_command_compares_with_random_eviction(row: dict[str, Any]) -> None:
    hint = hints.next_step(["method=h2o"], [{**row, "method": "h2o"}])
    assert hint[0].endswith("run.py -m method=none,random_kv,h2o")


# ------------------------------------------------------------------ counts


def record(held: list[int], **changes: Any) -> SampleRecord:
    whole = (VISUAL,) * DEPTH
    full_record = SampleRecord("s", VISUAL, 4, (), (), whole, sum(held), 64, 3, held=tuple(held))
    return replace(full_record, **changes)


@pytest.mark.parametrize(
    ("tokens", "ended", "decided"),
    [(1, False, True), (2, True, True), (2, False, False), (3, True, False), (1, True, True)],
)
def test_an_answer_of_one_token_is_decided_before_entries_go(
    tokens: int, ended: bool, decided: bool
) -> None:
    evicting = CacheBudget(build_method("aircache", {}), 0.5)
    short = record([20] * DEPTH, new_tokens=tokens, ended=ended)
    long = record([20] * DEPTH, new_tokens=9, ended=True)
    assert cache_blocks(evicting, [short, short])["discriminates"] is not decided
    assert first_token([short, short]) == float(decided)
    assert cache_blocks(evicting, [short, long])["discriminates"] is True
    assert first_token([short, long]) == decided / 2


def test_a_released_overshoot_is_told_and_anything_beyond_it_refused() -> None:
    exact, released = (build_method("pyramidkv", {"whole_steps": on}) for on in (False, True))
    over = [13, 11, 9, 7, 5, 4]  # 48 were asked for
    evicting = CacheBudget(released, 0.8)
    check_held(evicting, record(over))
    assert cache_blocks(evicting, [record(over)])["cache"]["share"] == 49 / 240
    for budget, held in (
        (CacheBudget(exact, 0.8), over),
        (evicting, [40] * DEPTH),
        (evicting, [7] * DEPTH),
    ):
        with pytest.raises(BudgetMismatch, match="the cache holds"):
            check_held(budget, record(held))
