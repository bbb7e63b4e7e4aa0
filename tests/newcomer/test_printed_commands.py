"""Every command line that the pages print: runs compose, commands and their options are there, files exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from espalier.__main__ import COMMANDS, main
from espalier.harness.config.compose import read_command
from espalier.harness.paths import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
BLOCK = re.compile(r"^```(?:bash|sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)

METHOD = """
from dataclasses import dataclass

from espalier.methods.uniform import Uniform


@dataclass(frozen=True)
class MyMethod(Uniform):
    K: int = 3
"""
COMPRESSOR = """
from espalier.methods.uniform_kv import UniformKV


class MyCompressor(UniformKV):
    pass
"""


def printed() -> Iterator[str]:
    """Yield the command lines of all pages, without comments, prompts and folded ends."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.partition("  #")[0].strip().removeprefix("$ ")
                if re.match(r"(python(?! -m vllm)|espalier|torchrun)\b", text):
                    yield text


LINES = sorted(set(printed()))
RUNS = [line for line in LINES if re.match(r"\S.* run\.py |espalier run ", line)]
CALLS = [line for line in LINES if line not in RUNS]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the lines name."""
    (tmp_path / "mine.py").write_text(METHOD)
    (tmp_path / "evict.py").write_text(COMPRESSOR)
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "__init__.py").touch()
    (tmp_path / "mylab" / "spread.py").write_text(METHOD)
    conf = {
        "method/spread.yaml": "name: spread\ncode: ../../mine.py:MyMethod\nparams: {K: 3}\n",
        "benchmark/mine.yaml": "defaults: [seedling_rec, _self_]\nname: mine\n",
        "experiment/mine.yaml": "# @package _global_\nratio: 0.5\n",
    }
    (tmp_path / "mylab" / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "mylab" / "conf" / "experiment" / "other.yaml").write_text("ratio: 0.5\n")
    for name, text in conf.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for table in ("my.csv", "charts.csv"):
        (tmp_path / table).write_text("image,question,answer\na.png,what ?,this\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", RUNS)
def test_a_printed_run_composes(line: str) -> None:
    line = line.replace("<hub id or folder>", "llava-hf/llava-1.5-7b-hf").replace("...", "")
    words = shlex.split(line)
    arguments = words[words.index("run" if words[0] == "espalier" else "run.py") + 1 :]
    flags = {"--dry", "--rehearse"}
    arguments = [word for word in arguments if word not in flags and not word.startswith("cards=")]
    assert read_command(arguments, typed=True).cells


@pytest.mark.slow
@pytest.mark.parametrize("line", CALLS)
def test_a_printed_call_is_of_a_command_with_such_options(
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = shlex.split(line)
    if words[:2] == ["python", "-c"]:
        monkeypatch.chdir(tmp_path)
        exec(words[2], {})
        return
    if words[:2] == ["python", "-m"] and words[2] != "espalier":
        assert callable(import_module(words[2]).main)
        return
    arguments = words[3:] if words[0] == "python" else words[1:]
    if arguments[0].startswith("--"):
        assert main(arguments) == 0
        return
    assert arguments[0] in COMMANDS
    places = [word for word in arguments[1:2] if re.fullmatch(r"[a-z]+", word)]
    with suppress(SystemExit):
        main([arguments[0], *places, "--help"])
    text = capsys.readouterr().out
    assert "usage" in text.lower()
    for option in re.findall(r"(?<!\S)--[a-z-]+", line):
        assert option in text
