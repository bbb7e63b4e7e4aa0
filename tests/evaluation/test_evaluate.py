"""The evaluation bridge with a stand-in model: batching, journal, resume, failures, scoring."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_eval.tasks import TaskManager
from scipy.stats import binom

from espalier.harness.errors import UserError
from espalier.harness.evaluation.evaluate import Evaluation, SampleErrors, evaluate_session
from espalier.harness.evaluation.journal_scores import read_scorings
from espalier.harness.evaluation.metered import time_medians
from espalier.harness.evaluation.samples import Sample
from espalier.harness.kinds.sample_counts import token_means
from espalier.harness.specs.generation import DEFAULT_NEW_TOKENS, settings
from espalier.harness.store import Journal
from tests.arithmetic import UTILS, Calculator, make_spec, sums, write_task


def evaluated(
    journal: Journal,
    questions: list[tuple[str, str]],
    model: Calculator | None = None,
    **settings: Any,
) -> Evaluation:
    """Return the evaluation of a stand-in model on a task beside the journal."""
    folder = write_task(journal.path.parent / "t", questions)
    return evaluate_session(make_spec(folder, **settings), model or Calculator(), journal)


def answers(result: Evaluation) -> dict[int, str]:
    return {sample.doc_id: sample.answer for sample in result.samples}


@pytest.fixture
def model() -> Calculator:
    return Calculator()


def test_metrics_samples_and_telemetry(model: Calculator, tmp_path: Path, journal: Journal) -> None:
    spec = make_spec(write_task(tmp_path / "t", sums(5, wrong=[3])), metrics=("right", "f1"))
    progress: list[tuple[int, int]] = []
    result = evaluate_session(spec, model, journal, lambda *p: progress.append(p))
    assert result.metrics["right"]["value"] == pytest.approx(0.8)
    # Standard error of (1, 1, 1, 0, 1): sample variance 0.2 over five samples.
    assert result.metrics["right"]["stderr"] == pytest.approx((0.2 / 5) ** 0.5)
    assert result.metrics["f1"]["value"] == pytest.approx(8 / 9)
    # Resampling draws h right answers of five from the binomial, and F1 is 2h / (h + 5) here.
    values, chances = 2 * np.arange(6) / (np.arange(6) + 5), binom(5, 0.8).pmf(range(6))
    spread = chances @ values**2 - (chances @ values) ** 2
    assert result.metrics["f1"]["stderr"] == pytest.approx(spread**0.5, rel=0.1)
    assert (list(result.metrics), result.n_samples) == (["right", "f1"], 5)
    assert answers(result) == {i: str(i + 7) for i in range(5)}
    assert result.scores["sums", 3] == {"right": 0.0}
    scorings = read_scorings(journal.entries())
    assert {key: scoring.scores for key, scoring in scorings.items()} == result.scores
    # Each record belongs to its own sample: the calculator counts the sum as text tokens.
    assert [s.record.text for s in result.samples] == [i + 7 for i in range(5)]
    assert [s.record.sample for s in result.samples] == [f"sums/{i}" for i in range(5)]
    assert (result.samples[0].input_tokens, result.samples[0].output_tokens) == (13, 2)
    expected = {"visual": 6, "requested_keep": 3, "kept_final": 3, "layer_average": 4.5}
    counts = token_means([sample.record for sample in result.samples])
    assert counts == {**expected, "kv_entries": 9}
    assert time_medians([sample.record for sample in result.samples])["decode_ms_per_token"] == 0.25
    assert progress == [(0, 5), (2, 5), (4, 5), (5, 5)]
    assert model.batches == [["sums/0", "sums/1"], ["sums/2", "sums/3"], ["sums/4"]]


def test_the_prompt_of_the_first_answered_sample_is_told(journal: Journal) -> None:
    # The second time every answer comes from the journal.
    for _ in range(2):
        result = evaluated(journal, [("bad", "0"), *sums(4)], max_errors=1)
        assert result.prompt == {"rendered": "0+7"}


def test_limit_and_warmup(model: Calculator, journal: Journal) -> None:
    assert evaluated(journal, sums(6), model, limit=3, warmup=2).n_samples == 3
    first = ["sums/0", "sums/1"]
    assert model.batches == [first, first, first, ["sums/2"]]
    assert len([r for r in journal.entries() if "answer" in r]) == 3


def test_lmms_eval_does_not_deal_the_samples_out_itself_and_nothing_reaches_stdout(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert answers(evaluated(journal, sums(3))) == {i: str(i + 7) for i in range(3)}
    assert capsys.readouterr().out == ""


def test_no_git_process_is_started(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []
    start = subprocess.Popen.__init__

    def recorded(process: Any, arguments: Any, *more: Any, **options: Any) -> None:
        commands.append(arguments)
        start(process, arguments, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", recorded)
    assert evaluated(journal, sums(2)).n_samples == 2
    assert not [command for command in commands if "git" in command]


def test_missing_data_is_one_line_at_once(tmp_path: Path, journal: Journal) -> None:
    folder = write_task(tmp_path / "t", sums(2))
    (folder / "sums.jsonl").unlink()
    line = r"^benchmark.task='sums': its data cannot be loaded: FileNotFoundError: [^\n]*sums.jsonl"
    with pytest.raises(UserError, match=line):
        evaluate_session(make_spec(folder), Calculator(), journal)


@pytest.mark.parametrize("torn", [False, True])
def test_resume_takes_finished_samples_and_gives_the_same_result(
    model: Calculator, tmp_path: Path, journal: Journal, torn: bool
) -> None:
    spec = make_spec(write_task(tmp_path / "t", sums(7, wrong=[0])))
    expected = evaluate_session(spec, Calculator(), Journal(tmp_path / "whole.jsonl"))
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(lines[:3]) + (lines[3][:-9] if torn else b""))
    result = evaluate_session(spec, model, journal)
    assert result.resumed == 3
    # The half-finished batch is composed as before, the first one is not repeated.
    assert model.batches == [["sums/2", "sums/3"], ["sums/4", "sums/5"], ["sums/6"]]
    assert replace(result, resumed=0, seconds=0) == replace(expected, resumed=0, seconds=0)
    again = Calculator()
    final = evaluate_session(spec, again, journal)
    assert (again.batches, final.metrics) == ([], expected.metrics)


@pytest.mark.parametrize("fail", [RuntimeError, SystemExit])
def test_a_failing_sample_is_named_and_the_others_are_saved(
    journal: Journal, fail: type[BaseException]
) -> None:
    questions, model = sums(5), Calculator(fail=fail)
    questions[2] = ("bad", "0")
    with pytest.raises(
        SampleErrors, match=rf"1 of 5 .*sums/2: {fail.__name__}: cannot add this"
    ) as e:
        evaluated(journal, questions, model, batch_size=4)
    assert "\n" not in str(e.value)
    assert {r["doc_id"] for r in journal.entries() if "answer" in r} == {0, 1, 3, 4}
    assert [r["doc_id"] for r in journal.entries() if "error" in r] == [2]
    # One at a time only where the batch failed.
    assert [len(batch) for batch in model.batches] == [4, 1, 1, 1, 1, 1]


def test_allowed_failures_are_left_out_and_never_scored(journal: Journal) -> None:
    questions = sums(6, wrong=[5])
    questions[2] = ("bad", "")  # An empty answer would be counted as right.
    result = evaluated(journal, questions, max_errors=1)
    assert (result.n_samples, result.metrics["right"]["value"]) == (5, pytest.approx(4 / 5))
    assert [failure.key for failure in result.failures] == [("sums", 2)]
    assert ("sums", 2) not in result.scores
    assert 2 not in answers(result)


def test_a_sample_that_cannot_be_scored_is_named_at_once(journal: Journal) -> None:
    questions = sums(5)
    questions[3] = ("1+2", "unscorable")
    with pytest.raises(SampleErrors, match="sums/3: KeyError"):
        evaluated(journal, questions)
    result = evaluated(journal, questions, max_errors=1)
    assert (result.n_samples, result.resumed, result.metrics["right"]["value"]) == (4, 5, 1.0)
    assert ("sums", 3) not in result.scores


class Narrow(Calculator):
    """A calculator with a context of ten characters, which refuses in the words of an adapter."""

    def encode(self, messages: Sequence[Any]) -> Mapping[str, Any]:
        inputs = super().encode(messages)
        for number, text in enumerate(inputs["text"]):
            if len(text) > 10:
                raise UserError(f"chat {number} of the batch has {len(text)} tokens, 10 fit")
        return inputs


def test_a_sample_beyond_the_context_is_refused_by_its_own_name(
    tmp_path: Path, journal: Journal
) -> None:
    questions = sums(6)
    questions[4] = ("1+1+1+1+1+1+1", "7")
    with pytest.raises(SampleErrors, match=r"^1 of 6 .*: sums/4: UserError: the chat has 13 tok"):
        evaluated(journal, questions, Narrow(), batch_size=3)
    result = evaluated(journal, questions, Narrow(), batch_size=3, max_errors=1)
    assert (result.n_samples, result.resumed, result.metrics["right"]["value"]) == (5, 5, 1.0)
    with pytest.raises(UserError, match=r"^sums/0: UserError: the chat has 13 tokens, 10 fit$"):
        evaluated(Journal(tmp_path / "u" / "j.jsonl"), questions[4:5], Narrow(), max_errors=1)


def test_a_document_that_cannot_be_loaded_is_named(tmp_path: Path, journal: Journal) -> None:
    folder = write_task(tmp_path / "t", sums(5))
    broken = (
        'def images(doc):\n    if doc["question"] == "3+7":\n        raise OSError("no such video")'
    )
    (folder / "utils.py").write_text(UTILS.replace("def images(doc):", broken))
    with pytest.raises(SampleErrors, match=r"1 of 5 .*: sums/3: OSError: no such video"):
        evaluate_session(make_spec(folder), Calculator(), journal)
    assert [entry["doc_id"] for entry in journal.entries() if "error" in entry] == [3]


def test_a_task_of_a_group_may_fail_as_a_whole(tmp_path: Path, journal: Journal) -> None:
    folder = write_task(tmp_path / "t", sums(3))
    (folder / "odds.yaml").write_text((folder / "sums.yaml").read_text().replace("sums", "odds"))
    (folder / "odds.jsonl").write_text('{"question": "bad", "target": ""}\n' * 2)
    (folder / "both.yaml").write_text("group: both\ntask: [sums, odds]\n")
    spec = make_spec(folder, task="both", metrics=("sums/right", "odds/right"), max_errors=2)
    result = evaluate_session(spec, Calculator(), journal)
    assert result.metrics["sums/right"]["value"] == 1.0
    assert result.metrics["odds/right"] == {"value": None, "stderr": None}
    assert [failure.key for failure in result.failures] == [("odds", 0), ("odds", 1)]
    assert result.n_samples == 3


def test_a_broken_run_stops_early(tmp_path: Path, journal: Journal) -> None:
    questions, model = [("bad", "0")] * 60, Calculator()
    with pytest.raises(SampleErrors, match="and 11 more"):
        evaluated(journal, questions, model, max_errors=60)
    assert len(model.batches) < 30
    other = Journal(tmp_path / "other.jsonl")
    with pytest.raises(UserError, match="cannot add this"):
        evaluated(other, questions, Calculator(fail=UserError), max_errors=60)


def test_until_and_generation_settings_reach_the_model(tmp_path: Path, journal: Journal) -> None:
    generation = 'generation_kwargs: {until: ["!"], temperature: 0, do_sample: false}\n'
    folder = write_task(tmp_path / "t", sums(2), generation)
    model = Calculator(tail="! and more")
    assert answers(evaluate_session(make_spec(folder), model, journal)) == {0: "7", 1: "8"}
    assert model.settings == [{"do_sample": False, "max_new_tokens": DEFAULT_NEW_TOKENS}]


def test_settings_precedence_and_cleaning() -> None:
    assert settings(
        {"max_new_tokens": 5, "num_beams": 2}, {"max_new_tokens": 3}, {"num_beams": 1}
    ).generate == {"max_new_tokens": 5, "num_beams": 1, "do_sample": False}
    sampling = settings({"temperature": 0.7, "top_p": 0.9, "image_aspect_ratio": "pad"})
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "do_sample": True}
    assert sampling.generate == {**expected, "max_new_tokens": DEFAULT_NEW_TOKENS}
    assert (settings({"until": "\n"}).until, settings({"until": None}).until) == (("\n",), ())


def test_bad_task_and_metric_names(
    model: Calculator, tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading lmms-eval's own two thousand task files takes seconds; ours are enough here.
    index = TaskManager.initialize_tasks
    monkeypatch.setattr(
        TaskManager,
        "initialize_tasks",
        lambda self, include_path, include_defaults: index(self, include_path, False),
    )
    folder = write_task(tmp_path / "t", sums(2))
    with pytest.raises(UserError, match=r"benchmark.metrics: 'wrong' .*valid: f1, rare, right"):
        evaluate_session(make_spec(folder, metrics=("wrong",)), model, journal)
    with pytest.raises(UserError, match=r"benchmark.task='sumz' .*did you mean sums\?"):
        evaluate_session(make_spec(folder, task="sumz"), model, journal)
    assert model.batches == []


def test_a_metric_that_no_sample_has_is_none(journal: Journal) -> None:
    result = evaluated(journal, sums(2), metrics=("right", "rare"))
    assert result.metrics["rare"] == {"value": None, "stderr": None}


def test_sample_survives_the_journal() -> None:
    record = Calculator().generate({"text": ["1+2"]}, ["sums/0"]).records[0]
    sample = Sample("sums", 0, "3", 9, 2, record)
    assert Sample.from_entry(json.loads(json.dumps(sample.entry()))) == sample


class Killed(Calculator):
    """A calculator that is killed at its fourth batch."""

    def generate(self, inputs: Mapping[str, Any], samples: Sequence[str], **more: Any) -> Any:
        if len(self.batches) == 3:
            raise KeyboardInterrupt
        return super().generate(inputs, samples, **more)


def test_a_run_resumed_after_a_kill_contributes_the_same_to_f1(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", sums(24, wrong=[3, 8, 9, 17]))
    spec = make_spec(folder, metrics=("f1", "right"))
    whole, broken = Journal(tmp_path / "whole.jsonl"), Journal(tmp_path / "broken.jsonl")
    straight = evaluate_session(spec, Calculator(), whole)
    with pytest.raises(KeyboardInterrupt):
        evaluate_session(spec, Killed(), broken)
    assert len(broken.entries()) == 6
    resumed = evaluate_session(spec, Calculator(), broken)
    assert (resumed.resumed, resumed.scores) == (6, straight.scores)
    assert resumed.metrics == straight.metrics
    assert broken.path.read_bytes() == whole.path.read_bytes()
    assert straight.aggregation["f1"] == {
        "how": "influence",
        "samples": 24,
        "units": 24,
        "note": None,
    }
    shares = [scoring.scores["f1"] for scoring in read_scorings(broken.entries()).values()]
    assert np.mean(shares) == pytest.approx(straight.metrics["f1"]["value"])
