"""Functions that the MATH-Vision task files name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from espalier.harness.evaluation.scoring.choices import is_legible, letter, lettered
from espalier.harness.evaluation.scoring.math_answers import BOX, number, same_value, stated_value

with redirect_stdout(StringIO()):  # its parser prints a line about versions
    from lmms_eval.tasks.mathvision import utils as mathvision

Doc = dict[str, Any]


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    return list(mathvision.mathvision_doc_to_visual(doc))


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return lmms-eval's question."""
    return str(mathvision.mathvision_doc_to_text(doc, lmms_eval_specific_kwargs))


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Score the option or the value that an answer states; an answer without one is wrong and unparsed.

    `mathvision_standard_eval_lmms_eval` reads by lmms-eval's rules, those of the released script.
    """
    answer = results[0] if results and isinstance(results[0], str) else ""
    with redirect_stdout(StringIO()):  # its parser prints a line about versions for each number
        released = mathvision.mathvision_process_results(doc, [answer])["mathvision_standard_eval"]
    options, read = lettered(doc["options"]), answer if is_legible(answer) else ""
    stated = _option(read, options) if options else _value(read, str(doc["answer"]))
    right = stated == doc["answer"] if options else same_value(stated, str(doc["answer"]))
    # What the released rule accepts of a read value, such as two decimals of a fraction, is right here too.
    right = right or (not options and stated != "" and released["scores"][0])
    return {
        "mathvision_standard_eval": {"scores": [bool(right)]},
        "mathvision_standard_eval_lmms_eval": released,
        "unparsed": float(not stated),
    }


def accuracy(samples: list[Doc]) -> float:
    """Return the percentage of problems solved."""
    return float(mathvision.mathvision_aggregate_results_eval(samples))


def _option(answer: str, options: dict[str, str]) -> str:
    """Return the letter of the option that an answer states, by its letter, its text or its value."""
    value = stated_value(answer)
    read = letter(value if BOX in answer else answer, options)
    names = [name for name, text in options.items() if value and same_value(value, text)]
    return read or (names[0] if len(names) == 1 else "")


def _value(answer: str, target: str) -> str:
    """Return the value that an answer states; words without a digit are none where a number is sought."""
    stated = stated_value(answer)
    worded = number(stated) is None and not any(map(str.isdigit, stated))
    return "" if worded and number(target) is not None else stated
