"""Jinja templates of others, in sandboxes: `benchmark.text`, over the columns of a sample, and those of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from espalier.harness.errors import FOREIGN, UserError, brief, foreign

#: What the expressions of a template can raise: they call methods of any value.
FAILURES: tuple[type[Exception], ...] = (*FOREIGN, TemplateError, RuntimeError, AssertionError)

#: Letters that a prompt may have.
MOST_LETTERS = 1_000_000

#: Packages with values that questions may hold; others become their class's name: a picture's text is its address.
SEEN = ("builtins", "collections", "datetime", "decimal", "jinja2", "markupsafe", "numpy")


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


def checked(key: str, text: str) -> str:
    """Return a text if it is a template, or a plain sentence.

    Raises:
        UserError: a template that does not parse; the line names the config key.
    """
    remedy = "a sentence, or columns as {{ question }}"
    with foreign(f"{key}={brief(text)!r} is no template", remedy, (TemplateSyntaxError,)):
        Environment().parse(text)  # computes nothing
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
        UserError: a column that is not there, something that cannot be computed from these, or too long a text.
    """
    question = ""
    remedy = "a template that fits every sample"
    with foreign(f"benchmark.text: {where}: the template fails", remedy, FAILURES):
        try:
            for part in _parsed(text).generate({"sample": sample, **sample}):
                question += part
                check_length(f"benchmark.text: {where}", question)
        except UndefinedError as error:
            line = f"benchmark.text: {where}: {brief(str(error))}; valid: {', '.join(sample)}"
            raise UserError(line) from error
    return question


def check_length(where: str, text: str) -> None:
    """Raise UserError if a template makes too long a text."""
    if len(text) > MOST_LETTERS:
        raise UserError(
            f"{where}: the template makes more than {MOST_LETTERS:,} letters; valid: fewer"
        )


@lru_cache(maxsize=64)  # parsed once, rendered for every sample
def _parsed(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=Column, keep_trailing_newline=True, finalize=_plain
    )
    environment.globals.pop("lipsum")  # random words
    environment.tests["given"] = is_given
    return environment.from_string(template)


def _plain(value: Any) -> Any:
    kind = type(value)
    seen = value is None or kind is Column or kind.__module__.partition(".")[0] in SEEN
    return value if seen else f"<{kind.__name__}>"
