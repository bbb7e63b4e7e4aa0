"""Files and names that others wrote: whatever they hold, reading them ends in a value or in one line."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import run
from espalier.harness.api.questions import opened_picture
from espalier.harness.cli.convert import main as convert
from espalier.harness.config.catalogue import own_choices
from espalier.harness.config.checkpoint_names import model_choice
from espalier.harness.config.compose import read_command
from espalier.harness.config.group_table import listing
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import FOREIGN, UserError, steers
from espalier.harness.evaluation.judging.judge_prompt import read_prompt
from espalier.harness.paths import ROOT, located
from espalier.harness.runs.cluster.job_file import JobFile
from espalier.harness.runs.run_key import code_files
from espalier.harness.runs.wandb_log import MirrorMark
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.hub_cache import file_of_hub, other_format
from espalier.harness.specs.plugins import installed
from espalier.harness.specs.records.own_data import read_records
from espalier.harness.specs.records.record import RecordSettings
from espalier.harness.store import RunDir
from espalier.harness.store.sweep_files import find
from espalier.harness.tools.convert.convert_internvl import read_prompt as read_chat_format
from espalier.harness.tools.convert.sentencepiece_tokens import read_pieces
from espalier.methods.blame import Blame
from espalier.methods.checks import PlanError
from tests.plugins.packages import config, imported_from, install
from tests.refused import refused

#: Calls that read or parse.
READING = frozenset(
    (
        *("read_bytes", "read_text", "read_json", "read_yaml", "loads", "load", "safe_load"),
        *("parse", "literal_eval", "fromstring", "ParseFromString", "safe_open", "b64decode"),
        *("try_to_load_from_cache", "urlopen", "open"),
    )
)
#: Calls of `open` that give a descriptor.
DESCRIPTORS = ("os.open",)


def _tries(tree: ast.AST) -> Iterator[tuple[ast.Try, set[str]]]:
    """Yield each `try` that reads, with the names of the exceptions that it catches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            body = ast.Module(node.body, [])
            calls = {
                ast.unparse(call.func) for call in ast.walk(body) if isinstance(call, ast.Call)
            }
            reads = {call.rpartition(".")[2] for call in calls if call not in DESCRIPTORS}
            if reads & READING:
                parts = (
                    part
                    for handler in node.handlers
                    if handler.type
                    for part in ast.walk(handler.type)
                )
                yield node, {part.id for part in parts if isinstance(part, ast.Name)}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("folder", ["harness", "tasks"])
def test_what_reads_catches_every_error_of_reading(folder: str) -> None:
    """A list of exceptions around reading is FOREIGN, or one that includes it: lists by hand name some."""
    builtin = {kind.__name__ for kind in FOREIGN if hasattr(builtins, kind.__name__)}
    wide = {"FOREIGN", "BROKEN", "DAMAGED", "MALFORMED", "Exception", "BaseException"}
    lists = [
        f"{path}:{node.lineno} catches {', '.join(sorted(names))}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node, names in _tries(ast.parse(path.read_bytes()))
        if names & builtin and not names & wide
    ]
    assert lists == []


