"""Whether the script that is running may be imported again, as a process that is started anew does."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import current_process
from pathlib import Path
from types import FrameType

from espalier.harness.errors import UserError

#: What both lines offer.
VALID = 'the call below `if __name__ == "__main__":`, or engine.transport=threads'


def check_script() -> None:
    """Refuse a new process where it would run the user's script a second time.

    Raises:
        UserError: the call stands at the top level of a script, outside of its guard, or this process is importing the
            script for another one.
    """
    key = "engine.transport=processes"
    if getattr(current_process(), "_inheriting", False):
        raise UserError(
            f"{key} cannot start a process while another one imports the script; valid: {VALID}"
        )
    main = sys.modules["__main__"]
    name, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    by_name = getattr(name, "name", None)
    if file is None or by_name == "__main__" or str(by_name).endswith(".__main__"):
        return  # a notebook, a prompt, `-c` or a package: nothing is imported again
    if not Path(file).is_file():
        raise UserError(
            f"{key} starts a process that imports {file}, which is no file; valid: {VALID}"
        )
    line = _line_of_main(file)
    if line is not None and not _guarded(Path(file), line):
        raise UserError(
            f"{key} starts a process that runs {file} again, since line {line} is outside of a guard; valid: {VALID}"
        )


def _line_of_main(file: str) -> int | None:
    """Return the line at which the main script is being run; None in another thread."""
    frame: FrameType | None = sys._getframe()
    scope = vars(sys.modules["__main__"])
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals is scope and code.co_filename == file:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _guarded(file: Path, line: int) -> bool:
    """Say whether a line is run only where `__name__` says that the file is the script; an unreadable file passes."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    return any(_asks(test) for test in _tests(body, line))


def _tests(body: Sequence[ast.stmt], line: int) -> Iterator[ast.expr]:
    """Yield the conditions around a line, and those before it that end the script."""
    for statement in body:
        if statement.lineno > line:
            return
        inside = line <= (statement.end_lineno or statement.lineno)
        if isinstance(statement, ast.If) and (inside or _leaves(statement.body[-1])):
            yield statement.test
        if inside:
            for field in ("body", "orelse", "finalbody"):
                yield from _tests(getattr(statement, field, ()), line)
            for handler in getattr(statement, "handlers", ()):
                yield from _tests(handler.body, line)


def _leaves(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Raise) or (
        isinstance(call, ast.Call) and ast.unparse(call.func).endswith("exit")
    )


def _asks(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
