"""How far the cells of a sweep are: rows, leases, failures and journals of its store, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, first_words
from espalier.harness.specs.think_tags import spoken
from espalier.harness.store.claims import size
from espalier.harness.store.files.journal import Journal
from espalier.harness.store.store_index import DAMAGED, DONE, FAILED, RUNNING, Entry, entries
from espalier.harness.store.sweep_files import Cell, Sweep

LEFT = "left"
#: In the order in which they are counted and shown.
STATES = (DONE, RUNNING, FAILED, LEFT)


@dataclass(frozen=True)
class At:
    """Where one cell is.

    Attributes:
        cell: which one.
        state: one of `STATES`; a damaged row counts as failed.
        answers: how many samples are answered.
        score: of a finished cell its headline, else the share of answers so far that are their sample's target; None
            where samples have no target of one text.
        error: standard error of a finished cell's headline.
        metric: what the score is called.
        rate: answers a second of one that runs; None before the first.
        note: why it failed, who runs it, or that its answers could not be read.
    """

    cell: Cell
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
    cells: Sequence[At]
    samples: Mapping[str, int] = field(default_factory=dict)

    def count(self, state: str) -> int:
        """Return how many cells are in a state."""
        return sum(one.state == state for one in self.cells)

    def of(self, state: str) -> list[At]:
        """Return the cells in a state."""
        return [one for one in self.cells if one.state == state]

    @property
    def rate(self) -> float | None:
        """Answers a second of all cells that run; None where none has answered yet."""
        rates = [one.rate for one in self.cells if one.rate]
        return sum(rates) if rates else None

    @property
    def seconds(self) -> float | None:
        """How long the rest takes at this rate; None where that cannot be told."""
        if self.rate is None:
            return None
        left = 0
        for one in {one.cell.key: one for one in (*self.of(RUNNING), *self.of(LEFT))}.values():
            whole = self.total(one.cell)
            if whole is None:
                return None
            left += max(whole - one.answers, 0)
        return left / self.rate

    def total(self, cell: Cell) -> int | None:
        """Return the samples of a cell; of a whole benchmark as many as a finished cell had."""
        return cell.samples or self.samples.get(cell.benchmark)


def progress_of(store: Path, sweep: Sweep | None) -> Progress:
    """Return how far a sweep is; None: everything that the store has, as if one command had asked for it."""
    found = entries(store, None if sweep is None else {cell.key for cell in sweep.cells})
    by_key = {one.key: one for one in found}
    if sweep is None:
        sweep = Sweep("", (), 0.0, tuple(map(_cell, found)))
    samples: dict[str, int] = {}
    for cell in sweep.cells:
        entry = by_key.get(cell.key)
        if entry is not None and entry.state == DONE and cell.samples is None:
            samples[cell.benchmark] = entry.summary["n_samples"]
    return Progress(sweep, [_at(cell, by_key.get(cell.key)) for cell in sweep.cells], samples)


def _cell(entry: Entry) -> Cell:
    told = entry.summary if entry.state == DONE else {}
    names = {name: str(told.get(name, "?")) for name in ("model", "method", "benchmark", "label")}
    return Cell(entry.key, ratio=told.get("ratio", float("nan")), samples=None, line=(), **names)


def _at(cell: Cell, entry: Entry | None) -> At:
    if entry is None:
        return At(cell, LEFT)
    told = entry.summary
    if entry.state == DONE:
        scored = told["value"], told["stderr"], str(told["metric"])
        return At(cell, DONE, told["n_samples"], *scored, note=told["note"])
    if entry.state == DAMAGED:
        return At(cell, FAILED, note=told["problem"])
    try:
        answers, right = _answered(entry.path)
    except FOREIGN as error:
        return At(cell, FAILED, note=first_words(error))
    score = right / answers if answers and right is not None else None
    if entry.state == RUNNING:
        return At(cell, RUNNING, answers, score, None, "match", _rate(entry, answers), _owner(told))
    if entry.state == FAILED:
        return At(cell, FAILED, answers, score, None, "match", note=told["cause"])
    return At(cell, LEFT, answers, score, None, "match")


def _answered(folder: Path) -> tuple[int, int | None]:
    """Return how many samples a run has answered, and how many with their very target; None: they have none."""
    names = ("forced.jsonl", "journal.jsonl")  # a run that is made again writes the first
    found = {}
    for journal in (Journal(folder / name) for name in names):
        if journal.files():
            found = {
                (entry.get("task"), str(entry.get("doc_id"))): entry
                for entry in journal.entries()
                if "answer" in entry
            }
            break
    targets = [(one.get("asked") or {}).get("target") for one in found.values()]
    texts = [target.strip() for target in targets if isinstance(target, str)]
    if len(texts) < len(targets):
        return len(found), None
    pairs = zip(texts, found.values(), strict=True)
    return len(found), sum(text == spoken(str(one["answer"])).strip() for text, one in pairs)


def _rate(entry: Entry, answers: int) -> float | None:
    """Return the answers a second since the owner began, from what its journals grew by."""
    now, had = size(entry.path), entry.summary.get("journal_bytes")
    try:
        # Written anew by each owner; its time and that of the last answer are of one clock.
        begun = (entry.path / "spec.json").stat().st_mtime
        spent = max(path.stat().st_mtime for path in entry.path.glob("*.jsonl")) - begun
    except (OSError, ValueError):
        return None
    if not isinstance(had, int) or not answers or now <= had or spent <= 0:
        return None
    return answers * (now - had) / now / spent


def _owner(told: Mapping[str, Any]) -> str:
    job = f" job {told['job']}" if told.get("job") else ""
    return f"{told.get('host', '?')} pid {told.get('pid', '?')}{job}"
