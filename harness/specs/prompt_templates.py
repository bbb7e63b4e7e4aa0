"""Custom questions: `benchmark.text` is a Jinja template over the columns of a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, UndefinedError

from espalier.harness.errors import UserError
from espalier.harness.specs.bounded_templates import FAILURES, Bounded, TooMuch, render


class _Column(StrictUndefined):
    """A name that is no column; using it raises an error with the name."""

    @property
    def _undefined_message(self) -> str:
        if self._undefined_hint or not isinstance(self._undefined_name, str):
            return super()._undefined_message
        return f"no column {self._undefined_name!r}"


def checked(key: str, text: str) -> str:
    """Return a text if it is a template, or a plain sentence.

    Raises:
        UserError: a template that does not parse; the line names the config key.
    """
    try:
        _parsed(text)
    except TemplateSyntaxError as error:
        raise UserError(
            f"{key}={text!r} is no template: {error.message}; valid: a sentence, or columns as {{{{ question }}}}"
        ) from error
    except FAILURES as error:  # brackets too deep for the parser
        raise UserError(
            f"{key} is no template: {type(error).__name__}; valid: a sentence, or columns as {{{{ question }}}}"
        ) from error
    return text


def rendered(text: str, sample: Mapping[str, Any], where: str) -> str:
    """Return the question of a sample.

    In the template its columns have their names, and `sample` holds all of them, for names that are no words. The
    test `given` checks that a column has content: neither null nor NaN, nor an empty text, nor the text "nan".

    Args:
        text: the template.
        sample: the columns.
        where: data set, split and row, for messages.

    Raises:
        UserError: a column that is not there, something that cannot be computed from these, or a template that takes
            too much time or memory.
    """
    try:
        return render(_parsed(text), {"sample": sample, **sample})
    except UndefinedError as error:
        columns = ", ".join(sample)
        raise UserError(f"benchmark.text: {where}: {error.message}; valid: {columns}") from error
    except TooMuch as error:
        raise UserError(
            f"benchmark.text: {where}: {error}; valid: a template without endless loops and long repeats"
        ) from error
    except FAILURES as error:
        line = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"benchmark.text: {where}: {type(error).__name__}: {line}; valid: a template that fits every sample"
        ) from error


def is_given(value: Any) -> bool:
    """Return whether a column of a sample has content."""
    if value is None or isinstance(value, StrictUndefined):
        return False
    if isinstance(value, float):
        return not math.isnan(value)
    return not isinstance(value, str) or value.strip() not in ("", "nan")


@cache  # a template is parsed once, and needed for every sample
def _parsed(text: str) -> Template:
    places = Bounded(undefined=_Column, keep_trailing_newline=True)
    places.tests["given"] = is_given
    return places.from_string(text)
