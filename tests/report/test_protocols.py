"""Protocols over made-up runs: their figures by hand, their files, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from espalier.harness.cli.report import main, protocol_tables
from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import score_entries
from espalier.harness.reports.curves.curve_files import read_selection
from espalier.harness.stats import Interval
from espalier.harness.store import Store
from tests.report.test_curves import N, add_run

#: Costs that `--protocol cost` prints.
COSTS: dict[str, Any] = {"tokens": {"kept_final": 14.4}, "memory": {"kv_bytes": 500.0}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store in which the easiest samples are right first: 0.9 unpruned, 0.5 downsampled, 0.8 and 0.6 otherwise."""
    store = tmp_path / "store"
    add_run(store, "none", 0.0, 0.9, layer=None, **COSTS)
    for method, mean in (("downsample", 0.5), ("clever", 0.8), ("random", 0.6), ("other", 0.4)):
        add_run(store, method, 0.9, mean, **COSTS)
    return store


def lines(name: str, root: Path) -> dict[str, Any]:
    (table,) = protocol_tables([name], read_selection([root], []))
    return {
        str(line.get("method", line.get("first"))): line for line in table.lines.to_dict("records")
    }


def test_groups_are_what_downsampling_keeps_and_loses(root: Path) -> None:
    by_method = lines("vtc", root)
    assert set(by_method) == {"clever", "random (control)", "other"}
    clever = by_method["clever"]
    assert (clever["n difficult"], clever["n simple"]) == (0.4 * N, 0.5 * N)
    assert clever["difficult"].value == pytest.approx(0.3 / 0.4)
    assert (clever["simple"].value, clever["net"].value) == (1, pytest.approx(0.3 / 0.9))
    # What is unpruned wrong counts nowhere; of what downsampling keeps, 0.1 of 0.5 is lost.
    assert by_method["other"]["difficult"].value == 0
    assert by_method["other"]["simple"].value == pytest.approx(0.8)
    assert by_method["other"]["net"].high < 0


def test_scores_between_right_and_wrong_have_no_groups(root: Path) -> None:
    add_run(root, "none", 0.0, 0.9, benchmark="words")
    directory = Store(root).run("words-none--0.0-200")
    directory.journal.append(*score_entries({("words", 7): {"acc": 0.25}}))
    with pytest.raises(UserError, match=r"words: acc of sample words/7 is 0.25, neither 0 nor 1"):
        protocol_tables(["vtc"], read_selection([root], ["benchmark=words"]))


def test_a_selection_without_downsampling_names_what_is_missing(root: Path) -> None:
    with pytest.raises(UserError, match="--protocol=vtc needs method=none and method=downsample"):
        protocol_tables(["vtc"], read_selection([root], ["method=clever"]))


def test_overall_scores_over_two_benchmarks(root: Path) -> None:
    add_run(root, "none", 0.0, 0.8, benchmark="words", layer=None)
    add_run(root, "clever", 0.9, 0.4, benchmark="words")
    shares = np.array([0.8 / 0.9, 0.5])
    line = lines("effivlm", root)["clever"]
    assert line["OP"].value == pytest.approx(np.sqrt((shares**2).mean()))
    assert line["OP"].low < line["OP"].value < line["OP"].high
    assert line["OG"] == pytest.approx(shares.std() / shares.mean())
    assert line["OL"] is None  # made-up runs have no answers
    line = lines("uniprunebench", root)["clever"]
    assert line["score"] == pytest.approx(0.6)
    assert line["retained"].value == pytest.approx(shares.mean())
    # The others lack a benchmark.
    assert set(lines("uniprunebench", root)) == {"clever"}


def test_loyalty_is_the_share_of_equal_answers(root: Path) -> None:
    for result in read_selection([root], ["method=clever"]):
        method = result.row["method"]
        answers = [
            {"task": "boxes", "doc_id": number, "answer": method if number < 50 else "same"}
            for number in range(N)
        ]
        Store(root).run(result.path.name).journal.append(*answers)
    assert lines("effivlm", root)["clever"]["OL"].value == pytest.approx(0.75)


