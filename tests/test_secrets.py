"""Keys that servers repeat, and keys on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.specs.judge_spec import _read_options
from espalier.harness.specs.secrets import masked, typed, wandb_keys

KEYS = (
    'sk-"quoted\\key/and+more=1234&<x>',
    "0123456789abcdef0123456789abcdef01234567",
    "sk-proj-AAbbCC_dd-EE99",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_masked_and_other_words_stay(key: str) -> None:
    assert masked(f"bad key {key} for you", (None, "", key)) == "bad key *** for you"
    assert masked("key 0123 is wrong", (key,)) == "key 0123 is wrong"
    assert masked("http://me:word@host/v1 of user@host", ()) == "http://***@host/v1 of user@host"


def test_keys_of_wandb_are_those_of_the_environment_and_of_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert wandb_keys() == ()
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n login user\n password {KEYS[1]}\n")
    monkeypatch.setenv("WANDB_API_KEY", KEYS[2])
    assert wandb_keys() == (KEYS[2], KEYS[1])
    (tmp_path / "netrc").write_text("machine what\n is this\n")
    assert wandb_keys() == (KEYS[2],)


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("judge.options={api_key:hunter22}", "hunter22"),
        ("+judge.options.api_key=hunter22", "hunter22"),
        ("log.options={a: 1, API-Key: 'hunter22'}", "hunter22"),
        ("--token=hunter22", "hunter22"),
        ("judge.options={headers: {Authorization: Bearer hunter22}}", "hunter22"),
        ("judge.model=sk-hunter2222", "sk-hunter2222"),
        ("backend.url=http://h/?sig=hunter22", "hunter22"),
        ("backend.url=http://h/?key%3Dhunter22", "hunter22"),
        ("backend.url=http://h/#hunter22", "hunter22"),
        ("backend.url=http:/me:hunter22@h", "hunter22"),
        ("backend.url=me:hunter22@h", "hunter22"),
        ("backend.url=http://me:a/hunter22@h", "hunter22"),
        ("backend.options=[--api-key,hunter22]", "hunter22"),
        ("cluster.options={export:API_KEY=hunter22}", "hunter22"),
    ],
)
def test_keys_on_the_command_line_are_known(argument: str, key: str) -> None:
    assert key not in masked(argument, typed([argument]))


@pytest.mark.parametrize(
    "argument", ["judge.max_tokens=4096", "method=fastv", "benchmark.new_tokens=10000", "seed=1"]
)
def test_other_settings_hold_no_keys(argument: str) -> None:
    assert typed([argument]) == ()


@pytest.mark.parametrize("name", ["api_key", "X-Api-Key", "token", "auth_token"])
def test_a_key_among_the_judge_s_options_is_refused_without_it(name: str) -> None:
    for table in ({name: "hunter22"}, {"extra": {name: "hunter22"}}):
        with pytest.raises(UserError, match="not for options") as error:
            _read_options("judge.options", table)
        assert "hunter22" not in str(error.value)
    assert _read_options("judge.options", {"top_p": 0.5, "max_tokens": 4}) == {
        "top_p": 0.5,
        "max_tokens": 4,
    }
