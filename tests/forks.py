"""Commands in forks of a Python that has imported what most of them import: processes without those ten seconds."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

#: Reads a command a line, runs it in a fork, and prints its exit code. A fork leaves the loop, so that it ends as a
#: Python of its own does: by the exit code, or the traceback, of its script.
SERVER = """
import json, os, runpy, sys
import lmms_eval.evaluator
from espalier.harness.cli import run as _, store
from espalier.harness.evaluation import chat_model, latency, lmms_tasks, stated_answers
from espalier.harness.runs import runner
from transformers.models.clip import image_processing_clip, modeling_clip
from transformers.models.llama import modeling_llama
from transformers.models.llava import modeling_llava, processing_llava

def run(command):
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["variables"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(command["out"], flags), 1)
    os.dup2(os.open(command["err"], flags), 2)
    sys.argv = command["words"]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        exec(sys.argv[1], {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")

for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
run(json.loads(line))
"""


class Forks:
    """A Python that forks for each command, until the context is left.

    Args:
        variables: of its environment, and of commands that have no others.
        folder: where commands start.
    """

    def __init__(self, variables: Mapping[str, str], folder: Path) -> None:
        self.variables, self.folder = dict(variables), folder

    def __enter__(self) -> Self:
        self.printed = TemporaryDirectory()
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=self.folder,
            env=self.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        return self

    def run(
        self, words: Sequence[str | Path], variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these words."""
        out, err = (Path(self.printed.name, name) for name in ("out", "err"))
        command = {
            "words": [*map(str, words)],
            "folder": str(self.folder),
            "variables": self.variables if variables is None else {**variables},
            "out": str(out),
            "err": str(err),
        }
        self.server.stdin.write(f"{json.dumps(command)}\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        printed = (path.read_text(encoding="utf-8") for path in (out, err))
        return subprocess.CompletedProcess(command["words"], code, *printed)

    def __call__(
        self, words: Sequence[str | Path], variables: Mapping[str, str] | None = None
    ) -> str:
        """Return what Python prints with these words; it must end well."""
        done = self.run(words, variables)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def typed(self, line: str, variables: Mapping[str, str] | None = None) -> str:
        """Return what a line prints that calls Python, perhaps with variables before it."""
        words = shlex.split(line)
        place = words.index("python")
        more = dict(word.split("=") for word in words[:place])
        return self(
            words[place + 1 :], {**(self.variables if variables is None else variables), **more}
        )

    def __exit__(self, *_: object) -> None:
        self.server.communicate()
        self.printed.cleanup()
