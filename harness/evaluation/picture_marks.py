"""Pictures of a question where its text names them: `<image 2>` or `<image_2>` is the picture of the column `image_2`.

Tasks of lmms-eval turn all such marks into `<image>` and pair them with the pictures in the order of their numbers:
marks in another order get another's picture, and words around a repeated mark get lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lmms_eval.api.task import Task
from PIL import Image

MARK = re.compile(r"<image[ _]?(\d+)>")
#: A mark without a number.
UNNAMED = "<image>"

#: What stands for a mark while a task writes its text, so that it takes the mark for words.
STAND_IN = "\u27eaimage {}\u27eb"
HIDDEN = re.compile(STAND_IN.format(r"(\d+)"))

Messages = list[dict[str, Any]]
Document = Mapping[str, Any]


def place_pictures(tasks: Sequence[Task]) -> None:
    """Make tasks that replace named marks show each picture where its mark stands, as often as it does.

    Other tasks are unchanged: those with the marks in their text, and those with pictures by another rule.
    """
    for task in tasks:
        task.doc_to_messages = partial(_placed, task.doc_to_messages)


def _placed(to_messages: Callable[[Document], Messages], doc: Document) -> Messages:
    """Return a task's chat of a document, with pictures where the marks stand.

    Raises:
        ValueError: the task lost words between marks, because there are fewer pictures than marks.
    """
    messages = to_messages(doc)
    _check_words(messages, doc)
    pictures = _named_pictures(doc)
    written = {number for text in _strings(messages) for number in MARK.findall(text)}
    if pictures.keys() <= written:
        return messages
    plain = to_messages(_hidden(doc, pictures))
    if any(part["type"] != "text" for turn in plain for part in turn["content"]):
        return messages
    return [turn | {"content": list(_parts(turn["content"], pictures))} for turn in plain]


def _named_pictures(doc: Document) -> dict[str, Image.Image]:
    """Return the pictures that the texts of a document name, by number."""
    numbers = {number for text in _strings(doc) for number in MARK.findall(text)}
    columns = {number: doc.get(f"image_{number}") for number in sorted(numbers)}
    return {
        number: picture for number, picture in columns.items() if isinstance(picture, Image.Image)
    }


def _hidden(value: Any, pictures: Mapping[str, Any]) -> Any:
    """Return a value with the marks of pictures in its texts replaced by stand-ins."""
    if isinstance(value, str):
        return MARK.sub(
            lambda mark: STAND_IN.format(mark[1]) if mark[1] in pictures else mark[0], value
        )
    if isinstance(value, Mapping):
        return {name: _hidden(item, pictures) for name, item in value.items()}
    return [_hidden(item, pictures) for item in value] if isinstance(value, list) else value


def _parts(
    content: Sequence[dict[str, Any]], pictures: Mapping[str, Image.Image]
) -> Iterator[dict[str, Any]]:
    """Yield the parts of a turn, with texts cut at their stand-ins and stripped there, as lmms-eval does."""
    for part in content:
        pieces = HIDDEN.split(part["text"])
        if len(pieces) == 1:
            yield part
            continue
        for place, piece in enumerate(pieces):
            if place % 2:
                yield {"type": "image", "url": pictures[piece].convert("RGB")}
            elif piece.strip():
                yield {"type": "text", "text": piece.strip()}


def _check_words(messages: Messages, doc: Document) -> None:
    chat_text = "\n".join(_strings(messages))
    count = sum(part["type"] != "text" for turn in messages for part in turn["content"])
    texts = [text for text in _strings(doc) if UNNAMED in text]
    pieces = [[piece.strip() for piece in text.split(UNNAMED)] for text in texts]
    questions = [words for words in pieces if any(piece and piece in chat_text for piece in words)]
    marks = sum(len(words) - 1 for words in questions)
    lost = [piece for words in questions for piece in words if piece not in chat_text]
    if lost and marks > count:
        raise ValueError(
            f"the question has {marks} marks {UNNAMED} and {count} pictures, and the task drops {lost[0]!r}; "
            "valid: a picture for each mark"
        )


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a document or in a part of it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)
