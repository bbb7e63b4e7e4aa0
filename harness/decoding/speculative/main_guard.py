"""Check that the running script may be imported again, as a new process does."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import current_process
from pathlib import Path
from types import FrameType

from espalier.harness.errors import FOREIGN, UserError

#: The remedy in each error line.
REMEDY = 'the call below `if __name__ == "__main__":`, or engine.transport=threads'


def check_script() -> None:
    """Refuse a new process that would run the user's script a second time.

    Raises:
        UserError: the call is at the top level of a script, outside its guard, or this process is importing the script
            for another one.
    """
    key = "engine.transport=processes"
    if getattr(current_process(), "_inheriting", False):
        raise UserError(
            f"{key} cannot start a process while another one imports the script; valid: {REMEDY}"
        )
    reason = why_not_imported()
    if reason is not None:
        raise UserError(f"{key} starts a process that {reason}; valid: {REMEDY}")


def why_not_imported() -> str | None:
    """Return how a new process fails to import the running script; None if it can."""
    main = sys.modules["__main__"]
    module_spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    module_name = getattr(module_spec, "name", None)
    if file is None or module_name == "__main__" or str(module_name).endswith(".__main__"):
        return None  # a notebook, a prompt, `-c` or a package: nothing is imported again
    if not Path(file).is_file():
        return f"imports {file}, which is not a file"
    line = _line_of_main(file)
    if line is not None and not _is_guarded(Path(file), line):
        return f"runs {file} again, since line {line} is outside of a guard"
    return None


def _line_of_main(file: str) -> int | None:
    """Return the line at which the main script is executing; None in another thread."""
    frame: FrameType | None = sys._getframe()
    scope = vars(sys.modules["__main__"])
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals is scope and code.co_filename == file:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_guarded(file: Path, line: int) -> bool:
    """Return whether a line runs only if `__name__` identifies the file as the script; an unreadable file passes."""
    try:
        body = ast.parse(file.read_bytes()).body
    except FOREIGN:
        return True
    return any(_tests_name(test) for test in _tests(body, line))


def _tests(body: Sequence[ast.stmt], line: int) -> Iterator[ast.expr]:
    """Yield the conditions around a line, and earlier ones that end the script."""
    for statement in body:
        if statement.lineno > line:
            return
        inside = line <= (statement.end_lineno or statement.lineno)
        if isinstance(statement, ast.If) and (inside or _ends_script(statement.body[-1])):
            yield statement.test
        if inside:
            for field in ("body", "orelse", "finalbody"):
                yield from _tests(getattr(statement, field, ()), line)
            for handler in getattr(statement, "handlers", ()):
                yield from _tests(handler.body, line)


def _ends_script(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Raise) or (
        isinstance(call, ast.Call) and ast.unparse(call.func).endswith("exit")
    )


def _tests_name(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