@pytest.mark.slow
def test_reversed_ranks_have_tau_minus_one(root: Path) -> None:
    for method, mean in (("downsample", 0.6), ("clever", 0.2), ("random", 0.5), ("other", 0.8)):
        add_run(root, method, 0.5, mean)
    (table,) = protocol_tables(["ranks"], read_selection([root], []))
    (line,) = [line for line in table.lines.to_dict("records") if line["dimension"] == "ratio"]
    assert (line["first"], line["second"]) == ("10 %", "50 %")
    tau, repeated = line["tau"], line["repeated"]
    assert (tau.value, tau.low) == (-1, -1)
    assert repeated > 0.9


@pytest.mark.slow
def test_halves_of_the_samples_rank_alike(root: Path) -> None:
    """Each sample is right for one method more than the next, so that the order is the same in any half."""
    (table,) = protocol_tables(["ranks"], read_selection([root], []))
    (line,) = table.lines.to_dict("records")
    assert (line["dimension"], line["first"], line["second"]) == (
        "samples",
        "one half",
        "the other",
    )
    assert isinstance(tau := line["tau"], Interval)
    assert tau.value == 1


@pytest.mark.slow
def test_seeds_move_only_methods_that_draw(root: Path) -> None:
    """A draw of random dropping overtakes `clever` alone: 1 of 6 pairs is turned."""
    add_run(root, "random", 0.9, 0.85, seed=1)
    (table,) = protocol_tables(["ranks"], read_selection([root], []))
    (line,) = [line for line in table.lines.to_dict("records") if line["dimension"] == "seed"]
    assert (line["first"], line["second"], line["methods"]) == ("0", "1", 4)
    assert isinstance(tau := line["tau"], Interval)
    assert tau.value == pytest.approx(4 / 6)


def test_rules_stand_beside_each_other(root: Path) -> None:
    add_run(root, "clever", 0.9, 0.7, budget_rule="flops", label="", **COSTS)
    line = lines("cost", root)["clever"]
    assert (line["kept"].value, line["flops"].value) == (0.8, 0.7)
    assert line["flops bytes"] == 1.0
    assert lines("cost", root)["other"]["flops"] is None


def test_kept_sets_of_two_precisions(tmp_path: Path) -> None:
    for dtype, last in (("float32", 3), ("bfloat16", 9)):
        add_run(tmp_path, "clever", 0.9, 0.8, n=4, under={"model_dtype": dtype})
        entries = [
            {
                "task": "boxes",
                "doc_id": number,
                "answer": "a",
                # The last sample keeps another token in the other precision.
                "record": {"kept_tokens": [1, 2, last if number == 3 else 3]},
            }
            for number in range(4)
        ]
        Store(tmp_path).run(f"boxes-clever--0.9-4-{dtype}").journal.append(*entries)
    line = lines("kept", tmp_path)["clever"]
    assert line["difference"] == "model.dtype: float32 / bfloat16"
    assert (line["other sets"].value, line["other answers"].value) == (0.25, 0.0)
    assert line["in common"].value == pytest.approx((3 + 2 / 4) / 4)


def test_the_files_of_a_protocol(root: Path, tmp_path: Path) -> None:
    (table,) = protocol_tables(["vtc"], read_selection([root], []))
    files = {path.suffix: path for path in table.write(tmp_path / "page")}
    assert list(files) == [".png", ".svg", ".md", ".tex", ".csv"]
    assert {path.stem for path in files.values()} == {"page-vtc"}
    numbers = pd.read_csv(files[".csv"]).set_index("method")
    assert numbers.difficult["clever"] == pytest.approx(0.75)
    assert numbers.difficult_low["clever"] < 0.75 < numbers.difficult_high["clever"]
    assert "| tiny | boxes | clever | 10 % | 75.0 [" in files[".md"].read_text()
    assert r"clever & 10 \% & 75.0 [" in files[".tex"].read_text()


def test_a_protocol_without_its_runs_is_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(root), "--protocol", "kept", "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert "error: --protocol=kept needs runs" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_report_has_a_protocol(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main([str(root), "--protocol", "vtc", "--no-overlays", "--out", str(out)]) == 0
    assert "What downsampling loses" in out.read_text()
    assert (tmp_path / "page-vtc.md").is_file()
