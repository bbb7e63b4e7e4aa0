"""`python -m espalier store show`: wrong answers, and answers that a method broke or mended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from espalier.harness.cli.store import main
from espalier.harness.errors import UserError
from espalier.harness.stats import by_unit, mcnemar_midp, mcnemar_pvalue
from espalier.harness.store import SCHEMA, Store
from espalier.harness.store.answer_view import compare, write
from espalier.harness.store.stored_answers import find_run, read_answers
from tests.refused import refused
from tests.runs.terminal import Terminal

Scores = Sequence[float]


def add(
    root: Path,
    key: str,
    scores: Scores,
    how: str = "mean",
    values: Sequence[Any] | None = None,
    units: Sequence[int] | None = None,
    with_question: bool = True,
    **extra: Any,
) -> None:
    """Write a finished run with answers `right` or `wrong <i>`."""
    run = Store(root).run(key)
    for i, score in enumerate(scores):
        about = {
            "question": f"<image>what\tis {i}?",
            "target": "right",
            "media": [{"from": f"d/{i}#0"}],
        }
        answer = "right" if score > 0.99 else f"wrong {i}"
        entry = {"task": "t", "doc_id": i, "answer": answer}
        run.journal.append({**entry, "asked": about} if with_question else entry)
    for i, score in enumerate(scores):
        scoring: dict[str, Any] = {"task": "t", "doc_id": i, "scores": {"acc": score}}
        if values is not None:
            scoring["values"] = [{"of": ["acc"], "value": values[i]}]
        if units is not None:
            scoring["units"] = {"acc": units[i]}
        run.journal.append(scoring)
    row: dict[str, Any] = {
        **{"schema": SCHEMA, "run_key": key, "model": "m", "method": "fastv", "benchmark": "b"},
        **{
            "ratio": 0.5,
            "n_samples": len(scores),
            "metrics": {"acc": {"value": 0.5, "stderr": None}},
        },
        "extra": {"headline": "acc", "label": "K=3", "aggregation": {"acc": {"how": how}}, **extra},
    }
    row |= {name: extra[name] for name in ("benchmark", "method", "ratio") if name in extra}
    run.commit(row)


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[list[list[str]], list[str]]:
    out, err = capsys.readouterr()
    return [line.split("\t") for line in out.splitlines()], err.splitlines()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add(tmp_path, "aa11", [1, 0, 1, 0, 0, 1, 1, 0])
    add(tmp_path, "ab22", [1, 1, 1, 1, 0, 0, 1, 1], method="none", ratio=0)
    return tmp_path


def test_wrong_answers_as_tab_separated_values(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "aa", "--wrong", "--store", str(root)]) == 0
    lines, errors = printed(capsys)
    assert lines[0] == ["sample", "score", "target", "answer", "question", "media"]
    # A tab inside a cell is written out.
    assert lines[1] == ["t/1", "0", "right", "wrong 1", "<image>what\\tis 1?", "d/1#0"]
    assert [line[0] for line in lines[1:]] == ["t/1", "t/3", "t/4", "t/7"]
    assert errors == ["fastv K=3 0.5: 4 of 8 answers without full marks in acc"]


def test_of_a_sample_answered_twice_the_first_answer_and_the_last_scoring_are_shown(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Store(root).run("aa11").journal
    journal.append({"task": "t", "doc_id": 1, "answer": "of another machine"})
    journal.append({"task": "t", "doc_id": 3, "scores": {"acc": 1.0}})
    assert main(["show", "aa", "--wrong", "--store", str(root)]) == 0
    lines, _ = printed(capsys)
    assert [(line[0], line[3]) for line in lines[1:]] == [
        *(("t/1", "wrong 1"), ("t/4", "wrong 4"), ("t/7", "wrong 7"))
    ]


def test_all_answers_and_a_limit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "aa11", "--limit", "3", "--store", str(root)]) == 0
    lines, errors = printed(capsys)
    assert [line[0] for line in lines[1:]] == ["t/0", "t/1", "t/2"]
    assert errors[-1] == "3 of 8 shown; --limit 0 shows all"
    main(["show", "aa11", "--limit", "0", "--store", str(root)])
    assert len(printed(capsys)[0]) == 9


def test_what_was_broken_and_mended(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "aa", "--against", "ab", "--store", str(root)]) == 0
    lines, errors = printed(capsys)
    assert [(line[0], line[1]) for line in lines[1:]] == [
        *(("t/1", "broke"), ("t/3", "broke"), ("t/7", "broke"), ("t/5", "mended"))
    ]
    assert lines[1][2:7] == ["0", "1", "right", "wrong 1", "right"]
    assert errors[0] == (
        "fastv K=3 0.5 against none K=3 0 on 8 common samples of b: broke 3, mended 1, both right 3, both wrong 1; "
        "McNemar's exact test: p = 0.625, mid-p = 0.375"
    )
    assert errors[1].startswith("acc: -0.25 [-")
    assert main(["show", "aa", "--against", "ab", "--wrong", "--store", str(root)]) == 0
    assert [line[0] for line in printed(capsys)[0][1:]] == ["t/1", "t/3", "t/7"]


def test_mcnemar_is_the_binomial_test_of_the_discordant_pairs() -> None:
    assert mcnemar_pvalue(0, 0) == 1.0
    assert mcnemar_pvalue(6, 0) == pytest.approx(2 / 2**6)
    assert mcnemar_pvalue(10, 3) == pytest.approx(2 * stats.binom(13, 0.5).cdf(3))
    assert mcnemar_pvalue(3, 10) == mcnemar_pvalue(10, 3)
    with pytest.raises(ValueError, match="at least 0"):
        mcnemar_pvalue(-1, 2)


def test_the_mid_p_takes_half_of_what_was_observed() -> None:
    assert mcnemar_midp(0, 0) == 1.0
    binomial = stats.binom(13, 0.5)
    assert mcnemar_midp(10, 3) == pytest.approx(2 * binomial.cdf(2) + binomial.pmf(3))
    assert mcnemar_midp(3, 10) == mcnemar_midp(10, 3)
    assert mcnemar_midp(4, 4) == pytest.approx(1 - stats.binom(8, 0.5).pmf(4) / 2)


@pytest.mark.sampled
@pytest.mark.parametrize(("samples", "discordance"), [(100, 0.05), (500, 0.05), (200, 0.2)])
def test_false_alarms_of_the_mid_p_are_nearer_to_the_level(
    samples: int, discordance: float
) -> None:
    """Rates by summing over all counts, no draws."""
    rates = {}
    for pvalue in (mcnemar_pvalue, mcnemar_midp):
        test = cache(pvalue)
        rates[pvalue] = sum(
            stats.binom.pmf(changed, samples, discordance)
            * sum(
                probability
                for broke, probability in enumerate(
                    stats.binom.pmf(np.arange(changed + 1), changed, 0.5)
                )
                if test(min(broke, changed - broke), max(broke, changed - broke)) <= 0.05
            )
            for changed in range(int(2 * samples * discordance))
        )
    assert rates[mcnemar_pvalue] < rates[mcnemar_midp] < 0.052


def test_graded_scores_are_compared_by_their_means(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    full = rng.random(60)
    add(tmp_path, "aa", (full * 0.8).tolist())
    add(tmp_path, "bb", full.tolist())
    ours, theirs = (read_answers(find_run(tmp_path, key)) for key in ("aa", "bb"))
    comparison = compare(ours, theirs)
    assert (comparison.binary, comparison.right) == (False, None)
    assert (comparison.count("broke"), comparison.count("mended")) == (60, 0)
    assert comparison.pvalue < 0.001
    assert comparison.gain.value == pytest.approx(-0.2 * full.mean())
    assert comparison.gain.low < -0.2 * full.mean() < comparison.gain.high


def test_less_may_be_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(tmp_path, "aa", [0, 0.5, 0], higher_is_better=False)
    add(tmp_path, "bb", [0, 0, 0.25], higher_is_better=False)
    assert main(["show", "aa", "--wrong", "--store", str(tmp_path)]) == 0
    assert [line[0] for line in printed(capsys)[0][1:]] == ["t/1"]
    comparison = compare(*(read_answers(find_run(tmp_path, key)) for key in ("aa", "bb")))
    assert [pair.change for pair in comparison.pairs] == ["same", "broke", "mended"]


def test_of_a_metric_that_is_no_mean_scores_come_from_scoring(tmp_path: Path) -> None:
    """As POPE's F1: the journal has a contribution and a table with the sample's own score."""
    contributions = [0.9, 0.2, 1.1, 0.8]
    values: list[Mapping[str, Any]] = [{"score": s} for s in (1.0, 0.0, 1.0, 1.0)]
    add(tmp_path, "aa", contributions, how="influence", values=values, units=[0, 0, 2, 2])
    add(tmp_path, "bb", [0.5] * 4, how="influence", values=values, units=[0, 0, 2, 2])
    ours = read_answers(find_run(tmp_path, "aa"))
    assert [answer.score for answer in ours.answers.values()] == [1, 0, 1, 1]
    gain = compare(ours, read_answers(find_run(tmp_path, "bb"))).gain
    assert gain.value == pytest.approx(np.mean(contributions) - 0.5)
    # Two units: whatever is drawn of them lies between theirs, and what was not seen may lie beyond.
    ends = by_unit(np.array(contributions) - 0.5, [0, 0, 2, 2])
    assert gain.low < min(ends)
    assert gain.high > max(ends)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a"], "key='a' is the beginning of 2 runs: aa11, ab22"),
        (["c"], "key='c': no finished run of 2 in store="),
        (["aa", "--metric", "f1"], "--metric='f1' is unknown; valid: acc"),
        (["aa", "--limit", "-1"], "--limit=-1 must be at least 0"),
        (["aa", "--against", "zz"], "key='zz': no finished run of 2"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *argv, "--store", str(root)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_what_cannot_be_said_is_refused(tmp_path: Path) -> None:
    add(tmp_path, "aa", [0.5, 0.7], how="influence", values=["yes", "no"])
    add(tmp_path, "bb", [120.0, 7.0])
    add(tmp_path, "cc", [1.0], benchmark="other")
    add(tmp_path, "dd", [])
    silent, lengths, other = (read_answers(find_run(tmp_path, key)) for key in ("aa", "bb", "cc"))
    with pytest.raises(
        UserError, match=r"acc of run aa has no scores of single samples; valid for"
    ):
        silent.full_marks  # noqa: B018
    with pytest.raises(UserError, match="acc has no best score, a sample has 120"):
        lengths.full_marks  # noqa: B018
    assert "--against: a run on other cannot be paired with one on b" in refused(
        compare, silent, other
    )
    with pytest.raises(UserError, match="run dd: its journal holds no answers scored by acc"):
        read_answers(find_run(tmp_path, "dd"))


def test_journals_of_earlier_versions_have_answers_without_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path, "aa", [1, 0], with_question=False)
    assert main(["show", "aa", "--wrong", "--store", str(tmp_path)]) == 0
    assert printed(capsys)[0][1] == ["t/1", "0", "", "wrong 1", "", ""]


def test_at_a_terminal_there_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    line = ("t/1", "broke", "[0]", "x" * 100, "media")
    note = write((("sample", "change", "score", "answer", "media"), [line, line]), stream, 1)
    assert "┃ sample ┃" in stream.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "[0]" in stream.getvalue()
    assert "…" in stream.getvalue()
    assert note == "1 of 2 shown; --limit 0 shows all"
