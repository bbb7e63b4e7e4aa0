"""What an aggregation may not do while it is computed again, and what stays as it was afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.harness.evaluation.sandbox import Effect, without_effects
from espalier.harness.evaluation.upstream import tokens_remembered

#: A name from before the sandbox, as tasks have that import functions.
os_open = os.open

DEEDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "open": (lambda folder: open(folder / "a", "w", encoding="utf-8").close(), "writes a file"),
    "append": (lambda folder: (folder / "a").open(mode="a").close(), "writes a file"),
    "pathlib": (lambda folder: (folder / "a").write_text("x"), "writes a file"),
    "os.open": (lambda folder: os.open(folder / "a", os.O_CREAT | os.O_WRONLY), "writes a file"),
    "alias": (lambda folder: os_open(folder / "a", os.O_CREAT | os.O_WRONLY), "writes a file"),
    "folder": (lambda folder: (folder / "b" / "c").mkdir(parents=True), "writes a file"),
    "connection": (lambda _: socket.create_connection(("127.0.0.1", 9)), "opens a connection"),
    "socket": (lambda _: socket.socket().connect(("127.0.0.1", 9)), "opens a connection"),
    "process": (lambda _: subprocess.run([sys.executable, "-V"]), "starts a process"),
    "shell": (lambda _: os.system("true"), "starts a process"),
    "wait": (lambda _: time.sleep(1), "waits"),
}


def _stubborn(deed: Callable[[Path], Any], folder: Path) -> None:
    """Do it as tasks do that catch every Exception and try again."""
    with suppress(Exception):
        deed(folder)


@pytest.mark.parametrize("name", DEEDS)
def test_effects_are_refused_and_allowed_again_afterwards(name: str, tmp_path: Path) -> None:
    deed, said = DEEDS[name]
    before = (open, os.open, os.mkdir, socket.socket.connect, subprocess.Popen.__init__, time.sleep)
    with pytest.raises(Effect, match=said), without_effects():
        _stubborn(deed, tmp_path)
    assert list(tmp_path.iterdir()) == []
    after = (open, os.open, os.mkdir, socket.socket.connect, subprocess.Popen.__init__, time.sleep)
    assert before == after


def test_reading_and_a_folder_of_its_own_are_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("kept")
    with without_effects() as folder:
        assert (tmp_path / "a").read_text() == "kept"
        (folder / "submissions").mkdir()
        (folder / "submissions" / "x.json").write_text("{}")
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write("x")
        print("noise")
        print("noise", file=sys.stderr)
    assert not folder.exists()
    assert capsys.readouterr() == ("", "")


def test_other_threads_go_on(tmp_path: Path) -> None:
    done: list[int] = []
    with without_effects():
        thread = threading.Thread(target=lambda: done.append((tmp_path / "a").write_text("x")))
        thread.start()
        thread.join()
    assert done == [1]


def test_captions_go_to_the_tokenizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class PTBTokenizer:
        def tokenize(self, captions: dict[Any, list[dict[str, str]]]) -> dict[Any, list[str]]:
            asked.extend(one["caption"] for several in captions.values() for one in several)
            return {k: [one["caption"].lower() for one in v] for k, v in captions.items()}

    name = "pycocoevalcap.tokenizer.ptbtokenizer"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(PTBTokenizer=PTBTokenizer))
    real = PTBTokenizer.tokenize
    with tokens_remembered():
        first = PTBTokenizer().tokenize({7: [{"caption": "A dog"}, {"caption": "Two"}]})
        again = PTBTokenizer().tokenize({1: [{"caption": "Two"}], 2: [{"caption": "New"}]})
    assert first == {7: ["a dog", "two"]}
    assert again == {1: ["two"], 2: ["new"]}
    assert asked == ["A dog", "Two", "New"]
    assert PTBTokenizer.tokenize is real