def holds(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "absent": lambda path: None,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "empty": holds(b""),
    "NUL": holds(bytes(64)),
    "no UTF-8": holds(b"\xff\xfe\x80 a: \xe9"),
    "control": holds(b"a: \x07\n"),
    "deep list": holds(b"[" * 100_000),
    "deep": holds(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "long number": holds(b"9" * 5000),
    "number": holds(b"1e999"),
    "text": holds(b'"text"'),
    "list": holds(b"[1, null]"),
    "table": holds(b'{"model_type": 5, "cells": 7, "version": 1}'),
    "python": holds(b"x = (\n"),
}

#: What reads a file of another program or of a user.
BORDERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config file": ("x.yaml", read_yaml),
    "judge's prompt": ("prompt.yaml", read_prompt),
    "own data": ("data.json", lambda path: read_records(path, RecordSettings())),
    "own lines": ("data.jsonl", lambda path: read_records(path, RecordSettings())),
    "own table": ("data.csv", lambda path: read_records(path, RecordSettings())),
    "own columns": ("data.parquet", lambda path: read_records(path, RecordSettings())),
    "checkpoint": ("config.json", lambda path: model_choice(str(path.parent))),
    "row": ("row.json", lambda path: RunDir(path.parent).row()),
    "journal": ("journal.jsonl", lambda path: RunDir(path.parent).journal.entries()),
    "mark": ("wandb/mirrored/k.json", lambda path: MirrorMark.of(path.parents[2], "k").read()),
    "marks": ("wandb", lambda path: MirrorMark.of(path.parent, "k").read()),
    "sweep": ("sweeps/s.json", lambda path: find(path.parents[1], "s")),
    "job": ("job-001.json", lambda path: JobFile(path).entries()),
    "job's end": ("job-001.end.json", lambda path: JobFile(path.with_name("job-001.json")).ended()),
    "method": ("mine.py", lambda path: build_method("Mine", {}, f"{path}:Mine")),
    "code": ("code.py", lambda path: code_files([path]) if path.is_file() else None),
    "chat format": ("conversation.py", lambda path: read_chat_format(path, "internlm2-chat")),
    "pieces": ("tokenizer.model", read_pieces),
    "picture": ("a.png", lambda path: opened_picture(str(path), "black")),
    "format": ("adapter_config.json", lambda path: other_format(path.parent)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("border", BORDERS)
def test_a_damaged_file_is_a_value_or_a_line(border: str, damage: str, tmp_path: Path) -> None:
    name, read = BORDERS[border]
    path = tmp_path / "folder" / name
    path.parent.mkdir(parents=True)
    DAMAGES[damage](path)
    line = ""
    try:
        read(path)
    except UserError as error:
        line = str(error)
    assert "\n" not in line
    assert len(line) < 2000


LONG = "x" * 5000


@pytest.mark.parametrize(
    "name", ["a/..", "a/b.git", "ü/b", f"{'l' * 97}/b", "a/b--c", LONG, "a/" + LONG]
)
def test_a_name_that_the_hub_refuses_is_a_line(name: str) -> None:
    assert file_of_hub(name, "config.json", None) is None
    if "/" in name:
        assert "hub id" in refused(model_choice, name)


@pytest.mark.parametrize("path", [f"/{LONG}", f"/{'a/' * 2500}", "/a\0b", f"pkg://espalier/{LONG}"])
def test_a_path_that_no_file_system_takes_is_a_line(path: str) -> None:
    with pytest.raises(UserError, match="is no path of a file system") as caught:
        located(path)
    assert len(str(caught.value)) < 500


@pytest.mark.sampled
@pytest.mark.parametrize(
    "override",
    [f"model.path=/{LONG}", f"store=/{LONG}", "model.path=null", "model=a/..", "model=ü/b"],
)
def test_a_wrong_place_ends_a_run_in_a_line(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run.main(
        [override, f"store={tmp_path}", "limit=1"] if "store" not in override else [override]
    )
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert code == 2
    assert line.startswith("error: ")
    assert len(line) < 1000


@pytest.mark.parametrize("kind", ["llava", "internvl"])
def test_a_conversion_into_a_file_is_a_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").touch()
    assert convert([kind, str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written (Not a directory)" in line


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x00", b"a: \x07", b"[" * 100_000])
def test_a_plug_in_whose_configs_are_no_yaml_is_passed_over(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "own_pack", {"conf/method/good.yaml": config("fastv", None)})
    (tmp_path / "own_pack/conf/method/bad.yaml").write_bytes(content)
    with imported_from(tmp_path, monkeypatch):
        choices = own_choices("method")
    assert any("bad.yaml: " in note for note in choices.notes)
    assert "good" in choices.own_names


def test_metadata_that_is_no_text_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "own_pack", {"conf/method/good.yaml": config("good", None)})
    for name, damage in (("stranger", holds(b"[a]\nx = \xff\xe9\n")), ("folder", Path.mkdir)):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        damage(info / "entry_points.txt")
    with imported_from(tmp_path, monkeypatch):
        assert "own_pack 1.0" in [plugin.title for plugin in installed.installed()]
        assert any("metadata cannot be read" in line for line in installed.problems())


class Mute(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("kind", [GeneratorExit, SystemExit, BaseException, Mute, RecursionError])
def test_whatever_a_method_raises_is_its_line(kind: type[BaseException]) -> None:
    with pytest.raises(PlanError) as caught, Blame(kind("bye"), "plan"):
        raise kind("bye")
    line = str(caught.value)
    assert line.startswith(f"method {kind.__name__}: `plan` failed")
    assert f": {kind.__name__}" in line.removeprefix(f"method {kind.__name__}")
    assert "\n" not in line
    with pytest.raises(KeyboardInterrupt), Blame(kind, "plan"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "code",
    [
        "raise GeneratorExit",
        "raise SystemExit('bye')",
        "raise type('E', (Exception,), {'__str__': lambda s: 1/0})()",
    ],
)
def test_whatever_a_file_of_a_method_raises_is_a_line(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"class Mine: ...\n{code}\n")
    assert "cannot be imported" in refused(build_method, "Mine", {}, f"{tmp_path / 'mine.py'}:Mine")


@pytest.mark.parametrize("command", [("run.py", "method=none"), ("-m", "espalier", "store", "ls")])
def test_an_interruption_of_imports_is_a_line(command: tuple[str, ...], tmp_path: Path) -> None:
    # The program waits in the first module of its own that is imported inside of `main`.
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, os, signal\n"
        "plain = builtins.__import__\n"
        "def stopping(name, *rest, **more):\n"
        "    if name.startswith('espalier.harness'):\n"
        "        builtins.__import__ = plain\n"
        "        signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return plain(name, *rest, **more)\n"
        "builtins.__import__ = stopping\n"
    )
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr.splitlines()) == (130, ["error: stopped"])


@pytest.mark.parametrize(
    ("override", "place", "table"),
    [
        ("cluster.options={qos: long}", ("cluster", "options"), {"qos": "long"}),
        ("judge.options={top_p: 0.5}", ("judge", "options"), {"top_p": 0.5}),
        ("log.options={project: a}", ("log", "options"), {"project": "a"}),
        (
            "method.draft_options={dtype: float32}",
            ("method", "draft_options"),
            {"dtype": "float32"},
        ),
        ("benchmark.generation={until: [x]}", ("benchmark", "generation"), {"until": ["x"]}),
    ],
)
def test_a_table_of_options_is_typed_as_pages_print_it(
    override: str, place: tuple[str, str], table: dict[str, Any]
) -> None:
    command = read_command([override], typed=True)
    assert command.cells[0][place[0]][place[1]].items() >= table.items()


@pytest.mark.parametrize("key", ["backend.url", "judge.base_url", "model.path"])
def test_a_key_in_an_address_is_in_no_line(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for address in (
        "http://h/?key=SECRET99",
        "http://h/a?b=c&api_key=SECRET99#d",
        "http://h/?a=1;token=SECRET99",
    ):
        assert run.main([f"{key}={address}"]) == 2
        assert "SECRET99" not in capsys.readouterr().err


def test_a_listing_steers_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"conf/method/{name}.yaml": config("x", None) for name in ("a\x1b[2J", "\u202eb")}
    install(
        tmp_path, "own_pack", files | {"conf/method/c.yaml": "# About \x1b]0;own\x07.\nname: c\n"}
    )
    with imported_from(tmp_path, monkeypatch):
        page = listing("method")
    assert "\\x1b[2J" in page
    assert not steers(page.replace("\n", ""))
