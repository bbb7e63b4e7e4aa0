"""Where an answer ends: stop strings that a task names, those that lmms-eval fills in, and those that a run forces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.evaluation.evaluate import Evaluation, evaluate_session
from espalier.harness.evaluation.lmms_tasks import load_tasks
from espalier.harness.evaluation.samples import Sample
from espalier.harness.specs.generation import cut, settings
from espalier.harness.store import Journal
from tests.arithmetic import Calculator, make_spec, sums, write_task

BODY = "\n\nbecause so it is"
NAMED = 'generation_kwargs: {until: ["\\n\\n"], temperature: 0}\n'
UNNAMED = "generation_kwargs: {temperature: 0}\n"


def ask(folder: Path, journal: Path, **changes: Any) -> tuple[Evaluation, list[Any]]:
    """Return the evaluation of a model that goes on after a blank line, and the answers in its journal."""
    model, file = Calculator(tail=BODY), Journal(journal)
    result = evaluate_session(make_spec(folder, **changes), model, file)
    return result, [entry for entry in file.entries() if "answer" in entry]


def test_a_blank_line_that_a_task_names_ends_its_answers_and_the_journal_keeps_all(
    tmp_path: Path,
) -> None:
    result, entries = ask(write_task(tmp_path / "t", sums(2), NAMED), tmp_path / "j.jsonl")
    assert [sample.answer for sample in result.samples] == ["7", "8"]
    assert result.metrics["right"]["value"] == 1.0
    assert [entry["raw"] for entry in entries] == [f"7{BODY}", f"8{BODY}"]
    back = Sample.from_entry(entries[0])
    assert back == replace(result.samples[0], record=back.record)
    assert back.raw == f"7{BODY}"


@pytest.mark.parametrize(
    ("generation", "settings", "answer"),
    [
        ("", {}, f"7{BODY}"),
        (UNNAMED, {}, f"7{BODY}"),
        (NAMED, {"until": None}, f"7{BODY}"),
        (NAMED, {"until": []}, f"7{BODY}"),
        (UNNAMED, {"until": ["\n\n"]}, "7"),
        (UNNAMED, {"until": "because"}, "7\n\n"),
    ],
)
def test_an_answer_goes_on_after_a_blank_line_unless_its_task_or_the_run_has_stop_strings(
    tmp_path: Path, generation: str, settings: dict[str, Any], answer: str
) -> None:
    folder = write_task(tmp_path / "t", sums(1), generation)
    result, _ = ask(folder, tmp_path / "j", generation=settings)
    assert result.samples[0].answer == answer


def test_the_benchmark_goes_before_the_model_and_the_model_before_the_task() -> None:
    tables = ({"until": ["a"]}, {"until": ["b"]}, {"until": []})
    assert [settings(*tables[:count]).until for count in (1, 2, 3)] == [("a",), ("b",), ()]


def test_what_is_written_is_told_from_what_is_filled_in_through_includes_groups_and_classes(
    tmp_path: Path,
) -> None:
    folder = write_task(tmp_path / "t", sums(1), UNNAMED)
    (folder / "_named_yaml").write_text((folder / "sums.yaml").read_text().replace(UNNAMED, NAMED))
    (folder / "_middle_yaml").write_text("include: _named_yaml\n")
    (folder / "heir.yaml").write_text("include: _middle_yaml\ntask: heir\n")
    # The heir's own table replaces the one that it includes.
    (folder / "rebel.yaml").write_text(f"include: _middle_yaml\ntask: rebel\n{UNNAMED}")
    (folder / "group.yaml").write_text(f"group: group\ntask: [heir, rebel]\n{UNNAMED}")
    other = 'generation_kwargs: {until: [","]}\n'
    inline = "group: inline\ntask:\n  - task: sums\n    generation_kwargs: {until: ['.']}\n"
    (folder / "inline.yaml").write_text(inline)
    (folder / "family.yaml").write_text(
        f"include: sums.yaml\ntask: family\nmodel_specific_{other.replace('{', '{mine: {')[:-1]}}}\n"
    )
    (folder / "code.py").write_text(
        "from lmms_eval.api.task import ConfigurableMessagesTask\n"
        "class Coded(ConfigurableMessagesTask):\n"
        "    def __init__(self, config):\n"
        "        own = {k: v for k, v in config.items() if k != 'class'}\n"
        "        super().__init__(config=own)\n"
    )
    (folder / "coded.yaml").write_text(
        "include: sums.yaml\ntask: coded\nclass: !function code.Coded\n"
    )

    def until(name: str, template: str | None = None) -> list[Any]:
        tasks = load_tasks(name, folder, template=template).tasks
        return [task.config.generation_kwargs.get("until") for task in tasks]

    names = ("sums", "heir", "rebel", "group", "inline", "family", "coded")
    assert [until(name, "mine" if name == "family" else None) for name in names] == [
        *([None], [["\n\n"]], [None], [None, None], [["."]], [[","]], [None]),
    ]


def test_a_journal_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", sums(2), NAMED)
    _, entries = ask(folder, tmp_path / "new.jsonl")
    old = [{key: value for key, value in entry.items() if key != "raw"} for entry in entries]
    Journal(tmp_path / "old.jsonl").append(*old)
    result, _ = ask(folder, tmp_path / "old.jsonl")
    assert (result.resumed, [sample.answer for sample in result.samples]) == (2, ["7", "8"])
    assert [sample.raw for sample in result.samples] == [None, None]


@pytest.mark.parametrize(
    ("text", "until", "left"),
    [
        ("one\ntwo\nthree", ("\n",), "one"),
        ("one. two\nthree. four", ("\n", ". "), "one"),
        ("one. two\nthree. four", (". ", "\n"), "one"),
        ("\n\nat once", ("\n\n",), ""),
        ("one\ntwo", (), "one\ntwo"),
        ("one", ("\n",), "one"),
    ],
)
def test_an_answer_ends_before_the_first_of_all_stop_strings(
    text: str, until: tuple[str, ...], left: str
) -> None:
    assert cut(text, until) == left


@pytest.mark.parametrize(
    ("generation", "sampled"),
    [
        ({}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.2}, True),
        ({"do_sample": True}, True),
        ({"do_sample": False, "temperature": 0.2}, False),
        ({"do_sample": True, "temperature": 0}, False),
        ({"do_sample": True, "temperature": 0.0, "top_p": 0.5}, False),
    ],
    ids=str,
)
def test_a_temperature_of_zero_is_greedy_whatever_else_is_said(
    generation: dict[str, Any], sampled: bool
) -> None:
    generate = settings(generation).generate
    assert generate["do_sample"] is sampled
    drawing = {"temperature", "top_p", "top_k"}
    assert drawing & set(generate) == (drawing if sampled else set())
