"""A decoder's process runs the user's script again: without a guard there are threads, or a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from tests.forks import Forks

ASK = """
import espalier, numpy as np
def ask(**more):
    model = espalier.load("seedling", device="cpu")
    with espalier.apply(model, "pearl", ratio=0.5, **more) as fast:
        return fast.ask(np.zeros((144, 144, 3), np.uint8), "what is it ?", max_new_tokens=3)
"""
GUARD = 'if __name__ == "__main__":\n'


#: Runs own.py with a text in it.
Script = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def script(tmp_path: Path, python: Forks) -> Script:
    own = tmp_path / "own.py"

    def run(text: str) -> subprocess.CompletedProcess[str]:
        own.write_text(f'print("BEGIN", flush=True)\n{text}', encoding="utf-8")
        return python.run([own], {**os.environ, "PYTHONPATH": str(ROOT)})

    return run


PROCESSES = 'ask(transport="processes")\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["ask()\n", pytest.param("def main():\n    ask()\nmain()\n", marks=pytest.mark.exhaustive)],
)
def test_a_script_without_a_guard_has_threads_and_runs_once(script: Script, text: str) -> None:
    done = script(ASK + text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("BEGIN") == 1
    (line,) = [text_line for text_line in done.stderr.splitlines() if "threads" in text_line]
    assert 'if __name__ == "__main__":' in line
    assert "own.py again, which has no guard" in line


@pytest.mark.slow
@pytest.mark.parametrize(("guard", "transport"), [("", "threads"), (GUARD + "    ", "processes")])
def test_two_sides_on_a_cpu_have_processes_only_where_a_guard_stands(
    script: Script, guard: str, transport: str
) -> None:
    call = (
        "from torch import device\n"
        "from espalier.harness.decoding.speculative.drafters import transport_of\n"
        f'{guard}print(transport_of("auto", True, [device("cpu")], [device("cpu")]))\n'
    )
    done = script(call)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["BEGIN", transport]


@pytest.mark.slow
def test_a_call_beside_a_guard_is_answered_once_by_the_target_alone(script: Script) -> None:
    done = script(f"{ASK}print(ask(transport='processes').tokens)\n{GUARD}    pass\n")
    assert "while another one imports the script" in done.stderr
    assert done.stdout.count("BEGIN") == 2


@pytest.mark.slow
@pytest.mark.parametrize("text", [PROCESSES, f"def main():\n    {PROCESSES}main()\n"])
def test_a_process_without_a_guard_is_one_line_and_runs_once(script: Script, text: str) -> None:
    done = script(
        f"{ASK}try:\n    {text.splitlines()[-1]}\nexcept espalier.UserError as error:\n    print(error)\n"
        if text == PROCESSES
        else ASK + text
    )
    assert done.stdout.count("BEGIN") == 1
    line = next(
        text_line
        for text_line in (done.stdout + done.stderr).splitlines()
        if "starts a process" in text_line
    )
    assert 'if __name__ == "__main__":' in line
    assert "transport=threads" in line
    assert "own.py" in line
    assert "freeze_support" not in done.stderr
    assert "DrafterLost" not in done.stderr


@pytest.mark.exhaustive
def test_a_guard_or_threads_will_do(script: Script) -> None:
    done = script(f"{ASK}{GUARD}    print(ask().tokens)\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in "123"
    done = script(f'{ASK}print(ask(transport="threads").tokens)\n')
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("BEGIN") == 1


@pytest.mark.slow
def test_a_prompt_and_a_command_are_imported_by_nobody() -> None:
    code = (
        "from espalier.harness.decoding.speculative.transports import check_script; check_script()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    piped = [sys.executable, "-"]
    done = subprocess.run(piped, input=code, text=True, cwd=ROOT, capture_output=True, check=False)
    assert "imports <stdin>, which is not a file" in done.stderr


def test_whoever_imports_a_script_for_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import current_process

    from espalier.harness.decoding.speculative.transports import check_script

    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UserError, match="while another one imports the script"):
        check_script()
