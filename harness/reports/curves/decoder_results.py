"""Select the results of speculative decoders to compare: decoders, ratios of the draft, guidances of the draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculative_summary import steady_rounds
from espalier.harness.evaluation.samples import finished_samples
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    newest_per_cell,
    read_results,
    results_of,
    tidy,
)
from espalier.harness.specs.comparable import identity, passed_over
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

#: The decoder of the ratio and guidance studies; its defaults are the paper's.
GUIDED = "parallelvlm"

#: What the study of the draft's input varies, with the paper's values.
VARIED = {key: getattr(ParallelVLM(), key) for key in ("guidance", "L", "text_only")}

#: What results must share to be compared, besides their settings.
SETTING = ["benchmark", "n_samples", "seed", "device", "threads"]

NOT_SHOWN = "no piece shows them (older ones of a cell, other drafts, windows, answers or machines)"

PARAMS = {key: f"extra.params.{key}" for key in (*VARIED, "gamma")}
FIGURES = ("mismatches", "overlap", "speedup_decode", "speedup_predicted", "speedup_end_to_end")


def read_decoders(store: Path, model: str | None = None, where: Sequence[str] = ()) -> pd.DataFrame:
    """Return the decoders' results, oldest first; results with speed-ups come after those without.

    Columns that `tidy` lacks: settings of draft and machine, `PARAMS` and `FIGURES`; `timed`, whether draft and
    target ran in parallel if the method does; `varies`, whether the run belongs to the study of the draft's input.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings.

    Raises:
        UserError: there are no results, they are of several models and `model` is None, or none matches `where`.
    """

    def is_decoder(result: StoredResult) -> bool:
        return bool(result.row["extra"].get("speculative"))

    results = results_of(
        read_results(store), is_decoder, "a decoder", store, "speculative", model, where
    )
    frame = tidy(
        results,
        threads="extra.environment.threads",
        draft="settings.draft.name",
        transport="settings.engine.transport",
        **PARAMS,
        **{name: f"extra.speculative.{name}" for name in FIGURES},
    )
    frame["timed"] = ~(frame.overlap.astype(bool) & (frame.transport == "sequential"))
    frame["varies"] = [
        result.row["method"] == GUIDED
        and any(
            result.row["extra"]["params"].get(key, value) != value for key, value in VARIED.items()
        )
        for result in frame.result
    ]
    return frame.sort_values("mismatches", key=lambda counts: counts.notna(), kind="stable")


def decoders(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the decoders' results by benchmark, at one ratio per benchmark where decoders have a choice.

    The ratio is the most frequent one; for a decoder without a result there, its results at 0 or 1 are used.
    """
    candidates = frame[frame.timed & ~frame.varies]
    return {
        benchmark: _at_one_ratio(_largest(group, "method"))
        for benchmark, group in candidates.groupby("benchmark")
    }


def timed(compared: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the results with a speed-up, by benchmark; plain decoding has none over itself."""
    cells = {name: cells[cells.speedup_decode.notna()] for name, cells in compared.items()}
    return {name: members for name, members in cells.items() if len(members)}


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Return at least two results of the guided decoder by ratio; a draft without visual tokens is last, at 1."""
    plain = ~frame.varies | frame.text_only.astype(bool)
    group = _largest(frame[(frame.method == GUIDED) & frame.timed & plain], "ratio", "gamma")
    return group.sort_values("ratio", kind="stable") if len(group) > 1 else group[:0]


def guidances(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the guided decoder by guidance of the draft's tokens and by layer, which sorts them."""
    sees_all = (frame.guidance == "none") & ~frame.text_only.astype(bool)
    chosen = (frame.method == GUIDED) & (frame.ratio < 1) & ((frame.ratio > 0) | sees_all)
    cells = frame[chosen].assign(cell=[identity(result.row) for result in frame[chosen].result])
    # Acceptance depends on the window, not on the transport.
    group = _largest(cells, "cell", "gamma", free=("engine.transport",))
    if not group.varies.any():
        return group[:0]
    depths = group.L.map(lambda layer: layer or 0)
    return group.assign(depth=depths).sort_values(["depth", "ratio", "curve"])


def omissions(store: Path, frame: pd.DataFrame, shown: pd.DataFrame) -> list[str]:
    """Return lines that count a store's results of decoders that are not among those shown."""
    older = [
        result
        for result in read_results(store)
        if "settings" not in result.row and result.row["extra"].get("speculative")
    ]
    return [
        *passed_over(len(older), "without settings, from an older version"),
        *passed_over(len(set(frame.index) - set(shown.index)), NOT_SHOWN),
    ]


def accepted_share(result: StoredResult) -> Interval | None:
    """Return the share of checked tokens accepted, with the 95 % bootstrap interval over answers; None without checks.

    Whole answers are resampled, because tokens of one answer are accepted or refused together. Without a journal, or
    with one answer, there is no interval.
    """
    value = result.row["extra"]["speculative"].get("acceptance")
    if value is None:
        return None
    samples = finished_samples(RunDir(result.path).journal.entries()).values()
    records = [sample.record.decoding for sample in samples]
    answers = [DecodingRecord.from_entry(record) for record in records if record is not None]
    rounds = [steady_rounds([record]).rounds for record in answers if record.degraded is None]
    if len(rounds) < 2:
        return Interval(value, value, value)
    accepted = [sum(each.accepted for each in answer) for answer in rounds]
    checked = [sum(each.checked for each in answer) for answer in rounds]
    return share_interval(accepted, checked, resamples=RESAMPLES)


def _largest(
    frame: pd.DataFrame, distinct: str, shared: str | None = None, free: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the largest group of results that share `SETTING`, `shared` and draft; the newest of equal ones.

    Args:
        frame: oldest first.
        distinct: the column that the group should have as many different values of as possible.
        shared: a further column that must be equal.
        free: settings in which results of one cell may differ.

    Raises:
        UserError: results differ in another setting that must be the same.
    """
    if frame.empty:
        return frame
    by = [*SETTING, *([] if shared is None else [shared])]
    # Break ties by the number of samples.
    largest = max(
        (group for _, group in frame.groupby(by, sort=False, dropna=False)),
        key=lambda group: (group[distinct].nunique(), group.n_samples.iloc[0]),
    )
    common = [draft for draft, _ in Counter(largest.draft.dropna()).most_common(1)]
    candidates = largest[largest.draft.isna() | largest.draft.isin(common)]
    # Results with a speed-up come last, so that they replace results without.
    newest = newest_per_cell([*candidates.result], ("engine.compare", *free))
    return candidates.loc[[result.path for result in newest]]


def _at_one_ratio(frame: pd.DataFrame) -> pd.DataFrame:
    between = frame[(frame.ratio > 0) & (frame.ratio < 1)]
    counts = Counter(ratio for _, ratio in set(zip(between.method, between.ratio, strict=True)))
    # Break ties by the smallest ratio.
    ratio = min(counts, key=lambda candidate: (-counts[candidate], candidate), default=None)
    covered = set(frame.curve[frame.ratio == ratio])
    chosen = (frame.ratio == ratio) | (frame.ratio.isin([0, 1]) & ~frame.curve.isin(covered))
    places = {method: place for place, method in enumerate(ORDER)}
    order = frame.method.map(lambda method: places.get(method, len(ORDER)))
    return frame.assign(order=order)[chosen].sort_values(["order", "curve"], kind="stable")
