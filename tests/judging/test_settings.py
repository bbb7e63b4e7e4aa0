"""Settings of a judge, words of a prompt and numbers of a verdict: what is taken, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import UserError
from espalier.harness.evaluation.judging.judge_prompt import JudgePrompt, read_prompt
from espalier.harness.evaluation.judging.judge_scores import pair, single
from espalier.harness.paths import ROOT
from espalier.harness.settings import read_section
from espalier.harness.specs.judge_spec import JudgeSpec
from tests import commands


def usual() -> dict[str, Any]:
    return dict(commands.cells_of()[0]["judge"])


USUAL = usual()


def read_judge(section: dict[str, Any]) -> JudgeSpec:
    return read_section(JudgeSpec, "judge", section)


def test_the_config_says_what_a_judge_is_without_it() -> None:
    assert read_judge(USUAL) == JudgeSpec()


def test_every_setting_arrives() -> None:
    judge_settings = {
        "base_url": "https://host:8000/v1/",
        "model": "m",
        "key_env": "MY_KEY",
        "prompt": "tests/judging/words.yaml",
        "temperature": None,
        "seed": None,
        "max_tokens": None,
        "options": {"top_p": 1},
        "timeout": 3,
        "retries": 0,
        "concurrency": 2,
    }
    assert set(judge_settings) == set(USUAL)
    prompt = ROOT / "tests/judging/words.yaml"
    assert read_judge(judge_settings) == JudgeSpec(
        *("https://host:8000/v1", "m", "MY_KEY", prompt, None, None, None),
        options={"top_p": 1},
        timeout=3.0,
        retries=0,
        concurrency=2,
    )


BAD = [
    ("base_url", "localhost:8000", "must be the address of a server up to /v1"),
    ("base_url", "ftp://host/v1", "must be the address of a server up to /v1"),
    ("base_url", "http:///v1", "must be the address of a server up to /v1"),
    ("base_url", "http://host:many/v1", "must be the address of a server up to /v1"),
    ("base_url", "http://host/v1/chat/completions", "without /chat/completions"),
    ("base_url", "http://me:pw@host/v1", "holds more than an address"),
    ("base_url", "http://pw@host/v1", "holds more than an address"),
    ("base_url", "http://host/v1?key=pw", "holds more than an address"),
    ("model", "", "judge.model='' must be a non-empty string"),
    ("key_env", "sk-pw", "must be the name of an environment variable"),
    ("key_env", None, "must be the name of an environment variable"),
    ("temperature", -1, "judge.temperature=-1 must be a number of at least 0"),
    ("temperature", False, "judge.temperature=False must be a number of at least 0"),
    ("seed", -1, "judge.seed=-1 must be an integer of at least 0, or null"),
    ("max_tokens", 0, "judge.max_tokens=0 must be an integer of at least 1, or null"),
    ("options", {"API_key": "pw"}, "judge.options.API_key is not for options"),
    ("options", [1], "judge.options=[1] must be a table"),
    ("timeout", 0, "judge.timeout=0 must be a number above 0"),
    ("retries", -1, "judge.retries=-1 must be an integer of at least 0"),
    ("concurrency", 0, "judge.concurrency=0 must be an integer of at least 1"),
]


@pytest.mark.parametrize(("name", "value", "problem"), BAD)
def test_a_bad_setting_is_one_line_without_secrets(name: str, value: Any, problem: str) -> None:
    with pytest.raises(UserError) as error:
        read_judge({**USUAL, name: value})
    assert problem in str(error.value)
    assert f"judge.{name}" in str(error.value)
    assert "pw" not in str(error.value)


def test_words_keep_braces_that_are_no_places() -> None:
    words = read_prompt(ROOT / "tests/judging/words.yaml")
    assert words.name == "mine"
    assert words.messages({"answer": "{reference}", "reference": "R"}) == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "Is {reference} as good as R? Reply as {'score': 4}."},
    ]
    (message,) = JudgePrompt("a", "{answer} or {other}").messages({"answer": "x"})
    assert message["content"] == "x or {other}"


def test_a_digest_of_words_changes_with_what_is_said_alone() -> None:
    words = JudgePrompt("a", "{answer}", "s")
    assert words.digest == JudgePrompt("b", "{answer}", "s").digest
    others = (
        JudgePrompt("a", "{answer}."),
        JudgePrompt("a", "{answer}"),
        JudgePrompt("a", "{answer}", "t"),
    )
    assert len({words.digest, *(prompt.digest for prompt in others)}) == 4


def test_words_without_a_name_have_the_files(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("user: 'Rate {answer}.'\n")
    assert read_prompt(tmp_path / "mine.yaml") == JudgePrompt("mine", "Rate {answer}.")


FILES = {
    "- a list": "must be a YAML table",
    "user: [": "cannot be read",
    "user: Rate it.": "has no place for the answer; valid: a text with {answer}",
    "system: x": ".user=None must be a non-empty string",
    "user: '{answer}'\nsystem: 3": ".system=3 must be a non-empty string",
    "user: '{answer}'\nrubric: x": "='rubric' is unknown",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_of_no_words_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "words.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        read_prompt(tmp_path / "words.yaml")
    assert FILES[text] in str(error.value)
    assert str(error.value).startswith("judge.prompt=")


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.yaml' cannot be read"):
        read_prompt(tmp_path / "nowhere.yaml")


MARK, RATING = (
    partial(single, lowest=0, highest=3, integral=True),
    partial(single, lowest=0, highest=5),
)
RATINGS = partial(pair, lowest=0, highest=10)

#: Verdicts: how they are read, text, value. A mark is the only number, a rating may be a fraction, and two ratings are
#: the two numbers of the first line.
VERDICTS: list[tuple[Callable[[str], Any], str, Any]] = [
    *((MARK, text, 2) for text in ("2", "{'score': 2}", "<think>0, no, 1?\n</think>\n2", "2.0")),
    *((MARK, text, mark) for text, mark in ((" 0\n", 0), ("Score: 3.", 3), ("**1**", 1))),
    *((MARK, text, None) for text in ("", "none", "4", "-1", "1.5", "2/3", "1 or 2")),
    *((MARK, text, None) for text in ("2nd", "v2", "2026-01-02")),
    (RATING, "{'score': 4.8}", 4.8),
    (RATING, "5.1", None),
    *((RATINGS, text, (8, 9)) for text in ("8 9\nBecause 3 is odd.", "\n\n 8, 9 \n")),
    *((RATINGS, text, (8, 9)) for text in ("<think>3\n4</think>8 9",)),
    (RATINGS, "7.5; 10", (7.5, 10)),
    (RATINGS, "Answer one gets 8, the other 9.", (8, 9)),
    *((RATINGS, text, None) for text in ("Here are my ratings.\n8 9", "8", "8 9 10", "8 11")),
    *((RATINGS, text, None) for text in ("-1 -1", "", "\n")),
]


@pytest.mark.parametrize(("read", "text", "value"), VERDICTS)
def test_a_verdict_is_read(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value
