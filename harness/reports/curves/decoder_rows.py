"""Select the results of speculative decoders to compare: decoders, ratios of the draft, guidances of the draft."""

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
    StoredResult,
    filter_results,
    newest_per_cell,
    no_runs_error,
    read_results,
    select_model,
    with_settings,
)
from espalier.harness.specs.comparable import identity, name
from espalier.harness.stats import Interval, share_interval
from espalier.harness.store import RunDir
from espalier.methods.parallelvlm import ParallelVLM

#: Order of decoders, older ideas first; others follow by name.
ORDER = (
    *("autoregressive", "vanilla_sd", "onsd", "sd_tree"),
    *("specvlm_sd", "std", "pearl", "parallelvlm"),
)

#: Bootstrap resamples for a table cell; the end points vary by about 0.1 standard errors.
RESAMPLES = 2000

#: The decoder of the ratio and guidance studies.
GUIDED = "parallelvlm"
#: Its defaults are the paper's.
DEFAULTS = ParallelVLM()


@dataclass(frozen=True)
class DecoderResult(StoredResult):
    """A result of a decoder."""

    @property
    def block(self) -> Mapping[str, Any]:
        """Figures of the decoding (harness/decoding/speculative/speculative_summary.py)."""
        block: Mapping[str, Any] = self.row["extra"]["speculative"]
        return block

    @property
    def params(self) -> Mapping[str, Any]:
        """The method's hyper-parameters."""
        params: Mapping[str, Any] = self.row["extra"]["params"]
        return params

    @property
    def name(self) -> str:
        """The method and its non-default parameters."""
        return name(self.row)

    @property
    def ratio(self) -> float:
        """Share of visual tokens that the draft does not see."""
        return float(self.row["ratio"])

    @property
    def draft(self) -> str | None:
        """Name of the draft model; None if the target drafts itself or nothing is drafted."""
        name = (self.row["settings"]["draft"] or {}).get("name")
        return None if name is None else str(name)

    @property
    def has_speedup(self) -> bool:
        """Whether speed-ups were measured."""
        return self.block["mismatches"] is not None

    @property
    def has_valid_times(self) -> bool:
        """Whether draft and target ran in parallel if the method does; otherwise the times are not the method's."""
        transport = self.row["settings"]["engine"]["transport"]
        return not (self.block["overlap"] and transport == "sequential")

    @property
    def varies_draft(self) -> bool:
        """Whether the run belongs to the study of the draft's input instead of the comparison of decoders."""
        defaults = {"guidance": DEFAULTS.guidance, "L": DEFAULTS.L, "text_only": DEFAULTS.text_only}
        return self.row["method"] == GUIDED and any(
            self.params.get(key, value) != value for key, value in defaults.items()
        )

    @property
    def setting(self) -> tuple[Hashable, ...]:
        """What results must share to be compared, besides their settings."""
        environment = self.row["extra"].get("environment", {})
        machine = (environment.get(key) for key in ("device_name", "threads"))
        return (self.row["benchmark"], self.row["n_samples"], self.row["seed"], *machine)


def read_decoders(
    store: Path, model: str | None = None, where: Sequence[str] = ()
) -> list[DecoderResult]:
    """Return the decoders' results, oldest first; results with speed-ups come after those without.

    Results without settings are skipped.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings (harness/reports/curves/stored_rows.py).

    Raises:
        UserError: there are no results, they are of several models and `model` is None, or none matches `where`.
    """
    results = [result for result in read_results(store) if result.row["extra"].get("speculative")]
    cells = [DecoderResult(result.path, result.row) for result in with_settings(results)[0]]
    if not cells:
        raise no_runs_error(store, "a decoder", "speculative")
    return sorted(
        filter_results(select_model(cells, model), where), key=lambda cell: cell.has_speedup
    )


def decoders(cells: Sequence[DecoderResult]) -> dict[str, list[DecoderResult]]:
    """Return the decoders' results by benchmark, at one ratio per benchmark where decoders have a choice.

    The ratio is the most frequent one; for a decoder without a result there, its results at 0 or 1 are used.
    """
    candidates = [cell for cell in cells if cell.has_valid_times and not cell.varies_draft]
    by_benchmark = {}
    for benchmark in sorted({cell.row["benchmark"] for cell in candidates}):
        members = [cell for cell in candidates if cell.row["benchmark"] == benchmark]
        by_benchmark[benchmark] = _at_one_ratio(
            _largest_group(members, lambda cell: cell.row["method"])
        )
    return by_benchmark


