"""One finished sample: its answer, its telemetry, and their JSON form in the journal."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from espalier.harness.engine.record import SampleRecord
from espalier.harness.errors import tell_once, text_of
from espalier.harness.media.frames import Clip
from espalier.harness.specs.think_tags import spoken

#: Largest number of characters of a text, and of entries of a list or table, that is kept.
TEXT, ENTRIES = 4000, 200

#: Hexadecimal digits of the hash of a picture or of frames.
DIGITS = 16


def json_value(value: Any) -> Any:
    """Return a JSON value: long texts and lists are cut, other objects become the name of their type."""
    match value:
        case None | bool():
            return value
        case str():
            suffix = f"… ({len(value)} characters)" if len(value) > TEXT else ""
            return value[:TEXT] + suffix
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(float(value)) else str(float(value))
        case Mapping():
            return {str(key): json_value(item) for key, item in list(value.items())[:ENTRIES]}
        case list() | tuple():
            return [json_value(item) for item in value[:ENTRIES]]
        case set() | frozenset():
            return sorted(map(str, value))[:ENTRIES]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    return f"<{type(value).__name__}>"


def journal_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of a chat as the model's template gets them, with a mark for each picture and video."""
    text = "\n".join(f"{_role_mark(message)}{_text_of(message['content'])}" for message in messages)
    return str(json_value(text))


