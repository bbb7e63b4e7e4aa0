"""The benchmark of cache compression on a tiny decoder, end to end, and what its page says of targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.harness.cost.bounds import Gain
from lab.bench import kv_bench as kv
from lab.bench.kv_page import page, targets
from lab.bench.kv_sides import CacheRow

TINY = (
    *(setting for setting in kv.INSTANCE if ".text" not in setting and "projector" not in setting),
    "model.facts.text={layers: 2, hidden: 64, intermediate: 64, heads: 4, kv_heads: 2, head_dim: 16}",
    "model.facts.projector=[128, 64, 64]",
)

ROW = CacheRow(
    tokens=1000,
    visual=900,
    name="snapkv",
    ratio=0.9,
    prefill_ms=1005.0,
    scoring_ms=5.0,
    evicting_ms=3.0,
    step_ms=2.0,
    kv_bytes=2**20,
    visual_share=0.1,
    above_bytes=2**20,
    allowed=4.0,
    gain=Gain(3.6, 3.5, 3.7),
    weights=2**20,
    rate=1e9,
    bound_ms=1.5,
)
WHOLE = replace(ROW, name="whole cache", ratio=0.0, kv_bytes=10 * 2**20, gain=Gain(1, 1, 1))


def verdicts(*rows: CacheRow) -> list[str]:
    return [line.split(":")[0] for line in targets([row.entry() for row in (WHOLE, *rows)])]


def test_a_target_is_met_or_missed() -> None:
    assert (ROW.scoring_share, ROW.reached) == (0.005, pytest.approx(0.9))
    assert verdicts(ROW) == ["- met"] * 3
    assert verdicts(replace(ROW, gain=Gain(3.3, 3.2, 3.4)))[0] == "- missed"
    assert verdicts(replace(ROW, visual_share=0.102))[1] == "- missed"
    assert verdicts(replace(ROW, above_bytes=10 * 2**20))[2] == "- missed"
    # Speed is asked of a tenth of the entries at the longest prompts, counts of every side.
    short = replace(ROW, tokens=500, gain=Gain(1, 1, 1), scoring_ms=50.0)
    assert verdicts(ROW, short) == ["- met"] * 3
    assert len(verdicts(ROW, replace(ROW, ratio=0.5))) == 3
    # Scores are asked about where they were measured for, at any length.
    layer = replace(ROW, tokens=5000, purpose="scores", gain=Gain(1, 1, 1))
    assert verdicts(ROW, layer) == ["- met"] * 4
    assert verdicts(ROW, replace(layer, scoring_ms=20.0))[0] == "- missed"


@pytest.mark.slow
def test_it_runs_to_its_end_and_leaves_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = ((kv.FULL,), *kv.evicting(("snapkv_paper", "random_kv"), "0.9"), kv.BY_HEAD)
    monkeypatch.setattr(kv, "QUICK_PLAN", (kv.Length(900, sides, 2, 0, 4),))
    monkeypatch.setattr("espalier.harness.evaluation.latency.COPIED", 2**16)
    assert kv.main(["--quick", "--rounds", "1", "--write", str(tmp_path), *TINY]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "bench_kv.json").read_text()) == result
    whole, *evicted = result["rows"]
    assert [row["name"] for row in result["rows"]] == [
        *("whole cache", "snapkv paper", "random_kv", "aircache per_head=True"),
    ]
    entry = 2 * 2 * 2 * 16 * 4
    assert whole["kv_bytes"] == entry * whole["tokens"]
    for row in evicted:
        # 576 visual entries of each of two layers: together a tenth of them, 115.
        text = row["tokens"] - row["visual"]
        assert row["visual_share"] == 115 / 1152
        if row["name"] != "aircache per_head=True":
            assert abs(row["kv_bytes"] - entry * (text + 57.5)) <= entry
        assert row["scoring_ms"] > 0
        assert row["allowed"] > 1
    lines = (tmp_path / "bench_kv.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 4
    assert lines[2].startswith("Written by `make bench-kv` on ")


def test_a_page_has_a_table_for_each_length() -> None:
    here = {"device_name": "d", "cores": 2, "threads": 2, "load_average": 0.1}
    here |= {"torch": "2", "transformers": "5"}
    rows = [WHOLE, ROW, replace(WHOLE, tokens=500), replace(ROW, tokens=500)]
    other = [replace(row, instance="wider") for row in (WHOLE, ROW)]

    def paged(*rows: CacheRow) -> str:
        return page({"conditions": here, "rows": [row.entry() for row in rows]})

    assert paged(*rows, *other).count("## 1,000 tokens") == 2
    text = paged(*rows)
    assert text.count("## 1,000 tokens, 900 of them visual") == 1
    assert text.count("| snapkv | 0.9 | 1005 | 5.0 (0.50%) | 3 (1 MiB) | 2.00 |") == 2
