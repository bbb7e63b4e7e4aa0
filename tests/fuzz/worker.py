"""Carries out cases in this process, one after the other, as lines on standard input name them."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

from espalier.harness.errors import UserError
from tests.fuzz import calls
from tests.fuzz.borders import borders
from tests.fuzz.case import HERE, KEY, STORE, Case
from tests.fuzz.files import files
from tests.fuzz.judges import judges
from tests.fuzz.lines import lines

#: What a library prints for itself, beside our line.
NOISE = re.compile(r"Traceback|Warning\b|LOAD REPORT|warnings\.warn|^\s+File \"", re.MULTILINE)

#: Ours, or argparse's.
ERROR = re.compile(r"^(?:[\w./ -]+: )?error: ", re.MULTILINE)

LOCALES = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "en_US.ISO-8859-1"},
)


def cases(seed: int) -> list[Case]:
    """Return all cases of a seed, in a drawn order."""
    dice = Random(seed)
    drawn = [*lines(dice), *files(dice), *judges(), *borders(dice)]
    drawn += [
        Case("locale", "call:locale", (STORE, *map("=".join, variables.items())), seconds=120)
        for variables in LOCALES
    ]
    dice.shuffle(drawn)
    return drawn


def carry_out(case: Case, here: Path, store: Path) -> list[str]:
    """Return what is wrong with the outcome of a case; nothing if it is as it should be."""
    shutil.copytree(store, here / "store")
    (here / "file").write_text("kept", encoding="utf-8")
    whole = max((here / "store/runs").iterdir())
    before = {path: _digest(path) for path in (here / "file", whole / "row.json")}
    if case.prepare is not None:
        case.prepare(here)
    before |= {path: _digest(path) for path in (here / "precious").glob("*")}
    arguments = [
        text.replace(HERE, str(here)).replace(STORE, str(here / "store")) for text in case.arguments
    ]
    # A case may take the store's own place.
    if case.command == "run" and any(
        text.startswith(("store='", "store=/dev")) for text in arguments
    ):
        arguments = [text for text in arguments if text != f"store={here}/new"]
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code, trace = _call(case, arguments)
    out.flush()
    printed = out.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    wrong = [f"traceback: {trace}"] if trace else []
    errors = err.getvalue()
    if KEY in printed + errors:
        wrong.append("the key is shown")
    if "\x1b[2J" in printed + errors:
        wrong.append("an escape of others reaches the terminal")
    if noise := NOISE.search(errors):
        wrong.append(f"{noise[0]!r} on stderr: {errors[-300:]!r}")
    count = len(ERROR.findall(errors))
    # `verify` prints what it finds, and its code says whether that is anything.
    looked = code == 1 and arguments[:1] == ["verify"] and not errors.strip().startswith("error")
    if looked:
        count = 1
    if code != 0 and not trace and count != 1:
        wrong.append(f"exit code {code} with {count} error lines: {errors[-300:]!r}")
    if code == 0 and case.refused and not trace:
        wrong.append("taken without a word")
    if code == 0 and case.served:
        wrong += _rows(printed, store)
    wrong += [f"{path.name} is gone or changed" for path in before if _digest(path) != before[path]]
    return wrong


def _call(case: Case, arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of a command, and the end of its traceback if it has one."""
    try:
        if case.command.startswith("call:"):
            function = getattr(calls, case.command.removeprefix("call:"))
            plain = [text for text in arguments if function is not calls.locale or "=" not in text]
            function(*plain, **dict(text.split("=", 1) for text in arguments[len(plain) :]))
            return 0, ""
        name = "run" if case.command == "run" else case.command
        return int(importlib.import_module(name).main(arguments) or 0), ""
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2, "" if len(str(error).splitlines()) == 1 else f"several lines: {error}"
    except SystemExit as error:
        return (error.code if isinstance(error.code, int) else int(error.code is not None)), ""
    except BaseException as error:  # whatever nobody foresaw is the finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        return 1, f"{type(error).__name__}: {str(error)[:200]} at {last.filename}:{last.lineno}"


def _rows(printed: str, store: Path) -> list[str]:
    """Return the differences of printed rows from those of the undamaged store."""
    wrong = []
    for line in printed.splitlines():
        if line.startswith("{"):
            row: dict[str, Any] = json.loads(line)
            file = store / "runs" / row["run_key"] / "row.json"
            expected = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            if row.get("metrics") != expected.get("metrics") or row["n_samples"] != 2:
                wrong.append(f"a wrong row is served: {line[:200]}")
    return wrong


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"


def main() -> None:
    """Answer each line, the number of a case, with a JSON list of what is wrong."""
    seed, store = int(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    drawn = cases(seed)
    os.environ["FUZZ_KEY"] = os.environ["OPENAI_API_KEY"] = os.environ["WANDB_API_KEY"] = KEY
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="fuzz_", ignore_cleanup_errors=True) as folder:
            wrong = carry_out(drawn[int(line)], Path(folder), store)
        print(json.dumps(wrong), file=answers, flush=True)


if __name__ == "__main__":
    main()
