"""The report's content: what stands on the page, and what is left out by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from espalier.harness.cli import report as command
from espalier.harness.errors import UserError
from espalier.harness.reports.html.page import (
    assemble,
    decoders,
    gather,
    kind_of,
    lines,
    panels,
    pictures,
    styles,
    unscored,
)
from espalier.harness.stats import mean_interval
from espalier.harness.store import Store
from tests.report.test_curves import add_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add_run(tmp_path, "none", 0.0, 0.9, layer=None)
    for ratio, random, good in ((0.5, 0.8, 0.9), (0.9, 0.45, 0.81)):
        add_run(tmp_path, "random", ratio, random)
        add_run(tmp_path, "clever", ratio, good)
    return tmp_path


def content(root: Path) -> dict[str, object]:
    gathered = gather([root], "original")
    unscored(gathered)
    page_panels, means = panels(gathered)
    return {
        "stores": ["made up"],
        "positions": "original",
        "kinds": ["unpruned", "control", "before the LLM", "inside the LLM"],
        "rows": lines(gathered.rows),
        "styles": styles(lines(gathered.rows)),
        "panels": page_panels,
        "averages": means,
        "overlays": {"pictures": [], "curves": {}},
        "decoders": decoders(gathered),
        "pictures": [],
        "broken": {},
        "tables": [
            {
                "name": f"{paper}_table{number}",
                "paper": paper,
                "title": f"{number} <b>",
                "html": f"<h1>{paper} {number}</h1><table><tr><td>1</td></tr></table>",
            }
            for paper, number in (("one", 1), ("one", 2), ("two", 1))
        ],
        "left_out": gathered.left_out,
        "notes": gathered.notes,
    }


def test_curves_on_the_page_are_those_of_the_statistics(root: Path) -> None:
    ((panel,), means) = panels(gather([root], "original"))
    full = mean_interval([1.0] * 180 + [0.0] * 20)
    assert panel["full"] == pytest.approx([full.value, full.low, full.high], abs=1e-5)
    clever = next(curve for curve in panel["curves"] if curve["name"] == "clever")
    assert (clever["kind"], clever["floor"]) == ("before the LLM", "random")
    assert [point["score"][0] for point in clever["points"]] == [0.9, 0.81]
    assert clever["points"][1]["retention"][0] == pytest.approx(0.9)
    average = next(mean for mean in means if (mean["curve"], mean["ratio"]) == ("clever", 0.9))
    assert average["benchmarks"] == 1
    assert average["retention"][0] == pytest.approx(0.9)


def test_a_row_with_an_infinite_number_is_named(root: Path) -> None:
    run = next(path for path in (root / "runs").iterdir() if "clever" in path.name)
    row = json.loads((run / "row.json").read_text())
    row["memory"] = {"kv_bytes": float("inf")}
    row["flops"]["share_of_full"] = float("inf")
    (run / "row.json").write_text(json.dumps(row))
    page = content(root)
    assert "clever" in json.dumps(page["left_out"])
    json.loads(re.search(r'id="data">(.*?)</script>', assemble(page), re.DOTALL)[1])


def test_infinite_numbers_are_gaps(root: Path) -> None:
    gathered = gather([root], "original")
    for result in gathered.rows:
        result.row["flops"]["share_of_full"] = float("inf")
    assert set(lines(gathered.rows)["columns"]["flops"]) == {None}


def test_bad_rows_are_named_and_left_out(root: Path) -> None:
    add_run(root, "clever", 0.75, 0.5, n=8)
    add_run(root, "clever", 0.75, 0.5, under={"engine_positions": "renumbered"})
    add_run(root, "clever", 0.75, 0.7, run_key="older")
    (root / "runs" / "half").mkdir()
    (root / "runs" / "torn").mkdir()
    (root / "runs" / "torn" / "row.json").write_text('{"schema": 1, "run_k')
    bare = Store(root).run("bare")
    bare.commit(
        {
            **dict.fromkeys(("run_key", "model", "method", "benchmark"), "bare"),
            "schema": 1,
            "ratio": 0.5,
            "n_samples": 3,
            "extra": {},
        }
    )
    old = json.loads((root / "runs" / "boxes-clever--0.5-200" / "row.json").read_text())
    del old["settings"]
    Store(root).run("old").commit({**old, "run_key": "old"})
    twice = json.loads((root / "runs" / "boxes-clever--0.5-200" / "row.json").read_text())
    Store(root).run("twice").commit({**twice, "run_key": "twice"})
    gathered = gather([root], "original")
    reasons = {reason: " ".join(cases) for reason, cases in gathered.left_out.items()}
    assert "8 and not 200" in reasons["another number of samples"]
    assert "renumbered" in reasons["another position policy than original"]
    assert reasons["the run is not finished"] == "half"
    assert "torn" in reasons["the file is damaged, or of another version"]
    assert "budget_rule" in reasons["the row is incomplete"]
    assert reasons["the row is of an older version without settings"].startswith("old:")
    assert (
        "boxes-clever--0.5-200"
        in reasons["the cell was run twice, by other code; the newer row counts"]
    )
    keys = {row.row["run_key"] for row in gathered.rows}
    assert keys == {"boxes-none--0.0-200", "boxes-random--0.5-200", "boxes-random--0.9-200",
                    "boxes-clever--0.9-200", "twice"}  # fmt: skip


def test_versions_of_code_are_named(root: Path) -> None:
    extra = {"headline": "acc", "label": "", "sites": [], "environment": {"commit": "abc"}}
    add_run(root, "other", 0.5, 0.7, extra=extra)
    (cases,) = gather([root], "original").notes.values()
    assert cases == ["None: 5 rows", "abc: 1 rows"]


def test_rows_that_no_curve_can_hold_are_named(root: Path) -> None:
    add_run(root, "clever", 0.75, 0.8, under={"model_revision": "other"})
    gathered = gather([root], "original")
    assert panels(gathered) == ([], [])
    assert "model.revision" in " ".join(gathered.left_out["no curves of tiny on boxes"])
    assert len(lines(gathered.rows)["columns"]["ratio"]) == 6


def test_rows_that_differ_in_their_prompt_have_different_names(root: Path) -> None:
    add_run(root, "clever", 0.75, 0.8, under={"benchmark_prompt": {"post_prompt": ""}})
    add_run(root, "clever", 0.75, 0.7, run_key="plain")
    names = lines(gather([root], "original").rows)["texts"]["curve"]
    assert names == ["none", "random", "clever", 'clever benchmark.prompt={"post_prompt": ""}']


DECODED = {
    **{"speedup_decode": 1.5, "speedup_decode_interval": [1.2, 1.9], "speedup_end_to_end": 1.25},
    **{"tokens_per_target_forward": 2.5, "acceptance": 0.75},
}


def add_decoder(root: Path, n: int = 10) -> None:
    extra = {"headline": "acc", "label": "gamma=4", "sites": [], "speculative": DECODED}
    add_run(root, "drafts", 0.5, 0.9, n=n, extra=extra)


def test_a_decoder_counts_with_any_number_of_answers(root: Path) -> None:
    add_decoder(root)
    add_run(root, "clever", 0.75, 0.5, n=8)
    gathered = gather([root], "original")
    assert [*gathered.left_out] == ["another number of samples"]
    (case,) = gathered.left_out["another number of samples"]
    assert "clever" in case
    (line,) = decoders(gathered)
    assert line["curve"] == "drafts gamma=4"
    assert (line["samples"], line["acceptance"]) == (10, 0.75)
    assert line["decode"] == [1.5, 1.2, 1.9]
    assert line["end_to_end"] == [1.25, None, None]
    # It is no curve over tokens removed.
    assert [curve["name"] for curve in panels(gathered)[0][0]["curves"]] == ["clever", "random"]


def test_pictures_are_of_the_rows_or_say_how_to_get_some(root: Path) -> None:
    entries = pictures(gather([root], "original"), [root])
    assert [entry["source"] for entry in entries] == [None] * 3
    assert "+experiment=speculative" in entries[0]["caption"]


def test_the_smallest_p_value_of_a_permutation_is_a_bound(tmp_path: Path) -> None:
    for method, ratio, mean in (("none", 0.0, 0.9), ("random", 0.5, 0.2), ("clever", 0.5, 0.85)):
        add_run(tmp_path, method, ratio, mean, layer=None if method == "none" else 0)
        journal = next(tmp_path.glob(f"runs/*-{method}-*/journal.jsonl"))
        # Not only right and wrong: the permutation test.
        journal.write_text(journal.read_text().replace('"acc": 0.0', '"acc": 0.25'))
    ((panel,), _) = panels(gather([tmp_path], "original"))
    assert [(c["name"], c["points"][0]["bound"]) for c in panel["curves"]] == [
        ("clever", 1),
        ("random", 0),
    ]


def test_kinds_are_where_methods_act() -> None:
    row = {"method": "any", "extra": {"sites": [{"where": "layer", "layer": 2}]}}
    assert kind_of(row) == "inside the LLM"
    assert (
        kind_of({"method": "any", "extra": {"sites": [{"where": "vision", "layer": 0}]}})
        == "before the LLM"
    )
    assert kind_of({"method": "any", "extra": {"cache": {}, "sites": []}}) == "before the LLM"
    assert kind_of({"method": "any", "extra": {"cache": {"layers": 1}}}) == "cache compressor"
    assert kind_of({"method": "random", "extra": {}}) == "control"


def test_the_page_is_whole_and_needs_nothing(root: Path) -> None:
    page = assemble({**content(root), "stores": ["</script><b>&"]})
    assert "<!--" not in page.replace("<!doctype", "")
    # The one link is the empty icon; everything else is in the file.
    assert set(re.findall(r"""(?:src|href)=["']([^"']*)["']""", page)) == {"data:,"}
    assert not re.findall(r"@import|url\(", page)
    held = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert json.loads(held.group(1))["tables"][0]["title"] == "1 <b>"
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in page


@pytest.mark.slow
def test_a_store_without_rows_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="holds no rows"):
        gather([tmp_path], "original")
    assert command.main(["--store", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
