"""From the rows of a store to what is compared with what: decoders, ratios of the draft, guidances of the draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculative_summary import steady_rounds
from espalier.harness.evaluation.samples import finished_samples
from espalier.harness.reports.curves.stored_rows import (
    Stored,
    chosen,
    no_runs,
    of_model,
    one_of_each,
    stored,
    telling,
)
from espalier.harness.specs.comparable import identity, name
from espalier.harness.stats import Interval, share_interval
from espalier.harness.store import RunDir
from espalier.methods.parallelvlm import ParallelVLM

#: In which order decoders stand, earlier ideas first; others follow by name.
ORDER = (
    *("autoregressive", "vanilla_sd", "onsd", "sd_tree"),
    *("specvlm_sd", "std", "pearl", "parallelvlm"),
)

#: Bootstrap resamples for one cell of a table; the end points move by about 0.1 standard errors.
RESAMPLES = 2000

#: The decoder whose ratio and guidance are studied.
GUIDED = "parallelvlm"
#: As the paper has it.
USUAL = ParallelVLM()


@dataclass(frozen=True)
class Cell(Stored):
    """One row of a decoder."""

    @property
    def block(self) -> Mapping[str, Any]:
        """Figures of the decoding (harness/decoding/speculative/speculative_summary.py)."""
        found: Mapping[str, Any] = self.row["extra"]["speculative"]
        return found

    @property
    def params(self) -> Mapping[str, Any]:
        """Hyper-parameters."""
        found: Mapping[str, Any] = self.row["extra"]["params"]
        return found

    @property
    def name(self) -> str:
        """Method with what differs from its defaults."""
        return name(self.row)

    @property
    def ratio(self) -> float:
        """Share of visual tokens that the draft does without."""
        return float(self.row["ratio"])

    @property
    def draft(self) -> str | None:
        """Name of the draft model; None if the target drafts itself, or nobody does."""
        found = (self.row["settings"]["draft"] or {}).get("name")
        return None if found is None else str(found)

    @property
    def compared(self) -> bool:
        """Whether speed-ups were measured."""
        return self.block["mismatches"] is not None

    @property
    def timed(self) -> bool:
        """Whether draft and target worked side by side if the method says so; else its times are not the method's."""
        transport = self.row["settings"]["engine"]["transport"]
        return not (self.block["overlap"] and transport == "sequential")

    @property
    def studied(self) -> bool:
        """Whether the row answers what the draft should be given, instead of how the decoder does."""
        usual = {"guidance": USUAL.guidance, "L": USUAL.L, "text_only": USUAL.text_only}
        return self.row["method"] == GUIDED and any(
            self.params.get(key, value) != value for key, value in usual.items()
        )

    @property
    def setting(self) -> tuple[Hashable, ...]:
        """What rows must share to be compared, beside their settings."""
        around = self.row["extra"].get("environment", {})
        where = (around.get(key) for key in ("device_name", "threads"))
        return (self.row["benchmark"], self.row["n_samples"], self.row["seed"], *where)


def read_cells(store: Path, model: str | None = None, where: Sequence[str] = ()) -> list[Cell]:
    """Return the decoders' rows, the oldest first; those with speed-ups stand behind those without.

    Rows without settings are passed over.

    Args:
        store: root of the run store.
        model: which, if the store has several.
        where: settings that rows must have, `key=value` each (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: there are none, they are of several models and none was chosen, or none has the settings asked for.
    """
    found = [one for one in stored(store) if one.row["extra"].get("speculative")]
    cells = [Cell(one.path, one.row) for one in telling(found)[0]]
    if not cells:
        raise no_runs(store, "a decoder", "speculative")
    return sorted(chosen(of_model(cells, model), where), key=lambda cell: cell.compared)


