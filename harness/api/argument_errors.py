"""Reword error lines for Python callers: name arguments, not config keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import isclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

from espalier.harness.config.kept_tokens import KEEP
from espalier.harness.errors import Refused, UserError, near_key
from espalier.harness.settings import read_value
from espalier.harness.specs.records.data_file import ON_THIS_MACHINE, check_address
from espalier.harness.specs.run_spec import MODEL_KEYS
from espalier.methods.base import Method, MethodError

#: Config keys that end in the name of an argument; `model=`, file names such as model.safetensors and quoted keys stay.
_KEY = re.compile(
    r"(?<![\w./'-])(?:method\.params\.|method\.(?=draft|variant)|engine\.|(?:(?:model|benchmark)\.)?generation\."
    rf"|model\.(?=(?:{'|'.join(MODEL_KEYS)})\b))"
)

#: Config values and their Python spelling.
_VALUES = {"null": "None", "true": "True", "false": "False"}
_VALUE = re.compile(r"(?<![\w./'-])(null|true|false)(?![\w/'-]|\.\w)")

#: Adapters' name for a chat of a batch.
_CHAT = re.compile(r"\bchat (\d+) of the batch(: )?")

#: Text from here on is a shell command and stays as it is.
_COMMAND = "python -m "


def read_path(key: str, value: object) -> Path:
    """Return the absolute path of an argument from Python: a text or a PathLike.

    Raises:
        UserError: it is neither, or an address of the network.
    """
    check_address(key, value, ON_THIS_MACHINE)
    text = fspath(value) if isinstance(value, PathLike) else value
    return cast("Path", read_value(key, text, Path))


def check_instance(key: str, value: object, base: type | tuple[type, ...], valid: str) -> None:
    """Raise UserError unless an argument is an instance of a class.

    Args:
        key: of the argument.
        value: of it.
        base: the class, or several.
        valid: values, for the error line.
    """
    if isclass(value) and issubclass(value, base):
        raise UserError(
            f"{key}={value.__name__} is a class; valid: an instance, {value.__name__}(...)"
        )
    if not isinstance(value, base):
        raise UserError(f"{key} is a {type(value).__name__}; valid: {valid}")


@contextmanager
def user_errors(prefix: str = "", questions: int = 0, first: int = 0) -> Iterator[None]:
    """Turn errors that a user can cause into one UserError line that names Python arguments.

    The only cause that is kept is an exception of a method's code, the cause of a MethodError.

    Args:
        prefix: text before the line.
        questions: number of questions answered; if more than one, the line names the question.
        first: number of the first question of the current batch.

    Raises:
        UserError: the error raised inside, reworded.
    """
    try:
        yield
    except (UserError, MethodError) as error:
        line = prefix + in_python_terms(str(error), questions, first)
        error_class = Refused if isinstance(error, Refused) else UserError
        method_error = error if isinstance(error, MethodError) else error.__cause__
        code_error = method_error.__cause__ if isinstance(method_error, MethodError) else None
        raise error_class(line) from code_error


def in_python_terms(line: str, questions: int = 0, first: int = 0) -> str:
    """Return an error line with Python arguments in place of config keys."""
    message, command, arguments = line.partition(_COMMAND)
    message = _VALUE.sub(lambda match: _VALUES[match[1]], _KEY.sub("", message))
    message = message.replace("compressor.ratio", "cache_ratio")

    def chat(match: re.Match[str]) -> str:
        if questions > 1:
            return f"question {first + int(match[1])}{match[2] or ''}"
        return "" if match[2] else "the question"

    return _CHAT.sub(chat, message) + command + arguments


def unknown_argument(
    name: str, value: Any, method: str, params: Iterable[str], arguments: Iterable[str]
) -> UserError:
    """Return the error for an argument that is neither one of the function's nor a hyper-parameter of the method."""
    params, arguments = sorted(params), sorted(set(arguments))
    by_case = {valid.lower(): valid for valid in (*arguments, *params)}
    is_keep = any(word in name for word in ("keep", "kept", "retain"))
    near = KEEP if is_keep else by_case.get(name.lower()) or near_key(name, by_case.values())
    hint = f"{KEEP}={_as_keep(value)}" if near == KEEP else near and f"{near}={value!r}"
    line = f"{name}={value!r} is no argument and no hyper-parameter of method {method!r}"
    meant = f" (did you mean {hint}?)" if hint else ""
    listed = f"hyper-parameters {', '.join(params)}; " if params else ""
    return UserError(f"{line}{meant}; valid: {listed}arguments {', '.join(arguments)}")


def held_by_instance(name: str, value: Any, method: Method, arguments: Iterable[str]) -> UserError:
    """Return the error for an argument next to an instance of a method, which holds its hyper-parameters."""
    class_name = type(method).__name__
    if name not in (field.name for field in fields(method)):
        return unknown_argument(name, value, class_name, (), arguments)
    return UserError(
        f"{name}: an instance of a method holds its hyper-parameters; valid: {class_name}({name}={value!r})"
    )


def _as_keep(value: Any) -> str:
    """Return a value as one of `keep`: a share as its percentage."""
    share = isinstance(value, float) and 0 < value < 1
    return repr(f"{100 * value:.4g}%") if share else repr(value)