def journal_media(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Return a reference for each picture and video of a chat, never its pixels.

    Args:
        messages: the chat, as the adapter gets it.
        source: data set, split and document; the position in the chat is added.

    Cost: one hash over the pixels of a picture or of frames in memory; of a video file only path and size are read.
    """
    references = []
    for place, (kind, value) in enumerate(_media(messages)):
        references.append({"from": f"{source}#{place}", "kind": kind, **_described(value)})
    return references


def _role_mark(message: Mapping[str, Any]) -> str:
    return "" if message["role"] == "user" else f"[{message['role']}] "


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content
    )


def _media(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for message in messages:
        for part in message["content"] if not isinstance(message["content"], str) else ():
            if part["type"] != "text":
                yield part["type"], part.get(part["type"], part.get("url"))


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, Image.Image):
        digest = hashlib.sha256(value.tobytes()).hexdigest()[:DIGITS]
        return {"size": list(value.size), "sha256": digest}
    if isinstance(value, str | Path):
        file = Path(value)
        return {"path": str(value), "bytes": file.stat().st_size if file.is_file() else None}
    if isinstance(value, Clip):
        digest = hashlib.sha256(value.frames.tobytes()).hexdigest()[:DIGITS]
        return {"shape": list(value.frames.shape), "sha256": digest}
    return {"is": type(value).__name__}


#: Identity of a sample inside a run: (task, doc id).
Key = tuple[str, int]

#: Fields of a record that hold tensors, and fields that the journal keeps.
TENSORS = ("origin", "origins")
RECORDED = tuple(field.name for field in fields(SampleRecord) if field.name not in TENSORS)

#: Fields that only entries with a value of them have.
RARE = ("costs", "items", "kept_tokens", "sliding", "pairs", "full_pairs")

#: Number of failures that an error line spells out.
NAMED = 5


class AnswerJournal(Protocol):
    """The part of a run's journal that the evaluation uses (harness/store/files/journal.py implements it)."""

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Add entries so that they survive the death of the process."""

    def entries(self) -> Sequence[Mapping[str, Any]]:
        """Return the whole entries in the order of writing."""


@dataclass(frozen=True)
class Sample:
    """An answer with its cost.

    Attributes:
        task: name of the lmms-eval task.
        doc_id: index of the document in its split.
        answer: text after the stop strings are applied.
        input_tokens: prompt tokens before any reduction, text and visual.
        output_tokens: new tokens, end token included.
        record: the engine's measurements.
        raw: the text before the stop strings; None in journals of earlier versions.
        context: `question`, `target` and `media` (references) of the sample; None in journals of earlier versions.
        reasoning: new tokens of the reasoning with its closing tag.
        scores_all: whether the reasoning is scored as a part of the answer.
    """

    task: str
    doc_id: int
    answer: str
    input_tokens: int
    output_tokens: int
    record: SampleRecord
    raw: str | None = None
    context: Mapping[str, Any] | None = None
    reasoning: int = 0
    scores_all: bool = False

    @property
    def key(self) -> Key:
        """Identity inside the run."""
        return (self.task, self.doc_id)

    @property
    def scored(self) -> str:
        """The part of the answer that is scored: without its reasoning, unless all of it is."""
        return self.answer if self.scores_all else spoken(self.answer)

    def entry(self) -> dict[str, Any]:
        """Return the JSON form that goes into the journal."""
        context = {} if self.context is None else {"asked": dict(self.context)}
        # Only entries with a value of them have these.
        rare = {"reasoning": self.reasoning, "scores_all": self.scores_all}
        return {
            "task": self.task,
            "doc_id": self.doc_id,
            **context,
            "answer": self.answer,
            "raw": self.raw,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            **{name: value for name, value in rare.items() if value},
            "record": {
                name: getattr(self.record, name)
                for name in RECORDED
                if name not in RARE or getattr(self.record, name)
            },
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Sample:
        """Rebuild from the JSON form; tuples come back as tuples. Raises ValueError if the entry is damaged."""
        check(entry, ANSWER, {"asked": is_table, "reasoning": _count, "scores_all": _flag})
        check(entry.get("record"), RECORD, MAY)
        measured: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in entry["record"].items()
            if name in RECORDED
        }
        return cls(
            task=entry["task"],
            doc_id=entry["doc_id"],
            answer=entry["answer"],
            input_tokens=entry["input_tokens"],
            output_tokens=entry["output_tokens"],
            record=SampleRecord(**measured),
            raw=entry.get("raw"),
            context=entry.get("asked"),
            reasoning=entry.get("reasoning", 0),
            scores_all=entry.get("scores_all", False),
        )


@dataclass(frozen=True)
class Failure:
    """A sample that raised: it has no answer, is never scored, and is tried again on resume."""

    task: str
    doc_id: int
    error: str

    @property
    def key(self) -> Key:
        """Identity inside the run."""
        return (self.task, self.doc_id)

    def __str__(self) -> str:
        """Return `task/doc: error`."""
        return f"{self.task}/{self.doc_id}: {self.error}"

    @classmethod
    def from_exception(cls, key: Key, error: BaseException) -> Failure:
        """Return a sample's failure with the first line of its exception, less the task's name, which is in the key."""
        first = next(iter(text_of(error).splitlines()), "")
        named = f"benchmark.task={key[0]!r}: "
        if first.startswith(named):
            return cls(*key, first.removeprefix(named))
        return cls(*key, f"{type(error).__name__}: {first}" if first else type(error).__name__)

    def entry(self) -> dict[str, Any]:
        """Return the JSON form that goes into the journal."""
        return {"task": self.task, "doc_id": self.doc_id, "error": self.error}


class SampleErrors(RuntimeError):
    """Some samples failed; all others are in the journal and are not computed again."""

    def __init__(self, failures: Sequence[Failure], total: int, where: str = "") -> None:
        """Name the failures in one line; `total` counts all samples, `where` explains their names."""
        self.failures = tuple(failures)
        self.total = total
        self.where = where
        listed = "; ".join(str(failure) for failure in self.failures[:NAMED])
        remainder = f"; and {len(failures) - NAMED} more" if len(failures) > NAMED else ""
        super().__init__(
            f"{len(failures)} of {total} samples failed: {listed}{remainder} ({where + '; ' if where else ''}"
            "finished samples are saved; engine.max_errors allows failures)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the arguments: processes of a run exchange their errors."""
        return SampleErrors, (self.failures, self.total, self.where)


def finished_samples(entries: Iterable[Mapping[str, Any]]) -> dict[Key, Sample]:
    """Return the answered samples of a journal; a repeated key keeps its first answer.

    Damaged entries are named on stderr and left out, so that their samples are answered again.
    """
    samples: dict[Key, Sample] = {}
    for entry in entries:
        if "answer" in entry:
            try:
                sample = Sample.from_entry(entry)
            except ValueError as error:
                _tell(entry, error)
                continue
            samples.setdefault(sample.key, sample)
    return samples


def score_entries(
    scores: Mapping[Key, Mapping[str, float]],
    units: Mapping[Key, Mapping[str, int]] | None = None,
    values: Mapping[Key, Mapping[str, Any]] | None = None,
    sample_scores: Mapping[Key, Mapping[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """Return the journal entries of scores, written after scoring.

    Args:
        scores: contributions to each metric.
        units: the first document of a sample's unit, by metric, where that is not the sample itself.
        values: raw values of metrics that are not a mean over samples.
        sample_scores: scores of single samples that differ from their contributions.
    """
    units, values, sample_scores = units or {}, values or {}, sample_scores or {}
    entries = []
    for key in dict.fromkeys([*scores, *values]):
        entry: dict[str, Any] = {
            "task": key[0],
            "doc_id": key[1],
            "scores": dict(scores.get(key, {})),
        }
        if units.get(key):
            entry["units"] = dict(units[key])
        if sample_scores.get(key):
            entry["own"] = dict(sample_scores[key])
        if values.get(key):
            entry["values"] = _shared(values[key])
        entries.append(entry)
    return entries


def _shared(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the values of metrics, equal values once: many tasks give all their metrics the same table."""
    groups: list[dict[str, Any]] = []
    for metric, value in values.items():
        stored = json_value(value)
        for group in groups:
            if group["value"] == stored:
                group["of"].append(metric)
                break
        else:
            groups.append({"of": [metric], "value": stored})
    return groups


@dataclass(frozen=True)
class SampleScores:
    """The scores of one sample.

    Attributes:
        scores: contributions to each metric.
        units: the first document of the sample's unit by metric; itself where a metric is not named.
        values: raw values of metrics that are not a mean.
    """

    scores: Mapping[str, float]
    units: Mapping[str, int]
    values: Mapping[str, Any]


def read_scorings(entries: Iterable[Mapping[str, Any]]) -> dict[Key, SampleScores]:
    """Return the scores of each sample; the last entry of a key counts, damaged entries are skipped."""
    scorings = {}
    for entry in entries:
        if "scores" in entry:
            try:
                check(entry, SCORES, MAY_SCORES)
            except ValueError as error:
                _tell(entry, error)
                continue
            values = {
                metric: group["value"]
                for group in entry.get("values", ())
                for metric in group["of"]
            }
            scorings[entry["task"], entry["doc_id"]] = SampleScores(
                dict(entry["scores"]), dict(entry.get("units", {})), values
            )
    return scorings


def read_scores(entries: Iterable[Mapping[str, Any]]) -> dict[Key, dict[str, float]]:
    """Return the contributions of each sample to each metric; see `read_scorings`."""
    return {key: dict(scoring.scores) for key, scoring in read_scorings(entries).items()}


def _tell(entry: Mapping[str, Any], error: ValueError) -> None:
    sample = f"{entry.get('task')}/{entry.get('doc_id')}"
    tell_once(f"journal: an entry of {sample} is damaged and left out: {str(error)[:200]}")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_count(item) for item in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_number(item) for item in value.values())


def is_table(value: Any) -> bool:
    """Return whether a value is a table."""
    return isinstance(value, Mapping)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_text, value))


def _value_groups(value: Any) -> bool:
    return isinstance(value, list) and all(
        is_table(item) and "value" in item and _texts(item.get("of")) for item in value
    )


def _documents(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_count(item) for item in value.values())


#: Keys of every entry about a sample; more keys are allowed.
SAMPLE: Mapping[str, Callable[[Any], bool]] = {"task": _text, "doc_id": _count}
ANSWER = {**SAMPLE, "answer": _text, "input_tokens": _count, "output_tokens": _count}
SCORES = {**SAMPLE, "scores": _numbers}
MAY_SCORES: Mapping[str, Callable[[Any], bool]] = {
    "units": _documents,
    "values": _value_groups,
    "own": _numbers,
}
#: Keys of the telemetry of an answer; a null value counts as absent.
RECORD: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("visual", "text", "kv_entries", "kv_bytes", "new_tokens"), _count),
    **dict.fromkeys(("requested", "kept", "entering"), _counts),
}
MAY: Mapping[str, Callable[[Any], bool]] = {
    "special": _count,
    "attended": _number,
    "spare": _count,
    "items": _counts,
    "kept_tokens": _counts,
    "held": _counts,
    "held_special": _counts,
    "sliding": _counts,
    "pairs": _counts,
    "full_pairs": _counts,
    "work": _counts,
    "times_ms": _numbers,
    "costs": _numbers,
    "shared": _texts,
    "loop": _text,
    "accepted": is_table,
    "decoding": is_table,
    "denoising": is_table,
    "canvases": is_table,
}


def check(
    entry: Any,
    must: Mapping[str, Callable[[Any], bool]],
    may: Mapping[str, Callable[[Any], bool]] | None = None,
) -> None:
    """Raise ValueError unless an entry has all keys of `must`, and values of `must` and `may` have their type."""
    if not isinstance(entry, Mapping):
        raise ValueError("not a table")
    present = {name: kind for name, kind in (may or {}).items() if entry.get(name) is not None}
    for name, is_valid in {**must, **present}.items():
        if not is_valid(entry.get(name)):
            raise ValueError(f"{name} is {entry.get(name)!r}")
