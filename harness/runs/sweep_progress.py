"""Progress of a sweep's cells, from the rows, leases, failures and journals of its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from espalier.harness.errors import FOREIGN, first_words
from espalier.harness.specs.generation import spoken
from espalier.harness.store.claims import journal_bytes
from espalier.harness.store.files.journal import Journal
from espalier.harness.store.run_entries import DAMAGED, DONE, FAILED, RUNNING, RunEntry, entries
from espalier.harness.store.sweep_files import Sweep, SweepCell

LEFT = "left"
#: In the order of output.
STATES = (DONE, RUNNING, FAILED, LEFT)


@dataclass(frozen=True)
class CellProgress:
    """Progress of one cell.

    Attributes:
        cell: the cell.
        state: one of `STATES`; a damaged row counts as failed.
        answers: number of answered samples.
        score: of a finished cell its headline, else the share of answers so far that equal their sample's target; None
            if samples have no single target text.
        error: standard error of a finished cell's headline.
        metric: name of the score.
        rate: answers per second of a running cell; None before the first.
        note: why it failed, who runs it, or that its answers could not be parsed.
    """

    cell: SweepCell
    state: str
    answers: int = 0
    score: float | None = None
    error: float | None = None
    metric: str = ""
    rate: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Progress:
    """All cells of a sweep, in its order."""

    sweep: Sweep
    cells: Sequence[CellProgress]
    samples: Mapping[str, int] = field(default_factory=dict)

    def count(self, state: str) -> int:
        """Return the number of cells in a state."""
        return sum(progress.state == state for progress in self.cells)

    @property
    def rate(self) -> float | None:
        """Answers per second of all running cells; None before the first answer."""
        rates = [progress.rate for progress in self.cells if progress.rate]
        return sum(rates) if rates else None

    @property
    def seconds(self) -> float | None:
        """Remaining seconds at this rate; None if unknown."""
        unfinished = {cell.cell.key: cell for cell in self.cells if cell.state in (RUNNING, LEFT)}
        samples = [(self.total(cell.cell), cell.answers) for cell in unfinished.values()]
        if self.rate is None or any(total is None for total, _ in samples):
            return None
        return sum(max((total or 0) - answers, 0) for total, answers in samples) / self.rate

    def total(self, cell: SweepCell) -> int | None:
        """Return the samples of a cell; for a whole benchmark as many as a finished cell had."""
        return cell.samples or self.samples.get(cell.benchmark)


def progress_of(store: Path, sweep: Sweep | None) -> Progress:
    """Return the progress of a sweep; None: of all runs in the store, as if they were one sweep."""
    runs = entries(store, None if sweep is None else {cell.key for cell in sweep.cells})
    by_key = {run.key: run for run in runs}
    if sweep is None:
        sweep = Sweep("", (), tuple(map(_cell, runs)))
    cells = [_cell_progress(cell, by_key.get(cell.key)) for cell in sweep.cells]
    unlimited = (progress for progress in cells if progress.cell.samples is None)
    samples = {cell.cell.benchmark: cell.answers for cell in unlimited if cell.state == DONE}
    return Progress(sweep, cells, samples)


def _cell(entry: RunEntry) -> SweepCell:
    summary = entry.summary if entry.state == DONE else {}
    names = {
        name: str(summary.get(name, "?")) for name in ("model", "method", "benchmark", "label")
    }
    return SweepCell(
        entry.key,
        ratio=summary.get("ratio", float("nan")),
        samples=None,
        line=(),
        keep=summary.get("keep"),
        **names,
    )


def _cell_progress(cell: SweepCell, entry: RunEntry | None) -> CellProgress:
    if entry is None:
        return CellProgress(cell, LEFT)
    summary = entry.summary
    if entry.state == DONE:
        scored = summary["value"], summary["stderr"], str(summary["metric"])
        return CellProgress(cell, DONE, summary["n_samples"], *scored, note=summary["note"])
    if entry.state == DAMAGED:
        return CellProgress(cell, FAILED, note=summary["problem"])
    try:
        answers, right = _answered(entry.path)
    except FOREIGN as error:
        return CellProgress(cell, FAILED, note=first_words(error))
    score = right / answers if answers and right is not None else None
    progress = CellProgress(cell, LEFT, answers, score, None, "match")
    if entry.state == RUNNING:
        job = f" job {summary['job']}" if summary.get("job") else ""
        owner = f"{summary.get('host', '?')} pid {summary.get('pid', '?')}{job}"
        return replace(progress, state=RUNNING, rate=_rate(entry, answers), note=owner)
    if entry.state == FAILED:
        return replace(progress, state=FAILED, note=summary["cause"])
    return progress


def _answered(folder: Path) -> tuple[int, int | None]:
    """Return how many samples a run has answered, and how many equal their target; None if there are no targets."""
    # A repeated run writes the first.
    journals = (Journal(folder / name) for name in ("forced.jsonl", "journal.jsonl"))
    journal = next((journal for journal in journals if journal.files()), None)
    answers = {
        (entry.get("task"), str(entry.get("doc_id"))): entry
        for entry in (() if journal is None else journal.entries())
        if "answer" in entry
    }
    targets = [(answer.get("asked") or {}).get("target") for answer in answers.values()]
    texts = [target.strip() for target in targets if isinstance(target, str)]
    if len(texts) < len(targets):
        return len(answers), None
    pairs = zip(texts, answers.values(), strict=True)
    return len(answers), sum(
        text
        == (str(answer["answer"]) if answer.get("scores_all") else spoken(answer["answer"])).strip()
        for text, answer in pairs
    )


def _rate(entry: RunEntry, answers: int) -> float | None:
    """Return the answers per second since the owner began, from the growth of its journals."""
    current, initial = journal_bytes(entry.path), entry.summary.get("journal_bytes")
    try:
        # Each owner rewrites it; its time and that of the last answer are of the same clock.
        start = (entry.path / "spec.json").stat().st_mtime
        seconds = max(path.stat().st_mtime for path in entry.path.glob("*.jsonl")) - start
    except (OSError, ValueError):
        return None
    if not isinstance(initial, int) or not answers or current <= initial or seconds <= 0:
        return None
    return answers * (current - initial) / current / seconds
