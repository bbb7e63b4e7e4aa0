"""Custom questions: `benchmark.text` is a Jinja template over the columns of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from espalier.harness.errors import UserError, brief, foreign
from espalier.harness.specs.bounded_templates import TooMuch, Unrendered, render


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
        UserError: a column that is not there, something that cannot be computed from these, or a template that takes
            too much time or memory.
    """
    try:
        return render("question", text, {"sample": sample, **sample})
    except TooMuch as error:
        remedy = "a template without endless loops and long repeats"
        raise UserError(f"benchmark.text: {where}: {error}; valid: {remedy}") from error
    except Unrendered as error:
        columns = error.kind == "UndefinedError"
        remedy = ", ".join(sample) if columns else "a template that fits every sample"
        raise UserError(f"benchmark.text: {where}: {error}; valid: {remedy}") from error
