"""A run, its key and what commands print are the same under every locale, also under one that knows ASCII alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.paths import ROOT
from espalier.harness.store.files.journal import Journal
from tests.store.test_upkeep import add

#: Python's own ways out of the C locale are shut, as where somebody has shut them.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
UTF8 = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"}


def called(locale: dict[str, str], *command: str) -> subprocess.CompletedProcess[bytes]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LC_", "LANG", "PYTHONIOENCODING", "PYTHONUTF8"))
    }
    return subprocess.run(
        [sys.executable, *command],
        env=kept | locale,
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=300,
    )


def latin() -> dict[str, str] | None:
    """Return a locale of another encoding, if this machine has one."""
    done = subprocess.run(["locale", "-a"], capture_output=True, check=False)
    names = done.stdout.decode("ascii", "replace").split()
    matches = [name for name in names if name.lower().endswith(("iso88591", "iso-8859-1"))]
    return {"LC_ALL": matches[0], "PYTHONUTF8": "0"} if matches else None


@pytest.mark.exhaustive
def test_a_run_under_ascii_has_the_key_of_every_locale(tmp_path: Path) -> None:
    settings = ["benchmark=seedling_vqa", "limit=2", "engine.warmup=0", "json=true"]
    settings.append(f"store={tmp_path}")

    def row(locale: dict[str, str]) -> dict[str, Any]:
        done = called(locale, "run.py", "method=random", *settings)
        assert done.returncode == 0, done.stderr[-2000:]
        done.stdout.decode("utf-8" if locale is UTF8 else "ascii")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    first = row(ASCII)
    assert first["status"] == "done"
    for locale in filter(None, (UTF8, latin())):
        other = row(locale)
        assert (other["run_key"], other["status"]) == (first["run_key"], "cached")


@pytest.mark.slow
def test_text_that_a_locale_lacks_is_escaped(tmp_path: Path) -> None:
    add(tmp_path, "aa", [1, 0])
    journal = Journal(tmp_path / "runs" / "aa" / "journal.jsonl")
    journal.append({"task": "t", "doc_id": 2, "answer": "狗在左边"})
    journal.append({"task": "t", "doc_id": 2, "scores": {"acc": 1}})
    for command in (("ls",), ("show", "aa"), ("verify", "--dry"), ("gc",)):
        done = called(ASCII, "-m", "espalier", "store", *command, "--store", str(tmp_path))
        assert b"Traceback" not in done.stderr
        done.stdout.decode("ascii")
        if command[0] == "show":
            assert b"\\u72d7" in done.stdout
