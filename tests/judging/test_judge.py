"""Questions to a real server on this machine: what it says well, what it says badly, and what is kept of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import JudgeLost, StoreLost, UserError
from espalier.harness.evaluation.judging.client import QUOTED, read_key
from espalier.harness.evaluation.judging.judge import HOPELESS, collect_verdicts
from espalier.harness.evaluation.judging.judge_prompt import (
    JudgePrompt,
    JudgeQuestion,
    JudgeResults,
)
from espalier.harness.evaluation.judging.judge_scores import single
from espalier.harness.evaluation.judging.verdicts import VerdictStore
from espalier.harness.specs.judge_spec import JudgeSpec
from tests.benchmarks.judge_server import Answer, JudgeServer, completion, error

WORDS = JudgePrompt("mine", "Q: {question} A: {answer}", "Be fair.")
KEY = "sk-very-secret-0123456789"


def question(number: int, answer: str = "yes") -> JudgeQuestion:
    parts = {"question": f"number {number}?", "answer": answer}
    return JudgeQuestion(("t", number), WORDS, parts, lambda text: single(text, 0, 3) is not None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    with JudgeServer(judge=lambda messages: "2", key=KEY) as judge:
        yield judge


def ask(
    server: JudgeServer, store: Path, *questions: JudgeQuestion, **changes: Any
) -> JudgeResults:
    settings: dict[str, Any] = {
        "base_url": server.base_url,
        "model": "referee",
        "key_env": "TEST_JUDGE_KEY",
        "timeout": 60.0,
        "retries": 2,
    }
    return collect_verdicts(
        JudgeSpec(**settings | changes), store, questions or [question(0)], pause=0.01
    )


def assert_without_key(store: Path, *texts: str) -> None:
    for path in store.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path
    assert all(KEY not in text for text in texts)


def test_a_question_reaches_the_judge_whole_and_its_verdict_comes_back(
    server: JudgeServer, tmp_path: Path
) -> None:
    results = ask(server, tmp_path, question(7, "{question} \ud800"), seed=3, options={"top_p": 1})
    assert (results.verdicts, results.served) == ({("t", 7): "2"}, {"referee-2026-01-01"})
    assert (results.cached, results.failed, results.unjudged) == (0, 0, {})
    assert server.requests == [
        {
            "model": "referee",
            "messages": [
                {"role": "system", "content": "Be fair."},
                {"role": "user", "content": "Q: number 7? A: {question} \ud800"},
            ],
            "temperature": 0.0,
            "seed": 3,
            "max_tokens": 1024,
            "top_p": 1,
        }
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert_without_key(tmp_path)


def test_a_setting_of_null_is_left_out_of_the_request(server: JudgeServer, tmp_path: Path) -> None:
    options = {"max_completion_tokens": 9}
    ask(server, tmp_path, temperature=None, seed=None, max_tokens=None, options=options)
    assert set(server.requests[0]) == {"model", "messages", "max_completion_tokens"}


def test_what_is_known_is_not_asked_again_wherever_the_judge_is(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(server, tmp_path, *map(question, range(3)))
    assert len(server.requests) == 3
    again = ask(server, tmp_path, *map(question, range(4)))
    assert (len(server.requests), again.cached, len(again.verdicts)) == (4, 3, 4)
    with JudgeServer(judge=lambda messages: "3") as other:
        same = ask(other, tmp_path, *map(question, range(4)))
        assert (other.requests, same.cached, set(same.verdicts.values())) == ([], 4, {"2"})
        # Another model, setting, word or name of the words is another question.
        ask(other, tmp_path, question(0), seed=1)
        ask(other, tmp_path, question(0), options={"top_p": 0.5})
        renamed = JudgeQuestion(
            ("t", 0), JudgePrompt("other", WORDS.user, WORDS.system), question(0).parts, bool
        )
        ask(other, tmp_path, renamed)
        ask(other, tmp_path, question(0, "no"))
        assert len(other.requests) == 4


def test_equal_questions_are_one_request(server: JudgeServer, tmp_path: Path) -> None:
    same = [JudgeQuestion(("t", n), WORDS, question(0).parts, question(0).holds) for n in range(5)]
    results = ask(server, tmp_path, *same)
    assert (len(server.requests), results.verdicts) == (1, {("t", n): "2" for n in range(5)})


def test_no_more_are_under_way_than_allowed(server: JudgeServer, tmp_path: Path) -> None:
    three = threading.Barrier(3, timeout=60)
    server.judge = lambda messages: "2" if three.wait() is not None else ""
    ask(server, tmp_path, *map(question, range(9)), concurrency=3)
    assert server.most == 3


HTML = Answer(200, b"<html>a proxy says hello</html>")
PASSING = {
    "500": error(500, "out of memory"),
    "502 in HTML": Answer(502, b"<html>bad gateway</html>"),
    "429": error(429, "slow down"),
    "a hung-up connection": Answer(hang_up=True),
    "no JSON": HTML,
    "half of a JSON": Answer(200, b'{"choices": [{"mess'),
    "no choices": Answer(200, b'{"choices": []}'),
    "no object": Answer(200, b"[1, 2]"),
    "no message": Answer(200, b'{"choices": [{"text": "2"}]}'),
    "a number for a text": Answer(200, b'{"choices": [{"message": {"content": 2}}]}'),
    "no bytes": Answer(200, b""),
    "no text": Answer(200, json.dumps(completion(None, "m")).encode()),
    "no score": Answer(text="I would rather not say."),
    "a score out of range": Answer(text="7"),
    "two scores": Answer(text="2 or 3"),
    "broken UTF-8": Answer(200, b'{"choices": [{"message": {"content": "\xff"}}]}'),
    "another encoding": Answer(200, b"\x00\x01", headers=(("Content-Encoding", "gzip"),)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_asked_again(name: str, server: JudgeServer, tmp_path: Path) -> None:
    server.next(PASSING[name], PASSING[name])
    results = ask(server, tmp_path)
    assert (results.verdicts, results.failed) == ({("t", 0): "2"}, 2)
    assert len(server.requests) == 3


@pytest.mark.slow
def test_retry_after_is_kept_to_by_all_requests(server: JudgeServer, tmp_path: Path) -> None:
    server.next(error(429, "slow down", Retry_After="1"))
    start = time.monotonic()
    ask(server, tmp_path, *map(question, range(4)), concurrency=1)
    assert time.monotonic() - start >= 1


def test_more_patience_than_a_request_gets_is_no_waiting(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.next(error(429, "quota exceeded", Retry_After="86400"))
    with pytest.raises(JudgeLost, match=r"quota exceeded; it asks for 86400 s .* judge.timeout=60"):
        ask(server, tmp_path)
    assert len(server.requests) == 1


LASTING = {
    "500": (error(500, "out of memory"), r"HTTP 500: out of memory"),
    "429": (error(429, "slow down"), r"HTTP 429: slow down"),
    "no JSON": (HTML, r"no chat completion: '<html>a proxy says hello</html>'"),
    "silence": (Answer(delay=60), r"no whole answer within 2 s \(judge.timeout\)"),
    "a trickle": (Answer(drip=0.1), r"no whole answer within 2 s \(judge.timeout\)"),
    "hung up": (Answer(hang_up=True), r"RemoteProtocolError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LASTING)
def test_what_lasts_ends_the_asking_and_keeps_what_was_said(
    name: str, server: JudgeServer, tmp_path: Path
) -> None:
    trouble, reason = LASTING[name]
    questions = [question(number) for number in range(4)]
    server.next(Answer(), *[trouble] * 3)
    with pytest.raises(JudgeLost, match=reason) as lost:
        ask(server, tmp_path, *questions, concurrency=1, timeout=2.0)
    line = str(lost.value)
    assert "3 of 4 answers are not judged" in line
    assert "the same command goes on from them" in line
    assert "\n" not in line
    assert len(server.requests) == 4
    # The same command, once the server is well again, asks for the rest alone.
    results = ask(server, tmp_path, *questions)
    assert (results.cached, len(results.verdicts), len(server.requests)) == (1, 4, 7)


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    spec = JudgeSpec(address, "referee", retries=1)
    with pytest.raises(JudgeLost, match=r"ConnectError.*1 of 1 answers"):
        collect_verdicts(spec, tmp_path, [question(0)], pause=0.01)


def test_a_name_that_the_server_lacks_is_not_asked_again(
    server: JudgeServer, tmp_path: Path
) -> None:
    with pytest.raises(JudgeLost, match=r"HTTP 404: The model `somebody` does not exist"):
        ask(server, tmp_path, model="somebody")
    with pytest.raises(JudgeLost, match=r"HTTP 404: no such path.*a judge.base_url up to /v1"):
        ask(server, tmp_path, base_url=server.base_url + "/v1")
    assert len(server.requests) == 2


@pytest.mark.parametrize("key", [None, KEY + "-old"])
def test_a_wrong_key_or_none_is_told_without_it(
    key: str | None, server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is None:
        monkeypatch.delenv("TEST_JUDGE_KEY")
    else:
        monkeypatch.setenv("TEST_JUDGE_KEY", key)
    with pytest.raises(JudgeLost, match=r"HTTP 401: .*variable TEST_JUDGE_KEY") as lost:
        ask(server, tmp_path)
    assert len(server.requests) == 1
    assert_without_key(tmp_path, str(lost.value), repr(lost.value))
    assert ("Authorization" in server.headers[0]) == (key is not None)


def test_a_judge_that_repeats_the_key_does_not_get_it_kept(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.judge = lambda messages: f"2, dear owner of {KEY}"
    server.next(Answer(200, f"oops {KEY}".encode()))
    results = ask(server, tmp_path)
    assert results.verdicts == {("t", 0): "2, dear owner of ***"}
    server.next(*[Answer(200, f"oops {KEY}".encode())] * 3)
    with pytest.raises(JudgeLost) as lost:
        ask(server, tmp_path, question(1))
    assert_without_key(tmp_path, str(lost.value), str(results))
    # Also not the beginning of the key, where the line is cut.
    server.next(*[Answer(200, ("x" * (QUOTED - 5) + KEY).encode())] * 3)
    with pytest.raises(JudgeLost) as lost:
        ask(server, tmp_path, question(1))
    assert f"x{KEY[:3]}" not in str(lost.value)


def test_one_question_without_a_verdict_is_no_trouble_of_the_others(
    server: JudgeServer, tmp_path: Path
) -> None:
    def judge(messages: Any) -> str:
        return "well" if "number 1?" in messages[-1]["content"] else "3"

    server.judge = judge
    results = ask(server, tmp_path, *map(question, range(4)))
    assert sorted(results.verdicts) == [("t", 0), ("t", 2), ("t", 3)]
    assert results.unjudged == {("t", 1): "no score in 3 answers of the judge, the last: 'well'"}
    assert len(server.requests) == 6
    assert (ask(server, tmp_path, *map(question, range(4))).cached, len(server.requests)) == (3, 9)


def test_a_question_that_the_server_refuses_is_not_repeated(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.next(Answer(), error(400, "the prompt is too long"))
    results = ask(server, tmp_path, *map(question, range(3)), concurrency=1)
    assert results.unjudged == {("t", 1): "HTTP 400: the prompt is too long"}
    assert len(server.requests) == 3


def test_a_stored_verdict_without_a_score_is_requested_again(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.judge = lambda messages: "well"
    words = replace(question(0), holds=lambda text: True)
    assert ask(server, tmp_path, words).verdicts == {("t", 0): "well"}
    server.judge = lambda messages: "3"
    results = ask(server, tmp_path)
    assert (results.cached, results.verdicts) == (0, {("t", 0): "3"})


def test_many_refusals_after_a_verdict_are_those_of_their_questions(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.next(Answer(), *[error(400, "the prompt is too long")] * (HOPELESS + 4))
    results = ask(server, tmp_path, *map(question, range(HOPELESS + 5)), concurrency=1)
    assert (len(results.verdicts), len(results.unjudged)) == (1, HOPELESS + 4)


def test_a_server_that_refuses_everything_is_left_alone(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.next(*[error(400, "unknown field: seed")] * 100)
    with pytest.raises(JudgeLost, match="unknown field: seed"):
        ask(server, tmp_path, *map(question, range(100)), concurrency=4)
    assert HOPELESS <= len(server.requests) < HOPELESS + 4


def test_a_cut_answer_says_what_cut_it(server: JudgeServer, tmp_path: Path) -> None:
    cut = Answer(200, json.dumps(completion("Let me think", "m", "length")).encode())
    server.next(cut, cut, cut)
    (reason,) = ask(server, tmp_path).unjudged.values()
    assert "cut at judge.max_tokens" in reason


DAMAGE = {
    "empty": b"",
    "torn": b'{"key": "',
    "another's": b'{"key": "x", "verdict": {"text": "3"}}',
    "no table": b"[]",
    "no text": b'{"key": "x", "verdict": {"text": 3}}',
    "unknown fields": b'{"key": "x", "verdict": {"text": "3", "more": 1}}',
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_verdict_is_asked_for_again(
    name: str, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(server, tmp_path)
    (file,) = tmp_path.glob("judge/*/*.json")
    good = file.read_bytes()
    file.write_bytes(DAMAGE[name])
    assert (ask(server, tmp_path).verdicts, len(server.requests)) == ({("t", 0): "2"}, 2)
    assert file.read_bytes() == good
    assert f"judge: {file} is damaged and does not count" in capsys.readouterr().err


def test_the_first_verdict_counts(tmp_path: Path) -> None:
    from espalier.harness.evaluation.judging.verdicts import StoredVerdict

    store = VerdictStore(tmp_path)
    assert store.put("ab", {}, StoredVerdict("2")) == StoredVerdict("2")
    assert store.put("ab", {}, StoredVerdict("3")) == StoredVerdict("2")
    assert store.put("ab", {}, StoredVerdict("3"), lambda text: text == "3") == StoredVerdict("3")
    assert (store.get("ab"), store.get("cd")) == (StoredVerdict("3"), None)


def test_a_store_that_takes_nothing_ends_it(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "judge").write_text("a file in its place")
    with pytest.raises(StoreLost, match="the same command goes on"):
        ask(server, tmp_path)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_what_can_be_no_key_is_refused_without_showing_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_JUDGE_KEY", key)
    with pytest.raises(UserError, match="TEST_JUDGE_KEY: the variable holds no key") as error:
        read_key("TEST_JUDGE_KEY")
    assert key not in str(error.value)
