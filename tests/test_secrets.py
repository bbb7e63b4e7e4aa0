"""Keys in the letters in which servers repeat them, and on the command line."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from espalier.harness.errors import UserError
from espalier.harness.specs.judge_spec import _read_options
from espalier.harness.specs.secrets import masked, scrub, typed, wandb_keys

KEYS = (
    'sk-"quoted\\key/and+more=1234&<x>',
    "0123456789abcdef0123456789abcdef01234567",
    "sk-proj-AAbbCC_dd-EE99",
)

FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "JSON": json.dumps,
    "JSON in JSON": lambda key: json.dumps(json.dumps(key)),
    "JSON with slashes escaped": lambda key: json.dumps(key).replace("/", "\\/"),
    "numbers of letters": lambda key: "".join(f"\\u{ord(letter):04x}" for letter in key),
    "numbers of bytes": lambda key: "".join(f"\\x{ord(letter):02X}" for letter in key),
    "URL": lambda key: quote(key, safe=""),
    "form": quote_plus,
    "URL twice": lambda key: quote(quote(key, safe=""), safe=""),
    "URL, every letter": lambda key: "".join(f"%{ord(letter):02x}" for letter in key),
    "HTML": html.escape,
    "HTML numbers": lambda key: "".join(f"&#{ord(letter)};" for letter in key),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 behind a name": lambda key: base64.b64encode(f"api:{key}".encode()).decode(),
    "base64 inside": lambda key: base64.b64encode(f"Bearer {key}, and".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"ab{key}".encode()).decode(),
    "hexadecimal": lambda key: key.encode().hex(),
    "HEXADECIMAL": lambda key: key.encode().hex().upper(),
    "Python": repr,
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_key_is_masked_in_every_form(form: str, key: str) -> None:
    written = FORMS[form](key)
    line = masked(f"bad key {written} for you", (None, "", key))
    assert line.startswith("bad key ")
    assert line.endswith(" for you")
    assert "***" in line
    assert written not in line
    assert key not in line


def test_pieces_of_a_key_are_masked_and_other_words_stay() -> None:
    (key, *_) = KEYS[1:]
    assert masked(f"key {key[:12]}... is wrong", (key,)) == "key ***... is wrong"
    assert masked(f"key ...{key[-9:]}", (key,)) == "key ...***"
    assert masked("key 0123 is wrong", (key,)) == "key 0123 is wrong"
    assert masked("http://me:word@host/v1 of user@host", ()) == "http://***@host/v1 of user@host"


def test_files_are_scrubbed_in_place(tmp_path: Path) -> None:
    log = tmp_path / "debug.log"
    log.write_bytes(b"\xff said " + KEYS[1].encode() + b"\n")
    scrub([log, tmp_path / "missing.log"], [KEYS[1]])
    assert log.read_bytes() == b"\xff said ***\n"


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