def decoders(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return the decoders' rows of each benchmark, all of a benchmark at one ratio where they have a choice.

    The ratio is the one that most decoders have; where a decoder has no row there, its rows at 0 or 1 count.
    """
    ours = [cell for cell in cells if cell.timed and not cell.studied]
    found = {}
    for benchmark in sorted({cell.row["benchmark"] for cell in ours}):
        here = [cell for cell in ours if cell.row["benchmark"] == benchmark]
        found[benchmark] = _at_one_ratio(_together(here, lambda cell: cell.row["method"]))
    return found


def ratios(cells: Sequence[Cell]) -> list[Cell]:
    """Return the rows of the guided decoder by ratio, at least two; a draft without visual tokens comes last, at 1."""
    ours = [
        cell
        for cell in cells
        if cell.row["method"] == GUIDED and cell.timed and (not cell.studied or _blind(cell))
    ]
    found = _together(ours, lambda cell: cell.ratio, _window)
    return sorted(found, key=lambda cell: cell.ratio) if len(found) > 1 else []


def guidances(cells: Sequence[Cell]) -> list[Cell]:
    """Return the rows of the guided decoder by what chooses its draft's tokens, and from which layer."""
    ours = [
        cell
        for cell in cells
        if cell.row["method"] == GUIDED and cell.ratio < 1 and (cell.ratio > 0 or _keeps(cell))
    ]
    # Which tokens are accepted depends on the window, not on who waits for whom.
    found = _together(ours, lambda cell: identity(cell.row), _window, free=("engine.transport",))
    return found if any(cell.studied for cell in found) else []


def acceptance(cell: Cell) -> Interval | None:
    """Return accepted over judged tokens with the 95 % bootstrap interval over answers; None if none was judged.

    Answers are resampled whole, because tokens of one answer are accepted or refused together. Without a journal, or
    with one answer, there is no interval.
    """
    value = cell.block.get("acceptance")
    if value is None:
        return None
    samples = finished_samples(RunDir(cell.path).journal.entries()).values()
    told = [sample.record.decoding for sample in samples]
    answers = [DecodingRecord.from_entry(one) for one in told if one is not None]
    rounds = [steady_rounds([one]).rounds for one in answers if one.degraded is None]
    if len(rounds) < 2:
        return Interval(value, value, value)
    accepted = [sum(one.accepted for one in own) for own in rounds]
    judged = [sum(one.checked for one in own) for own in rounds]
    return share_interval(accepted, judged, resamples=RESAMPLES)


def _blind(cell: Cell) -> bool:
    return bool(cell.params.get("text_only"))


def _keeps(cell: Cell) -> bool:
    return bool(cell.params.get("guidance") == "none" and not _blind(cell))


def _window(cell: Cell) -> Hashable:
    window: Hashable = cell.params.get("gamma")
    return window


def _together(
    cells: Iterable[Cell],
    what: Callable[[Cell], Hashable],
    also: Callable[[Cell], Hashable] = lambda cell: None,
    free: Sequence[str] = (),
) -> list[Cell]:
    """Return rows that share setting, `also` and draft: as many different ones as possible, the newest of equals.

    Args:
        cells: the oldest first.
        what: makes rows different.
        also: must be shared too.
        free: settings in which rows of one cell may differ.

    Raises:
        UserError: rows differ in another setting that must be the same.
    """
    groups: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.setting, also(cell)), []).append(cell)
    if not groups:
        return []
    # Of groups of equal size the one with more samples.
    best = max(
        groups.values(), key=lambda group: (len(set(map(what, group))), group[0].row["n_samples"])
    )
    drafts = Counter(cell.draft for cell in best if cell.draft)
    usual = drafts.most_common(1)[0][0] if drafts else None
    # Rows with a speed-up stand behind those without, so that these give way to them.
    return one_of_each(
        [cell for cell in best if cell.draft in (None, usual)], ("engine.compare", *free)
    )


def _at_one_ratio(cells: Sequence[Cell]) -> list[Cell]:
    between = {(cell.row["method"], cell.ratio) for cell in cells if 0 < cell.ratio < 1}
    counts = Counter(ratio for _, ratio in between)
    # Of ratios that as many have, the smallest.
    ratio = min(counts, key=lambda one: (-counts[one], one), default=None)
    there = {cell.name for cell in cells if cell.ratio == ratio}
    found = [
        cell
        for cell in cells
        if cell.ratio == ratio or (cell.name not in there and cell.ratio in (0, 1))
    ]
    return sorted(found, key=_place)


def _place(cell: Cell) -> tuple[int, str]:
    method = cell.row["method"]
    return (ORDER.index(method) if method in ORDER else len(ORDER), cell.name)
