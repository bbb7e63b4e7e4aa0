"""The benchmark of the two loops: a small run whole, its page, and what its verdicts say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from lab.bench import decode_bench as decode

ROW = decode.DecodeRow(
    model="seedling",
    length=144,
    rows=1,
    rounds=2,
    ms={"loop": 1.0, "indexed": 1.0, "generate": 1.1},
    ratio=(1.1, 1.05, 1.15),
    ratio_indexed=(1.0, 0.98, 1.02),
    layer_bytes=1000,
    written={"loop": 10, "indexed": 10, "generate": 1000},
)


@pytest.mark.parametrize(
    ("interval", "verdict", "short", "long"),
    [
        ((1.1, 1.05, 1.15), "faster", True, True),
        ((1.0, 0.97, 1.03), "even", True, False),
        ((1.0, 0.9, 1.1), "open", False, False),
        ((0.9, 0.85, 0.95), "slower", False, False),
    ],
)
def test_an_interval_has_a_verdict(
    interval: tuple[float, float, float], verdict: str, short: bool, long: bool
) -> None:
    row = replace(ROW, ratio=interval)
    assert (row.verdict, row.met) == (verdict, short)
    assert replace(row, length=decode.FASTER_FROM).met is long


@pytest.mark.slow
def test_a_small_run_leaves_a_page_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "LENGTHS", (40,))
    monkeypatch.setattr(decode, "TOKENS", 3)
    monkeypatch.setattr(decode, "ROUNDS", (2, 2))
    assert decode.main(["--only", "seedling", "--write", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "bench_decode.json").read_text())
    assert [(row["length"], row["rows"]) for row in result["rows"]] == [(40, 1), (40, 4)]
    for row in result["rows"]:
        # Only the library's own cache is written whole again at a late step.
        assert row["written"]["generate"] >= row["layer_bytes"] > row["written"]["loop"]
        assert f"{row['verdict']}: " in (tmp_path / "bench_decode.md").read_text()


def test_models_that_were_not_measured_keep_their_rows() -> None:
    here = {"device_name": "d", "torch": "2", "transformers": "5"}
    older = {"rows": [{"model": "llava_ov_0_5b", "length": 9}, {"model": "seedling"}]}
    former = {**older, "conditions": here}
    now = {"rows": [{"model": "seedling", "length": 5}], "conditions": here}
    both = [{"model": "seedling", "length": 5}, {"model": "llava_ov_0_5b", "length": 9}]
    assert decode.together(former, now) == both
    elsewhere = {**now, "conditions": {**here, "device_name": "e"}}
    with pytest.raises(UserError, match="device_name d, these of e"):
        decode.together(former, elsewhere)
