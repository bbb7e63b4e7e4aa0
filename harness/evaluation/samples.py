"""One finished sample: its answer, its telemetry, and their JSON form in the journal."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_type_hints

from PIL import Image

from espalier.harness.engine.record import SampleRecord
from espalier.harness.errors import text_of
from espalier.harness.evaluation.journal_scores import check, sound_entries, type_test
from espalier.harness.media.frames import Clip
from espalier.harness.specs.generation import spoken
from espalier.harness.store.answer_digest import Key

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
    lines = []
    for message in messages:
        role = "" if message["role"] == "user" else f"[{message['role']}] "
        texts = (
            part["text"] if part["type"] == "text" else f"<{part['type']}>"
            for part in _parts(message)
        )
        lines.append(role + "".join(texts))
    return str(json_value("\n".join(lines)))


def journal_media(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Return a reference for each picture and video of a chat, never its pixels.

    Args:
        messages: the chat, as the adapter gets it.
        source: data set, split and document; the position in the chat is added.

    Cost: one hash over the pixels of a picture or of frames in memory; of a video file only path and size are read.
    """
    parts = [part for message in messages for part in _parts(message) if part["type"] != "text"]
    return [
        {
            "from": f"{source}#{place}",
            "kind": part["type"],
            **_described(part.get(part["type"], part.get("url"))),
        }
        for place, part in enumerate(parts)
    ]


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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


#: Fields that the journal does not keep, as they hold tensors, or keeps in another form.
ABSENT = ("origin", "origins", "record", "context")

#: Fields of a record that only entries with a value of them have.
RARE = ("costs", "items", "kept_tokens", "sliding", "pairs", "full_pairs")

#: Number of failures that an error line spells out.
NAMED = 5


@dataclass(frozen=True)
class _OfSample:
    """What belongs to one sample.

    Attributes:
        task: name of the lmms-eval task.
        doc_id: index of the document in its split.
    """

    task: str
    doc_id: int

    @property
    def key(self) -> Key:
        """Identity inside the run."""
        return (self.task, self.doc_id)


@dataclass(frozen=True)
class Sample(_OfSample):
    """An answer with its cost.

    Attributes:
        answer: text after the stop strings are applied.
        input_tokens: prompt tokens before any reduction, text and visual.
        output_tokens: new tokens, end token included.
        record: the engine's measurements.
        raw: the text before the stop strings; None in journals of earlier versions.
        context: `question`, `target` and `media` (references) of the sample; None in journals of earlier versions.
        reasoning: new tokens of the reasoning with its closing tag.
        scores_all: whether the reasoning is scored as a part of the answer.
    """

    answer: str
    input_tokens: int
    output_tokens: int
    record: SampleRecord
    raw: str | None = None
    context: Mapping[str, Any] | None = None
    reasoning: int = 0
    scores_all: bool = False

    @property
    def scored(self) -> str:
        """The part of the answer that is scored: without its reasoning, unless all of it is."""
        return self.answer if self.scores_all else spoken(self.answer)

    def entry(self) -> dict[str, Any]:
        """Return the JSON form that goes into the journal."""
        return {
            "task": self.task,
            "doc_id": self.doc_id,
            **({} if self.context is None else {"asked": dict(self.context)}),
            "answer": self.answer,
            "raw": self.raw,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
            **({"scores_all": True} if self.scores_all else {}),
            "record": {
                name: getattr(self.record, name)
                for name in _journal_tests(SampleRecord)
                if name not in RARE or getattr(self.record, name)
            },
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Sample:
        """Rebuild from the JSON form; tuples come back as tuples. Raises ValueError if the entry is damaged."""
        answers, measures = _journal_tests(Sample), _journal_tests(SampleRecord)
        check(entry, {**answers, "asked": type_test(Mapping[str, Any] | None)})
        check(entry.get("record"), measures)
        measured: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in entry["record"].items()
            if name in measures
        }
        values = {name: entry[name] for name in answers if name in entry}
        return cls(record=SampleRecord(**measured), context=entry.get("asked"), **values)


@dataclass(frozen=True)
class Failure(_OfSample):
    """A sample that raised: it has no answer, is never scored, and is tried again on resume."""

    error: str

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
        self.failures, self.total, self.where = tuple(failures), total, where
        listed = "; ".join(map(str, failures[:NAMED]))
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
    for sample in sound_entries(entries, "answer", Sample.from_entry):
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
        entry = {"task": key[0], "doc_id": key[1], "scores": dict(scores.get(key, {}))}
        groups: dict[str, dict[str, Any]] = {}
        for metric, value in values.get(key, {}).items():
            stored = json_value(value)
            groups.setdefault(repr(stored), {"of": [], "value": stored})["of"].append(metric)
        optional = {
            "units": dict(units.get(key, {})),
            "own": dict(sample_scores.get(key, {})),
            "values": list(groups.values()),
        }
        entries.append(entry | {name: table for name, table in optional.items() if table})
    return entries


@cache
def _journal_tests(kind: type) -> dict[str, Callable[[Any], bool]]:
    """Return a test of each field of a dataclass in the journal; one with a default may be missing or null."""
    hints = get_type_hints(kind)
    return {
        field.name: type_test(
            hints[field.name]
            if field.default is field.default_factory  # both are missing
            else hints[field.name] | None
        )
        for field in fields(kind)
        if field.name not in ABSENT
    }
