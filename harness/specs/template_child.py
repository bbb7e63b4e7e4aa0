"""The program that renders templates of others: `python -m espalier.harness.specs.template_child chat|question`.

It reads pairs (template, values) as pickles from standard input, and writes one line of JSON for each: the text, or the
class and message of an error. What takes more memory or time than it may ends the program, whichever operation of a
template does so.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, RLIMIT_CORE, RLIMIT_CPU, getrlimit, setrlimit
from time import process_time
from types import ModuleType
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from espalier.harness.errors import FOREIGN, brief

#: Bytes of addresses that the program may have, its libraries included.
MEMORY = 3 * 2**28

#: Seconds of processor time for one template.
SECONDS = 2

#: Letters that a prompt may have.
MOST_LETTERS = 1_000_000

#: What the expressions of a template can raise: they call methods of any value.
FAILURES: tuple[type[Exception], ...] = (*FOREIGN, TemplateError, RuntimeError, AssertionError)

#: Returns the text of a template with its values.
Renderer = Callable[[str, Mapping[str, Any]], str]


class Column(StrictUndefined):
    """A name that is no column; using it raises an error with the name."""

    @property
    def _undefined_message(self) -> str:
        if self._undefined_hint or not isinstance(self._undefined_name, str):
            return super()._undefined_message
        return f"no column {self._undefined_name!r}"


def is_given(value: Any) -> bool:
    """Return whether a column of a sample has content."""
    if value is None or isinstance(value, StrictUndefined):
        return False
    if isinstance(value, float):
        return not math.isnan(value)
    return not isinstance(value, str) or value.strip() not in ("", "nan")


def main() -> None:
    """Answer until standard input ends."""
    # The terminal's Ctrl-C reaches this program too, and its parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies, sys.stdout = sys.stdout, sys.stderr
    render = {"chat": _chats, "question": _questions}[sys.argv[1]]()
    _limit(RLIMIT_AS, MEMORY)
    _limit(RLIMIT_CORE, 0)
    print(file=replies, flush=True)
    requests = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115 (until the program ends)
    while requests.peek(1):
        template, values = pickle.load(requests)
        _limit(RLIMIT_CPU, int(process_time()) + SECONDS)
        print(json.dumps(_reply(render, template, values)), file=replies, flush=True)


def _limit(resource: int, amount: int) -> None:
    hard = getrlimit(resource)[1]
    setrlimit(resource, (amount if hard == RLIM_INFINITY else min(amount, hard), hard))


def _reply(render: Renderer, template: str, values: Mapping[str, Any]) -> dict[str, str]:
    try:
        text = render(template, values)
    except MemoryError:
        os._exit(1)
    except FAILURES as error:
        return {"error": type(error).__name__, "message": brief(str(error))}
    if len(text) > MOST_LETTERS:
        os._exit(1)
    return {"text": text}


def _chats() -> Renderer:
    """Return the library's renderer of chats, which takes its arguments as values. Cost: a third of a second."""
    library = find_spec("transformers")
    assert library is not None
    for name, place in (("transformers", "."), ("transformers.utils", "utils")):
        package = ModuleType(name)
        package.__path__ = [str(Path(str(library.origin)).parent / place)]
        sys.modules[name] = package
    # The library's own packages import a hundred modules, in a second; this one needs three.
    from transformers.utils.chat_template_utils import render_jinja_template

    return lambda template, values: render_jinja_template(chat_template=template, **values)[0][0]


def _questions() -> Renderer:
    """Return the renderer of questions over the columns of a sample."""
    environment = ImmutableSandboxedEnvironment(undefined=Column, keep_trailing_newline=True)
    environment.globals.pop("lipsum")  # random words
    environment.tests["given"] = is_given

    @cache  # parsed once, rendered for every sample
    def parsed(template: str) -> Template:
        return environment.from_string(template)

    return lambda template, values: parsed(template).render(values)


if __name__ == "__main__":
    main()