def ratios(cells: Sequence[DecoderResult]) -> list[DecoderResult]:
    """Return at least two results of the guided decoder by ratio; a draft without visual tokens is last, at 1."""
    candidates = [
        cell
        for cell in cells
        if cell.row["method"] == GUIDED
        and cell.has_valid_times
        and (not cell.varies_draft or _is_text_only(cell))
    ]
    group = _largest_group(candidates, lambda cell: cell.ratio, _window)
    return sorted(group, key=lambda cell: cell.ratio) if len(group) > 1 else []


def guidances(cells: Sequence[DecoderResult]) -> list[DecoderResult]:
    """Return the results of the guided decoder by guidance of the draft's tokens and by layer."""
    candidates = [
        cell
        for cell in cells
        if cell.row["method"] == GUIDED
        and cell.ratio < 1
        and (cell.ratio > 0 or _keeps_all_tokens(cell))
    ]
    # Acceptance depends on the window, not on the transport.
    group = _largest_group(
        candidates, lambda cell: identity(cell.row), _window, free=("engine.transport",)
    )
    return group if any(cell.varies_draft for cell in group) else []


def acceptance(cell: DecoderResult) -> Interval | None:
    """Return the share of checked tokens accepted, with the 95 % bootstrap interval over answers; None without checks.

    Whole answers are resampled, because tokens of one answer are accepted or refused together. Without a journal, or
    with one answer, there is no interval.
    """
    value = cell.block.get("acceptance")
    if value is None:
        return None
    samples = finished_samples(RunDir(cell.path).journal.entries()).values()
    records = [sample.record.decoding for sample in samples]
    answers = [DecodingRecord.from_entry(record) for record in records if record is not None]
    rounds = [steady_rounds([record]).rounds for record in answers if record.degraded is None]
    if len(rounds) < 2:
        return Interval(value, value, value)
    accepted = [sum(record.accepted for record in answer_rounds) for answer_rounds in rounds]
    checked = [sum(record.checked for record in answer_rounds) for answer_rounds in rounds]
    return share_interval(accepted, checked, resamples=RESAMPLES)


def _is_text_only(cell: DecoderResult) -> bool:
    return bool(cell.params.get("text_only"))


def _keeps_all_tokens(cell: DecoderResult) -> bool:
    return bool(cell.params.get("guidance") == "none" and not _is_text_only(cell))


def _window(cell: DecoderResult) -> Hashable:
    window: Hashable = cell.params.get("gamma")
    return window


def _largest_group(
    cells: Iterable[DecoderResult],
    distinct: Callable[[DecoderResult], Hashable],
    shared: Callable[[DecoderResult], Hashable] = lambda cell: None,
    free: Sequence[str] = (),
) -> list[DecoderResult]:
    """Return the largest group of results that share setting, `shared` and draft; the newest of equal ones.

    Args:
        cells: oldest first.
        distinct: what the group should have as many different values of as possible.
        shared: an additional value that must be equal.
        free: settings in which results of one cell may differ.

    Raises:
        UserError: results differ in another setting that must be the same.
    """
    groups: dict[Hashable, list[DecoderResult]] = {}
    for cell in cells:
        groups.setdefault((cell.setting, shared(cell)), []).append(cell)
    if not groups:
        return []
    # Break ties by the number of samples.
    largest = max(
        groups.values(),
        key=lambda group: (len(set(map(distinct, group))), group[0].row["n_samples"]),
    )
    drafts = Counter(cell.draft for cell in largest if cell.draft)
    common_draft = drafts.most_common(1)[0][0] if drafts else None
    # Results with a speed-up come last, so that they replace results without.
    return newest_per_cell(
        [cell for cell in largest if cell.draft in (None, common_draft)], ("engine.compare", *free)
    )


def _at_one_ratio(cells: Sequence[DecoderResult]) -> list[DecoderResult]:
    between = {(cell.row["method"], cell.ratio) for cell in cells if 0 < cell.ratio < 1}
    counts = Counter(ratio for _, ratio in between)
    # Break ties by the smallest ratio.
    ratio = min(counts, key=lambda candidate: (-counts[candidate], candidate), default=None)
    covered = {cell.name for cell in cells if cell.ratio == ratio}
    selected = [
        cell
        for cell in cells
        if cell.ratio == ratio or (cell.name not in covered and cell.ratio in (0, 1))
    ]
    return sorted(selected, key=_order)


def _order(cell: DecoderResult) -> tuple[int, str]:
    method = cell.row["method"]
    return (ORDER.index(method) if method in ORDER else len(ORDER), cell.name)
