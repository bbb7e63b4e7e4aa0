"""A command on a real pseudo-terminal: when it spoke, and what a person sees when it is over."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.paths import ROOT

#: What moves the cursor or erases, and everything else that a terminal takes as a command.
CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b.|[\r\n\x08]")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Shown:
    """What came out of a command on a terminal.

    Attributes:
        code: the exit code.
        raw: everything that was written, in order.
        first: processor seconds from the start to the first byte: other work on the machine does not count.
        lines: what is left on the screen and above it.
    """

    code: int
    raw: str
    first: float
    lines: list[str]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)


def on_terminal(
    *arguments: str, width: int = 80, piped: Path | None = None, cwd: Path = ROOT
) -> Shown:
    """Run `python <arguments>` on a terminal of `width` columns and 40 lines.

    Args:
        arguments: of Python.
        width: columns of the terminal.
        piped: where standard output goes; None: to the terminal, as standard error does.
        cwd: where the command starts.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        out = theirs if piped is None else stack.enter_context(piped.open("wb"))
        job = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=theirs,
            stdout=out,
            stderr=theirs,
            cwd=cwd,
            env=environment,
        )
        os.close(theirs)
    first, parts = float("inf"), []
    with suppress(OSError):  # nobody holds the other end any more
        while part := os.read(ours, 65536):
            first = min(first, processor_seconds(job.pid))
            parts.append(part)
    os.close(ours)
    code = job.wait(timeout=300)
    raw = b"".join(parts).decode(errors="replace")
    return Shown(code, raw, first, screen(raw, width))


def processor_seconds(process: int) -> float:
    """Return what a process has used of its processors so far."""
    with suppress(OSError):  # it may have ended
        user, system = (
            Path(f"/proc/{process}/stat")
            .read_text(encoding="utf-8")
            .rpartition(")")[2]
            .split()[11:13]
        )
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return float("inf")


def screen(raw: str, width: int) -> list[str]:
    """Return the lines that a terminal of `width` columns shows after `raw`, trailing blanks removed.

    It knows carriage return, line feed, backspace, cursor up and down, erasing a line or what is below.
    """
    lines: list[list[str]] = [[]]
    row = column = at = 0
    while at < len(raw):
        control = CONTROL.match(raw, at)
        if control is None:
            if column == width:  # the line is full: what comes next wraps
                row, column = row + 1, 0
            while row >= len(lines):
                lines.append([])
            line = lines[row]
            line.extend(" " * (column + 1 - len(line)))
            line[column] = raw[at]
            column, at = column + 1, at + 1
            continue
        at = control.end()
        sign, final = control[0], control[2]
        if sign == "\r":
            column = 0
        elif sign == "\n":
            row += 1
            while row >= len(lines):
                lines.append([])
        elif sign == "\x08":
            column = max(0, column - 1)
        elif final == "A":
            row = max(0, row - int(control[1] or 1))
        elif final == "B":
            row += int(control[1] or 1)
        elif final == "K":
            keep = column if control[1] in ("", "0") else 0
            del lines[row][keep:]
        elif final == "J":
            del lines[row][column:], lines[row + 1 :]
    return ["".join(line).rstrip() for line in lines]
