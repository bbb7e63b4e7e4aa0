"""The question of a sample: a task's prompt settings changed (`benchmark.prompt`), or its text replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import UserError
from espalier.harness.evaluation.evaluate import Evaluation, evaluate_session, open_benchmark
from espalier.harness.evaluation.prompt_text import with_question
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Journal
from tests.arithmetic import Calculator, make_spec, sums, write_task

SETTINGS = """
lmms_eval_specific_kwargs:
  default: {more: "", less: ""}
  other_model: {more: "+1000"}
"""


def task(folder: Path, settings: str = SETTINGS) -> Path:
    """Sums to which a prompt setting adds."""
    write_task(folder, sums(3), settings)
    utils = folder / "utils.py"
    more = 'return doc["question"] + (lmms_eval_specific_kwargs or {}).get("more", "")'
    utils.write_text(utils.read_text().replace('return doc["question"]', more))
    return folder


def spec_of(folder: Path, **changes: Any) -> RunSpec:
    spec = make_spec(folder)
    return replace(spec, benchmark=replace(spec.benchmark, **changes))


def answers(folder: Path, **changes: Any) -> tuple[list[str], Evaluation]:
    result = evaluate_session(
        spec_of(folder, **changes), Calculator(), Journal(folder.parent / "journal")
    )
    return [sample.answer for sample in result.samples], result


@pytest.mark.parametrize(
    ("changes", "expected", "rendered"),
    [
        ({}, ["7", "8", "9"], "0+7"),
        ({"prompt": {"more": "+100"}}, ["107", "108", "109"], "0+7+100"),
        ({"text": "{{ question }}+{{ target }}"}, ["14", "16", "18"], "0+7+7"),
        ({"text": "2+2"}, ["4", "4", "4"], "2+2"),
    ],
)
def test_a_question_follows_the_settings_of_the_task_or_a_text_over_its_columns(
    tmp_path: Path, changes: dict[str, Any], expected: list[str], rendered: str
) -> None:
    texts, result = answers(task(tmp_path / "t"), **changes)
    assert (texts, result.prompt["rendered"]) == (expected, rendered)


@pytest.mark.parametrize(
    ("settings", "prompt", "line"),
    [
        (
            SETTINGS,
            {"mroe": 1},
            r"benchmark\.prompt\.mroe .*did you mean benchmark\.prompt\.more\?.*less",
        ),
        # Other families' tables are no settings.
        (SETTINGS, {"other_model": {}}, r"benchmark\.prompt\.other_model is not.*valid: "),
        (
            "",
            {"ocr": True},
            r"benchmark\.prompt\.ocr: task sums has no prompt settings; valid: benchmark\.text",
        ),
    ],
)
def test_unknown_prompt_settings_are_refused_with_the_tasks_own(
    tmp_path: Path, settings: str, prompt: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        open_benchmark(spec_of(task(tmp_path / "t", settings), prompt=prompt))


def test_a_column_that_is_not_there_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"benchmark\.text: data set json, split test, row 0: no column 'hint'; valid: .*question",
    ):
        open_benchmark(spec_of(task(tmp_path / "t"), text="{{ hint }}{{ question }}"))


def test_a_later_sample_that_does_not_fit_is_named(tmp_path: Path) -> None:
    text = "{% if question == '2+7' %}{{ hint }}{% endif %}{{ question }}"
    with pytest.raises(Exception, match=r"split test, row 2: no column 'hint'"):
        answers(task(tmp_path / "t"), text=text)


def test_pictures_stay_before_the_text_and_other_turns_as_they_are() -> None:
    image, video = {"type": "image", "url": "a"}, {"type": "video", "url": "b"}
    words = {"type": "text", "text": "old"}
    chat = [
        {"role": "system", "content": [words]},
        {"role": "user", "content": [words, image, words, video]},
    ]
    assert with_question(chat, "new") == [
        {"role": "system", "content": [words]},
        {"role": "user", "content": [image, video, {"type": "text", "text": "new"}]},
    ]
