"""Jinja templates that others wrote: questions over a sample's columns, and what may go wrong in any template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from functools import cache
from typing import Any

from jinja2 import (
    Environment,
    StrictUndefined,
    Template,
    TemplateError,
    TemplateSyntaxError,
    UndefinedError,
)
from jinja2.sandbox import ImmutableSandboxedEnvironment

from espalier.harness.errors import FOREIGN, UserError, brief, foreign

#: Letters that a prompt may have, and items that a product in a template may have.
MOST_LETTERS = 1_000_000

#: Largest exponent in a template.
MOST_POWER = 1000

#: Packages with values that templates show; others become their class's name, since an image's text has an address.
SHOWN = ("builtins", "collections", "datetime", "decimal", "numpy")

#: What the expressions of a template can raise: they call methods of any value.
FAILURES: tuple[type[Exception], ...] = (*FOREIGN, TemplateError, RuntimeError, AssertionError)


def limited(text: str) -> str:
    """Return a rendered text; MemoryError for one longer than a prompt may be."""
    if len(text) > MOST_LETTERS:
        raise MemoryError
    return text


def failure_words(error: Exception) -> str:
    """Return why a template failed, in words for an error line."""
    if isinstance(error, MemoryError):
        return "it takes too much time or memory, or makes too long a text"
    words = brief(str(error))
    return words if isinstance(error, UndefinedError) else f"{type(error).__name__}: {words}"


class Column(StrictUndefined):
    """A name that is no column; using it raises an error with the name."""

    @property
    def _undefined_message(self) -> str:
        if self._undefined_hint or not isinstance(self._undefined_name, str):
            return super()._undefined_message
        return f"no column {self._undefined_name!r}"


class QuestionEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which questions are rendered; products and powers without end raise MemoryError."""

    intercepted_binops: frozenset[str] = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, base: Any, factor: Any) -> Any:
        """Return base * factor or base ** factor."""
        if operator == "**" and factor > MOST_POWER:
            raise MemoryError
        for items, count in ((base, factor), (factor, base)):
            if isinstance(items, Sized) and len(items) * count > MOST_LETTERS:
                raise MemoryError
        return super().call_binop(context, operator, base, factor)


def is_given(value: Any) -> bool:
    """Return whether a column of a sample has content."""
    if value is None or isinstance(value, StrictUndefined):
        return False
    if isinstance(value, float):
        return not math.isnan(value)
    return not isinstance(value, str) or value.strip() not in ("", "nan")


def checked_template(key: str, text: str) -> str:
    """Return a text if it is a template, or a plain sentence.

    Raises:
        UserError: a template that does not parse; the line names the config key.
    """
    remedy = "a sentence, or columns as {{ question }}"
    with foreign(f"{key}={brief(text)!r} is no template", remedy, (TemplateSyntaxError,)):
        Environment().parse(text)  # computes nothing
    return text


def question_text(text: str, sample: Mapping[str, Any], where: str) -> str:
    """Return the question of a sample.

    In the template its columns have their names, and `sample` holds all of them, for names that are no words. The
    test `given` checks that a column has content: neither null nor NaN, nor an empty text, nor the text "nan".

    Args:
        text: the template.
        sample: the columns.
        where: data set, split and row, for messages.

    Raises:
        UserError: a column that is not there, something that cannot be computed from these, or too long a text.
    """
    columns = {name: _printable(value) for name, value in sample.items()}
    try:
        return limited(_parsed(text).render(sample=columns, **columns))
    except FAILURES as error:
        remedy = "a template that fits every sample"
        if isinstance(error, MemoryError):
            remedy = "a template without endless loops and long repeats"
        elif isinstance(error, UndefinedError):
            remedy = ", ".join(sample)
        raise UserError(
            f"benchmark.text: {where}: {failure_words(error)}; valid: {remedy}"
        ) from error


def _printable(value: Any) -> Any:
    """Return a column's value, with the names of classes in place of values that templates do not show."""
    if isinstance(value, Mapping):
        return {name: _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    kind = type(value)
    return value if kind.__module__.partition(".")[0] in SHOWN else f"<{kind.__name__}>"


@cache
def _parsed(template: str) -> Template:
    """Return a template, parsed once and rendered for every sample."""
    environment = QuestionEnvironment(undefined=Column, keep_trailing_newline=True)
    environment.globals.pop("lipsum")  # random words
    environment.tests["given"] = is_given
    return environment.from_string(template)
