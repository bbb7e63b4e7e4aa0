"""`keep` in place of `ratio`: counts and shares, one of the two keys, presets of either, and one line for mistakes."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import run
from espalier.harness.config.build_spec import build_spec, read_budget
from espalier.harness.config.kept_tokens import ratio_of
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.runs.admission import Job, admit
from espalier.harness.runs.hints import next_step
from espalier.harness.store.files.digests import Digests
from tests import commands

#: Values that are neither a number of tokens nor a share.
VALUES = (0, -3, 6.5, True, "abc", "64%%", "110%", "0%", "-5%", "10 %", "64", [64], {})


def count(number: int) -> Budget:
    """The budget of a number of tokens on the embedded model, whose pictures have 144."""
    return Budget("kept", 1 - min(number, 144) / 144, number)


def share(ratio: float) -> Budget:
    """The budget of a ratio."""
    return Budget("kept", ratio)


def budgets(*argv: str) -> list[Budget]:
    return [build_spec(cell).budget for cell in commands.cells_of(*argv)]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_what_is_neither_number_nor_share_is_refused(value: object) -> None:
    facts = commands.spec_of("limit=1").model.facts
    with pytest.raises(
        UserError, match=r"^keep=.* must be a number of visual tokens, 1 and more, or a"
    ):
        read_budget("kept", 0.5, value, drafts=False, facts=facts)


def test_a_number_is_a_count_and_a_share_a_ratio() -> None:
    assert budgets("keep=100000") == [count(100_000)]
    assert budgets("keep=null", "ratio=0.5") == [share(0.5)]
    line = ("-m", "method=none,fastv", "keep=64,10%,100%")
    assert budgets(*line) == [count(64), share(0.9), share(0)] * 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.decimals(0, 100, places=2))
def test_a_share_is_exactly_the_ratio_that_is_typed(percent: Decimal) -> None:
    typed = float(str(1 - percent / 100))
    assert ratio_of(f"{percent}%") == (typed if percent > 0 else None)


def test_a_share_has_the_key_and_the_parts_of_its_ratio() -> None:
    digests = Digests()

    def job(*argv: str) -> Job:
        return admit(commands.spec_of("method=fastv", "limit=2", *argv), digests, places=False)

    by_ratio, by_share, by_count = map(job, ("ratio=0.9", "keep=10%", "keep=14"))
    assert (by_share.key, by_share.parts) == (by_ratio.key, by_ratio.parts)
    # A ratio adds nothing to the key, so that it is what it was before counts could be set.
    assert set(by_ratio.parts["cell"]) == {
        *("model", "method", "variant", "benchmark", "ratio", "budget_rule", "seed")
    }
    assert by_ratio.parts["cell"]["ratio"] == 0.9
    assert by_count.parts["cell"].items() >= {"ratio": None, "keep": 14}.items()
    assert by_count.key not in (by_ratio.key, job("keep=15").key)
    assert by_count.parts["settings"] == by_ratio.parts["settings"]
    assert by_count.outline()["ratio"] == 1 - 14 / 144
    # A method that acts nowhere keeps every token, however it is asked.
    none = commands.spec_of("method=none", "keep=14")
    whole = replace(none, budget=share(0))
    assert admit(none, digests, places=False).key == admit(whole, digests, places=False).key


@pytest.mark.slow
def test_what_is_typed_replaces_the_other_key_of_a_preset(conf: Path) -> None:
    swept = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      {}\n"
    for number, (text, typed, expected) in enumerate(
        (
            ("keep: 10%\n", [], [share(0.9)]),
            ("keep: 64\n", ["ratio=0.5"], [share(0.5)]),
            ("ratio: 0.5\n", ["keep=25%"], [share(0.75)]),
            (swept.format("ratio: 0.5,0.9"), ["keep=64"], [count(64)]),
            (swept.format("keep: 64,10%"), [], [count(64), share(0.9)]),
            (swept.format("keep: 64,128"), ["ratio=0.5"], [share(0.5)]),
            ("keep: 64\n" + swept.format("seed: 0,1"), ["ratio=0.5"], [share(0.5)] * 2),
        )
    ):
        (conf / "experiment" / f"mine{number}.yaml").write_text(f"# @package _global_\n{text}")
        assert budgets(f"+experiment=mine{number}", *typed) == expected, text


@pytest.mark.slow
def test_grids_are_selected_and_replaced_by_either_key() -> None:
    line = ("-m", "grids=[{method:'fastv,divprune',keep:'64,128'}]")
    assert budgets(*line) == [count(64), count(128)] * 2
    changes = {"keep=128": count(128), "keep=32": count(32), "ratio=0.5": share(0.5)}
    for change, budget in changes.items():
        assert budgets(*line, change) == [budget] * 2


def test_looking_shows_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, lines in (
        ("keep=10%", {"ratio: 0.9", "keep: null"}),
        ("keep=64", {"ratio: null", "keep: 64"}),
    ):
        assert run.main(["--cfg", "job", argument]) == 0
        assert lines <= set(capsys.readouterr().out.splitlines())


def test_a_hint_does_not_set_both() -> None:
    step = next_step(["method=none", "keep=64"], [{"method": "none", "extra": {}}])
    assert "ratio=0.5,0.9" in step[0]
    assert "keep" not in step[0]
