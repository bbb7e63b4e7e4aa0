"""The frozen description of a benchmark: plain data, which harness/config builds from its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: `benchmark.kind`.
TASK_KINDS = ("understanding", "localization", "ocr", "description")
#: `benchmark.media`.
TASK_MEDIA = ("auto", "required", "optional")
#: `benchmark.needs`: a Java runtime, a language model that judges, a server that takes submissions.
NEEDS = ("java", "judge", "server")
DERIVATIONS = ("sum", "mean")
#: `benchmark.answers.form`.
ANSWER_FORMS = ("yes_no", "letters")
PAPERS = ("d2pruner", "d3tom", "rtprune", "aircache", "parallelvlm")


@dataclass(frozen=True)
class DatasetSpec:
    """Where a benchmark's samples come from.

    Attributes:
        path: id of a repository on the hub; None: data files of our own.
        config: its configuration, where it has several.
        revision: the commit or branch that is read; None: the newest.
        split: name of the split, or what it holds.
        samples: how many the split has.
        video: whether its samples are videos.
        licence: what its owner says of its use.
    """

    path: str | None = None
    config: str | None = None
    revision: str | None = None
    split: str | None = None
    samples: int | None = None
    video: bool = False
    licence: str | None = None

    @property
    def pinned(self) -> dict[str, str]:
        """Return the revision by the id, where both are known."""
        known = self.path is not None and self.revision is not None
        return {str(self.path): str(self.revision)} if known else {}


@dataclass(frozen=True)
class Reported:
    """How papers print a metric: under which name, and by what they multiply it."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True)
class Derived:
    """The sum or the plain mean of metrics (DERIVATIONS); `*/` stands for every task of a group."""

    how: str
    of: tuple[str, ...]


@dataclass(frozen=True)
class Cluster:
    """Documents that are one unit of statistics: those with equal values in a column, modulo a number where one is."""

    column: str
    modulo: int | None = None


@dataclass(frozen=True)
class Answers:
    """In which form questions are answered (ANSWER_FORMS).

    `options` are the columns with the options' texts, one a letter, or one with a list of them; without any the letters
    are A to D.
    """

    form: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchmarkSpec:
    """Which lmms-eval task, on how many samples (None: all), and which of its metrics are reported.

    Attributes:
        sources: files and folders whose content makes the samples; the run key hashes them. A task that lmms-eval ships
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
        prompt: what is set of the task's own prompt settings (lmms_eval_specific_kwargs).
        text: the question as a template over the columns of a sample, in place of the task's; `texts` by prompt set.
        needs: what scoring takes beside this machine's Python.
        papers: which of the five papers print it.
        note: one sentence for the page that lists all benchmarks.
        prompt_tokens: length of the prompts that the harness composes; None: the samples are what they are. With it the
            clock scores, and the row has times and memory of both sides (harness/evaluation/latency.py).
        new_tokens: tokens of every answer, no fewer and no more; None: as the generation settings say.
    """

    name: str
    task: str
    include_path: Path | None
    limit: int | None
    metrics: tuple[str, ...]
    headline: str
    higher_is_better: bool = True
    generation: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Path, ...] = ()
    title: str = ""
    kind: str = "understanding"
    dataset: DatasetSpec = DatasetSpec()
    media: str = "auto"
    path: Path | None = None
    reported: Mapping[str, Reported] = field(default_factory=dict)
    prompt: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    papers: tuple[str, ...] = ()
    note: str | None = None
    derived: Mapping[str, Derived] = field(default_factory=dict)
    answers: Answers | None = None
    cluster: Cluster | None = None
    blocks: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    @property
    def shown(self) -> bool:
        """Whether every sample must show a picture or a video."""
        return self.media == "required" or (self.media == "auto" and self.dataset.path is not None)
