"""Functions that the task files of own data name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from espalier.harness.evaluation.scoring.choices import is_legible, letter, yes_or_no
from espalier.harness.evaluation.scoring.text_scores import (
    anls,
    contains,
    equal,
    within,
)
from espalier.harness.specs.records.own_data import (
    numbers,
    options_of,
    plain_yes_no,
    right_letter,
)
from espalier.harness.specs.records.record import category_metric

Doc = dict[str, Any]


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the paths of the pictures, then of the video."""
    return [part["url"] for part in _media(doc)]


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return the question with its options, one a line, between the prompt settings of the task."""
    settings = lmms_eval_specific_kwargs or {}
    options = [f"{name}. {text}" for name, text in options_of(doc.get("choices") or ()).items()]
    text = "\n".join([doc["question"], *options])
    return f"{settings.get('pre_prompt', '')}{text}{settings.get('post_prompt', '')}"


def doc_to_messages(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> list[Doc]:
    """Return the sample as chat messages: pictures and videos, then the text."""
    text = {"type": "text", "text": doc_to_text(doc, lmms_eval_specific_kwargs)}
    return [{"role": "user", "content": [*_media(doc), text]}]


def doc_to_target(doc: Doc) -> Any:
    """Return the accepted answers: a text if there is one."""
    answers = doc.get("answers") or []
    return answers[0] if len(answers) == 1 else answers


def score_exact(doc: Doc, results: list[Any]) -> Doc:
    return _accuracy(doc, results, equal)


def score_contains(doc: Doc, results: list[Any]) -> Doc:
    return _accuracy(doc, results, contains)


def score_choice(doc: Doc, results: list[Any]) -> Doc:
    """Score the option that an answer states; an answer without one is wrong, and unparsed."""
    options = options_of(doc["choices"])
    stated = letter(_answer(results), options)
    right = stated in {right_letter(answer, options) for answer in doc["answers"]}
    return _scores(doc, accuracy=right) | {"unparsed": float(not stated)}


def score_yes_no(doc: Doc, results: list[Any]) -> Doc:
    """Score the yes or no that an answer states; an answer that states neither is wrong, and unparsed."""
    stated = yes_or_no(_answer(results))
    right = stated in map(plain_yes_no, doc["answers"])
    return _scores(doc, accuracy=right) | {"unparsed": float(not stated)}


def score_number(doc: Doc, results: list[Any]) -> Doc:
    """Score the only number of an answer; an answer without one, or with several, is wrong and unparsed."""
    stated = set(numbers(_answer(results)))
    references = [number for answer in doc["answers"] for number in numbers(answer)]
    number = stated.pop() if len(stated) == 1 else None
    right = number is not None and any(
        within(number, reference, *doc["tolerance"]) for reference in references
    )
    return _scores(doc, accuracy=right) | {"unparsed": float(number is None)}


def score_anls(doc: Doc, results: list[Any]) -> Doc:
    """Score by the similarity to the nearest accepted text; an answer that says nothing is unparsed."""
    answer = _answer(results)
    nearest = max(anls(answer, reference) for reference in doc["answers"])
    return _scores(doc, anls=nearest) | _unread(answer, nearest)


def score_none(doc: Doc, results: list[Any]) -> Doc:
    """Count the words of an answer."""
    return _scores(doc, words=len(_answer(results).split()))


def _accuracy(doc: Doc, results: list[Any], right: Callable[[str, str], bool]) -> Doc:
    answer = _answer(results)
    accuracy = any(right(answer, reference) for reference in doc["answers"])
    return _scores(doc, accuracy=accuracy) | _unread(answer, accuracy)


def _unread(answer: str, right: float) -> Doc:
    """Return the metric `unparsed`: an answer that says nothing, unless it is right, as signs alone may be."""
    return {"unparsed": float(not right and not is_legible(answer))}


def _scores(doc: Doc, **scores: float) -> Doc:
    """Return the scores of a sample, each for all samples and for those of its category."""
    values = {name: float(value) for name, value in scores.items()}
    category = doc.get("category")
    if category is None:
        return values
    return {**values, **{category_metric(name, category): values[name] for name in values}}


def _answer(results: list[Any]) -> str:
    answer = results[0] if results else ""
    return answer if isinstance(answer, str) else ""


def _media(doc: Doc) -> list[Doc]:
    pictures = [{"type": "image", "url": path} for path in doc.get("images") or ()]
    return [*pictures, *({"type": "video", "url": path} for path in doc.get("video") or ())]
