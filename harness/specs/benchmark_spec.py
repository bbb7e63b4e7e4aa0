"""The frozen description of a benchmark: the fields of a file of conf/benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from espalier.harness.errors import UserError
from espalier.harness.settings import (
    COMPUTED,
    OMITTED,
    OPEN,
    STATED,
    By,
    Count,
    Names,
    Natural,
    OneOf,
    Positive,
    SomeNames,
    Text,
    at_least,
    check_keys,
    gather,
    read_section,
    read_value,
    table,
)
from espalier.harness.specs.records.data_file import VALID
from espalier.harness.specs.records.record import RecordSettings, RecordTable

#: `benchmark.kind`.
TASK_KINDS = ("understanding", "localization", "ocr", "description")
#: `benchmark.needs`: a Java runtime, a language model that judges, a server that takes submissions.
NEEDS = ("java", "judge", "server")
DERIVATIONS = ("sum", "mean")
#: `benchmark.answers.form`.
ANSWER_FORMS = ("yes_no", "letters", "short")
PAPERS = ("d2pruner", "d3tom", "rtprune", "aircache", "parallelvlm")


@dataclass(frozen=True)
class DatasetSpec:
    """Where a benchmark's samples come from.

    Attributes:
        path: id of a repository on the hub; None: data files of our own.
        config: its configuration, where it has several.
        revision: the commit or branch that is read; None: the newest.
        split: name of the split, or its content.
        samples: how many the split has.
        video: whether its samples are videos.
        licence: its terms of use.
    """

    path: Text | None = None
    config: Text | None = field(default=None, metadata=OMITTED)
    revision: Text | None = None
    split: Text | None = field(default=None, metadata=OMITTED)
    samples: Count | None = field(default=None, metadata=OMITTED)
    video: bool = field(default=False, metadata=OMITTED)
    licence: Text | None = field(default=None, metadata=OMITTED)

    @property
    def pinned(self) -> dict[str, str]:
        """Return the revision by the id, where both are known."""
        complete = self.path is not None and self.revision is not None
        return {str(self.path): str(self.revision)} if complete else {}


@dataclass(frozen=True)
class Reported:
    """How papers print a metric: its name, and the factor that they multiply it by."""

    name: Text
    scale: Positive = 1.0


@dataclass(frozen=True)
class Derived:
    """The sum or the plain mean of metrics (DERIVATIONS); `*/` means every task of a group."""

    how: Annotated[str, OneOf(DERIVATIONS)]
    of: SomeNames


@dataclass(frozen=True)
class Cluster:
    """Documents that are one unit of statistics: those with equal values in a column, modulo a number where one is."""

    column: Text
    modulo: Annotated[int, at_least(2)] | None = None


@dataclass(frozen=True)
class Answers:
    """In which form questions are answered (ANSWER_FORMS).

    `options` are the columns with the options' texts, one a letter, or one with a list of them; without any the letters
    are A to D.
    """

    form: Annotated[str, OneOf(ANSWER_FORMS)]
    options: Names = ()


def _read_derived(key: str, value: Any) -> dict[str, Derived]:
    return {name: _read_derivation(f"{key}.{name}", how) for name, how in table(key, value).items()}


def _read_derivation(key: str, value: Any) -> Derived:
    how = table(key, value)
    check_keys(key, how, DERIVATIONS)
    if len(how) != 1:
        raise UserError(f"{key}={value!r} must be one of {', '.join(DERIVATIONS)} with a list")
    ((word, metrics),) = how.items()
    return Derived(word, read_value(f"{key}.{word}", metrics, SomeNames))


def _read_cluster(key: str, value: Any) -> Cluster:
    if isinstance(value, str):
        return Cluster(read_value(key, value, Text))
    return read_section(Cluster, key, value)


def _read_texts(key: str, value: Any) -> dict[str, str]:
    # Null cancels the text of another file.
    texts = {name: text for name, text in table(key, value).items() if text is not None}
    hint = Annotated[str, By(_read_template)]
    return gather({name: (f"{key}.{name}", text, hint) for name, text in texts.items()})


def _read_template(key: str, value: Any) -> str:
    text: str = read_value(key, value, Text)
    # Jinja takes a tenth of a second to import, and most benchmarks have no text.
    from espalier.harness.specs.question_templates import checked_template

    return checked_template(key, text)


@dataclass(frozen=True)
class BenchmarkSpec:
    """Which lmms-eval task, on how many samples (None: all), and which of its metrics are reported.

    Attributes:
        sources: files and folders that hold the samples; the run key hashes them. A task that lmms-eval ships
            needs none, its version is that of the package.
        title: what tables call it.
        kind: what a method's settings may depend on.
        media: whether a sample without picture and video is an error; `auto`: where the data set is a published one.
        path: folder that holds the data set's repository, or several as `<owner>/<name>`; None: the hub's cache.
        reported: how papers print a metric.
        derived: metrics made of the task's own.
        answers: in which form questions are answered, where a strict reader goes before the task's own
            (harness/evaluation/stated_answers.py); None: the task's own reads alone.
        cluster: which documents are one unit of statistics; None: each for itself.
        blocks: left out in turn for intervals of metrics that are no mean; None: by size, 0: aggregated once only.
        prompt: values of the task's own prompt settings (lmms_eval_specific_kwargs).
        text: the question as a template over the columns of a sample, in place of the task's; `texts` by prompt set.
        needs: requirements of scoring other than Python.
        papers: which of the five papers print it.
        note: one sentence for the page that lists all benchmarks.
        prompt_tokens: length of the prompts that the harness composes; None: the samples have their own prompts. With
            it the clock scores, and the row has times and memory of both sides (harness/evaluation/latency.py).
        new_tokens: tokens of every answer, no fewer and no more; None: as in the generation settings.
        records: of a benchmark on the user's own data, which `path` names; None: of a published data set.
    """

    name: Text = field(metadata=OMITTED)
    task: Text
    include_path: Path | None = field(metadata=OMITTED)
    limit: Count | None = field(metadata=OPEN)
    metrics: SomeNames = field(metadata=OPEN)
    headline: Text = field(metadata=OPEN)
    higher_is_better: bool = field(default=True, metadata={**OPEN, **STATED})
    generation: Mapping[str, Any] = field(default_factory=dict, metadata=STATED)
    sources: tuple[Path, ...] = field(default=(), metadata=OMITTED)
    title: Text | None = field(default=None, metadata=OMITTED)
    kind: Annotated[str, OneOf(TASK_KINDS)] = field(default="understanding", metadata=OMITTED)
    dataset: DatasetSpec = field(default=DatasetSpec(), metadata=OMITTED)
    media: Annotated[str, OneOf(("auto", "required", "optional"))] = field(
        default="auto", metadata=OMITTED
    )
    path: Path | None = field(default=None, metadata=OMITTED)
    reported: Mapping[str, Reported] = field(default_factory=dict, metadata=OMITTED)
    prompt: Mapping[str, Any] = field(default_factory=dict)
    text: Annotated[str, By(_read_template)] | None = None
    texts: Annotated[Mapping[str, str], By(_read_texts)] = field(
        default_factory=dict, metadata=OMITTED
    )
    needs: tuple[Annotated[str, OneOf(NEEDS)], ...] = field(default=(), metadata=OMITTED)
    papers: tuple[Annotated[str, OneOf(PAPERS)], ...] = field(default=(), metadata=OMITTED)
    note: Text | None = field(default=None, metadata=OMITTED)
    derived: Annotated[Mapping[str, Derived], By(_read_derived)] = field(default_factory=dict)
    answers: Answers | None = None
    cluster: Annotated[Cluster, By(_read_cluster)] | None = None
    blocks: Natural | None = field(default=None, metadata=OMITTED)
    prompt_tokens: Count | None = None
    new_tokens: Annotated[int, at_least(2)] | None = None
    records: RecordSettings | None = field(default=None, metadata={**COMPUTED, **OMITTED})

    @property
    def needs_media(self) -> bool:
        """Whether a sample without an image or a video is an error."""
        return self.media == "required" or (self.media == "auto" and self.dataset.path is not None)

    def own_data(self) -> RecordTable | None:
        """Return the records of own data, read once in a process; None for other benchmarks.

        Raises:
            UserError: the data are wrong, or there are none.
        """
        if self.records is None:
            return None
        if self.path is None:
            raise UserError(
                f"benchmark.path=null: benchmark={self.name} needs data; valid: {VALID}"
            )
        # Imports numpy and Pillow.
        from espalier.harness.specs.records.own_data import read_records

        return read_records(self.path, self.records)
