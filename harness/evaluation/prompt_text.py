"""The question of a sample: change a task's prompt settings, fill in the model's box format, or replace the text.

A task lists the settings of the model that it needs under `of_model` of its prompt settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from lmms_eval.api.task import Task
from lmms_eval.protocol import ChatMessages
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.models.chat_media import PARTS, Chat, refuse_unused
from espalier.harness.settings import unknown_key
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.question_templates import question_text
from espalier.harness.specs.run_spec import ModelSpec

#: Messages of a chat, as tasks of lmms-eval write them.
Messages = list[dict[str, Any]]


def change_prompts(tasks: Sequence[Task], changes: Mapping[str, Any]) -> None:
    """Override the prompt settings of tasks (their lmms_eval_specific_kwargs) with `benchmark.prompt`.

    Each task takes the settings that it has.

    Raises:
        UserError: no task has a setting; the line lists the existing ones.
    """
    if not changes:
        return
    settings = {name for task in tasks for name in _settings(task)}
    for name in changes:
        if not settings:
            raise UserError(
                f"benchmark.prompt.{name}: task {tasks[0].config.task} has no prompt settings; valid: "
                "benchmark.text, which replaces the whole question"
            )
        if name not in settings:
            raise unknown_key(
                f"benchmark.prompt.{name}", (f"benchmark.prompt.{setting}" for setting in settings)
            )
    for task in tasks:
        task_settings = _settings(task)
        changed = {name: value for name, value in changes.items() if name in task_settings}
        # A new table: tasks of a group may share one.
        task.lmms_eval_specific_kwargs = {**(task.lmms_eval_specific_kwargs or {}), **changed}


def check_text(tasks: Sequence[Task], text: str | None) -> None:
    """Render a text for the first sample of each task, to check it before a model is loaded.

    Raises:
        UserError: it needs a column that the samples lack, or cannot be rendered.
    """
    if text is None:
        return
    for task in tasks:
        samples = task.eval_docs
        if len(samples):
            question_text(text, samples[0], place(task, 0))


def worded(
    text: str | None,
    tasks: Mapping[str, Task],
    messages: Messages,
    sample: Mapping[str, Any],
    name: str,
    row: int,
) -> Messages:
    """Return the chat of a sample of the task `name`, with the text that replaces every question; None: its own.

    Raises:
        UserError: the sample does not fit the text; the line names data set, split and row.
    """
    if text is None:
        return messages
    return with_question(messages, question_text(text, sample, place(tasks[name], row)))


def chat_of(messages: Messages) -> Chat:
    """Return a task's messages as a chat that adapters read.

    Raises:
        UserError: lmms-eval's messages do not have a key, and would drop it.
    """
    parsed = ChatMessages(messages=messages)
    for message, turn in zip(messages, parsed.messages, strict=True):
        refuse_unused("a turn", message, type(turn).model_fields)
        for entry, part in zip(message["content"], turn.content, strict=True):
            refuse_unused(PARTS.get(part.type, part.type), entry, type(part).model_fields)
    return cast("Chat", parsed.to_hf_messages())


def with_question(messages: Messages, text: str) -> Messages:
    """Return a chat with the text of the last user turn replaced; the new text follows its pictures and videos."""
    last = max(number for number, turn in enumerate(messages) if turn["role"] == "user")
    turn = messages[last]
    media = [part for part in turn["content"] if part["type"] != "text"]
    replaced = {**turn, "content": [*media, {"type": "text", "text": text}]}
    return [*messages[:last], replaced, *messages[last + 1 :]]


def place(task: Task, row: int) -> str:
    """Return a sample's data set, split and row, for error lines."""
    config = task.config
    split = config.test_split or config.validation_split or config.training_split
    return f"data set {config.dataset_path or config.task}, split {split}, row {row}"


def _settings(task: Task) -> dict[str, Any]:
    """Return a task's prompt settings without the tables of model families."""
    settings = task.lmms_eval_specific_kwargs or {}
    return {name: value for name, value in settings.items() if not isinstance(value, Mapping)}


def fill_box_settings(tasks: Iterable[Task], model: ModelSpec, benchmark: BenchmarkSpec) -> None:
    """Fill in `boxes`, the format, and `resized`, the size bounds of the model's pictures, for tasks that list them.

    Settings of the user (benchmark.prompt) stay.

    Raises:
        UserError: boxes are written in pixels of a resized picture, and the model's file does not state the resizing.
    """
    for task in tasks:
        settings = task.lmms_eval_specific_kwargs
        if not isinstance(settings, Mapping) or "of_model" not in settings:
            continue
        # A new table: tasks of a group may share one.
        filled = {**settings, "boxes": model.boxes, **benchmark.prompt}
        if filled["boxes"] == "pixels" and "resized" not in benchmark.prompt:
            filled["resized"] = resizing(model)
        task.lmms_eval_specific_kwargs = filled


def resizing(model: ModelSpec) -> tuple[int, int, int]:
    """Return the side of a visual token, and the smallest and largest area of a resized picture, in pixels.

    Raises:
        UserError: the model's file does not state them.
    """
    vision = model.architecture.get("vision", {})
    side = vision.get("patch_size", 0) * vision.get("spatial_merge_size", 0)
    smallest, largest = (model.processor.get(f"{end}_pixels") for end in ("min", "max"))
    if not (side and smallest and largest):
        raise UserError(
            f"model.boxes='pixels' needs model.processor.min_pixels and max_pixels, which model={model.name} does not "
            "state; valid: both, or boxes of another format"
        )
    return int(side), int(smallest), int(largest)


MARK = re.compile(r"<image[ _]?(\d+)>")
#: A mark without a number.
UNNAMED = "<image>"

#: What stands for a mark while a task writes its text, so that it takes the mark for words.
STAND_IN = "\u27eaimage {}\u27eb"
HIDDEN = re.compile(STAND_IN.format(r"(\d+)"))

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
    numbers = {number for text in texts_in(doc) for number in MARK.findall(text)}
    columns = {number: doc.get(f"image_{number}") for number in sorted(numbers)}
    pictures = {
        number: picture for number, picture in columns.items() if isinstance(picture, Image.Image)
    }
    written = {number for text in texts_in(messages) for number in MARK.findall(text)}
    if pictures.keys() <= written:
        return messages
    plain = to_messages(_hidden(doc, pictures))
    if any(part["type"] != "text" for turn in plain for part in turn["content"]):
        return messages
    return [turn | {"content": list(_parts(turn["content"], pictures))} for turn in plain]


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
    chat_text = "\n".join(texts_in(messages))
    count = sum(part["type"] != "text" for turn in messages for part in turn["content"])
    texts = [text for text in texts_in(doc) if UNNAMED in text]
    pieces = [[piece.strip() for piece in text.split(UNNAMED)] for text in texts]
    questions = [words for words in pieces if any(piece and piece in chat_text for piece in words)]
    marks = sum(len(words) - 1 for words in questions)
    lost = [piece for words in questions for piece in words if piece not in chat_text]
    if lost and marks > count:
        raise ValueError(
            f"the question has {marks} marks {UNNAMED} and {count} pictures, and the task drops {lost[0]!r}; "
            "valid: a picture for each mark"
        )


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a document or in a part of it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(item)
