"""Tables and figures of speculative decoders.

`python -m espalier.harness.reports.curves.decoder_report --store results --write lab/measured/speculative`
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculative_summary import steady_rounds
from espalier.harness.reports.curves.curve_table import Columns, cell_table
from espalier.harness.reports.curves.figures import (
    COLOURS,
    GREYS,
    MARKERS,
    Plot,
    Series,
    Spot,
    draw,
    marker,
    percent_spot,
)
from espalier.harness.reports.curves.report_page import CurvesPage, Report
from espalier.harness.reports.curves.stored_rows import (
    newest_per_cell,
    read_results,
    results_of,
    tidy,
)
from espalier.harness.reports.curves.terminal_tables import FIGURES
from espalier.harness.reports.frame import StoredResult
from espalier.harness.specs.comparable import amount, identity, passed_over
from espalier.harness.stats import Interval, share_interval
from espalier.harness.store import RunDir

#: Order of decoders, older ideas first; others follow by name.
ORDER = (
    *("autoregressive", "vanilla_sd", "onsd", "sd_tree"),
    *("specvlm_sd", "std", "pearl", "parallelvlm"),
)

#: Bootstrap resamples for a table cell; the end points vary by about 0.1 standard errors.
RESAMPLES = 2000

#: The decoder of the ratio and guidance studies; its defaults are the paper's.
GUIDED = "parallelvlm"

#: What the study of the draft's input varies.
VARIED = ("guidance", "L", "text_only")

#: What results must share to be compared, besides their settings.
SETTING = ["benchmark", "n_samples", "seed", "device", "threads"]

NOT_SHOWN = "no piece shows them (older ones of a cell, other drafts, windows, answers or machines)"

PARAMS = {key: f"extra.params.{key}" for key in (*VARIED, "gamma")}
NUMBERS = ("mismatches", "overlap", "speedup_decode", "speedup_predicted", "speedup_end_to_end")


def read_decoders(store: Path, model: str | None = None, where: Sequence[str] = ()) -> pd.DataFrame:
    """Return the decoders' results, oldest first; results with speed-ups come after those without.

    Columns that `tidy` lacks: settings of draft and machine, `PARAMS` and `NUMBERS`; `timed`, whether draft and
    target ran in parallel if the method does; `varies`, whether the run belongs to the study of the draft's input.

    Args:
        store: root of the run store.
        model: required if the store has several.
        where: `key=value` conditions on settings.

    Raises:
        UserError: there are no results, they are of several models and `model` is None, or none matches `where`.
    """
    results = results_of(
        read_results(store),
        lambda result: bool(result.row["extra"].get("speculative")),
        "a decoder",
        store,
        "speculative",
        model,
        where,
    )
    frame = tidy(
        results,
        threads="extra.environment.threads",
        draft="settings.draft.name",
        transport="settings.engine.transport",
        **PARAMS,
        **{name: f"extra.speculative.{name}" for name in NUMBERS},
    )
    frame["timed"] = ~(frame.overlap.astype(bool) & (frame.transport == "sequential"))
    frame["varies"] = [
        result.row["method"] == GUIDED and _varies(result.row["extra"]["params"])
        for result in frame.result
    ]
    return frame.sort_values("mismatches", key=lambda counts: counts.notna(), kind="stable")


def _varies(params: Mapping[str, Any]) -> bool:
    """Return whether a result belongs to the study of the draft's input: a value is not the paper's."""
    # Imported here: methods need torch.
    from espalier.methods.parallelvlm import ParallelVLM

    method = ParallelVLM()
    return any(params.get(key, getattr(method, key)) != getattr(method, key) for key in VARIED)


def decoders(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the decoders' results by benchmark, at one ratio per benchmark where decoders have a choice.

    The ratio is the most frequent one; for a decoder without a result there, its results at 0 or 1 are used.
    """
    candidates = frame[frame.timed & ~frame.varies]
    return {
        benchmark: _at_one_ratio(_largest(group, "method"))
        for benchmark, group in candidates.groupby("benchmark")
    }


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


def accepted_share(result: StoredResult) -> Interval | None:
    """Return the share of checked tokens accepted, with the 95 % bootstrap interval over answers; None without checks.

    Whole answers are resampled, because tokens of one answer are accepted or refused together. Without a journal, or
    with one answer, there is no interval.
    """
    value = result.row["extra"]["speculative"].get("acceptance")
    if value is None:
        return None
    # Imported here: the records of samples need torch.
    from espalier.harness.evaluation.samples import finished_samples

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


#: Lines of speed-ups: name, column, colour and mark.
SPEEDS = (
    ("decoding alone", "speedup_decode", COLOURS[1], "o"),
    ("end to end", "speedup_end_to_end", COLOURS[2], "s"),
    ("promised", "speedup_predicted", GREYS[1], "D"),
)

#: Legend and colour of bars by whether draft and target run at the same time; apart in greyscale as well.
SIDES = {False: ("draft and target take turns", COLOURS[5]), True: ("side by side", COLOURS[0])}

TIMES = "times as fast as plain decoding"
PLAIN = ("plain decoding", Interval(1.0, 1.0, 1.0))
ACCEPTED = "drafted tokens accepted (%)"


def setting_line(cells: pd.DataFrame) -> str:
    """Return one line on how results were made: models, device, threads, type, answers."""
    row = cells.result.iloc[0].row
    drafts = dict.fromkeys(cells.draft.dropna())
    environment = row["extra"].get("environment", {})
    threads = environment.get("threads")
    parts = [
        row["model"] + (f" with {', '.join(drafts)} as draft" if drafts else ""),
        environment.get("device_name"),
        threads and f"{threads} thread{'s' if threads > 1 else ''}",
        environment.get("dtype"),
        f"{', '.join(map(str, sorted(set(cells.n_samples))))} answers a row",
    ]
    return "; ".join(part for part in parts if part)


def draw_decoders(by_benchmark: Mapping[str, pd.DataFrame]) -> Figure:
    """Return bars of the decode speed-up, one plot for each benchmark."""
    plots = []
    for name, cells in by_benchmark.items():
        sides = cells.overlap.map(bool).to_numpy()
        decode = [
            Spot(at, speed, text=f"{speed:.2f}") for at, speed in enumerate(cells.speedup_decode)
        ]
        bars = [
            Series(
                label,
                [spot for spot in decode if sides[int(spot.at)] == side],
                {"color": colour},
                solid=True,
                key=side in sides,
            )
            for side, (label, colour) in SIDES.items()
        ]
        diamond = marker("D", markerfacecolor="white", zorder=4)
        thick = marker("|", markersize=10, markeredgewidth=2, zorder=4)
        marks = [
            Series(
                "promised by acceptance and single forwards",
                _spots(cells.speedup_predicted),
                diamond,
                key=True,
            ),
            Series(
                "end to end, prefill included", _spots(cells.speedup_end_to_end), thick, key=True
            ),
        ]
        plots.append(
            Plot(
                "bars",
                f"{name}, {cells.n_samples.iloc[0]} answers",
                [*bars, *marks],
                values=TIMES,
                ticks={float(row): curve for row, curve in enumerate(cells.curve)},
                level=PLAIN,
                from_zero=True,
            )
        )
    every = pd.concat([*by_benchmark.values()])
    pruned = sorted({ratio for ratio in every.ratio if 0 < ratio < 1})
    notes = [f"where a draft does without some visual tokens: {100 * r:.4g} %" for r in pruned]
    return draw(plots, "How much faster decoders generate", _foot(every, *notes))


def draw_ratio(cells: pd.DataFrame) -> Figure:
    """Return speed-ups, acceptance and mean run over the draft's ratios, evenly spaced."""
    blind = [*cells.text_only.map(bool)]
    ticks = {
        float(at): "words\nonly" if words else f"{100 * ratio:.4g}"
        for at, (words, ratio) in enumerate(zip(blind, cells.ratio, strict=True))
    }
    shares = [accepted_share(result) for result in cells.result]
    accepted = [percent_spot(at, share) for at, share in enumerate(shares) if share is not None]
    speeds = [
        line
        for name, column, colour, shape in SPEEDS
        for line in _split(name, _spots(cells[column]), colour, shape, blind)
    ]
    accepted_lines = _split("", accepted, COLOURS[0], "o", blind)
    run_lines = _split("", _spots(cells.accepted_run), COLOURS[0], "o", blind)
    without = "visual tokens the draft does without (%)"
    in_a_row = "tokens accepted in a row, mean (log scale)"
    plots = [
        Plot("curve", TIMES, speeds, ticks=ticks, level=PLAIN, from_zero=True),
        Plot("curve", ACCEPTED, accepted_lines, ticks=ticks, from_zero=True),
        # Log scale: a draft that sees everything is accepted for without_layer answers, others for a token or two.
        Plot("curve", in_a_row, run_lines, ticks=ticks, log_values=True, places=without),
    ]
    first = cells.result.iloc[0].row
    windows = ", ".join(f"{cell.row['extra']['speculative']['gamma']:g}" for cell in cells.result)
    foot = _foot(cells, _bars(shares), f"tokens drafted in a round, from left to right: {windows}")
    return draw(plots, f"{first['method']} on {first['benchmark']}", foot, columns=1)


def draw_guidance(cells: pd.DataFrame) -> Figure:
    """Return acceptance by guidance of the draft's tokens, and by the layer of the guidance."""
    shares = {result.path: accepted_share(result) for result in cells.result}
    layers, pruned = cells.L.notna(), cells.ratio > 0
    without_layer = ~layers & ~cells.text_only.map(bool)
    full, guided, layered = (
        cells[without_layer & ~pruned],
        cells[without_layer & pruned],
        cells[layers & pruned],
    )
    ratios = sorted({*guided.ratio, *layered.ratio})
    looks = [
        {"color": colour, "marker": shape, "markersize": 5.5}
        for _, colour, shape in zip(ratios, cycle(COLOURS), cycle(MARKERS), strict=False)
    ]
    level = shares[full.index[0]] if len(full) else None
    value = None if level is None else 100 * level.value
    shared: dict[str, Any] = {
        "values": ACCEPTED,
        "level": None
        if value is None
        else ("draft sees everything", Interval(value, value, value)),
    }

    def series(group: pd.DataFrame, column: str, places: Mapping[Any, float]) -> list[Series]:
        """Return the marks of each ratio at the places of a column's values, a line along layers."""
        line = {} if column == "L" else {"linestyle": ""}
        members = [group[group.ratio == ratio].sort_values(column) for ratio in ratios]
        return [
            Series(
                f"{100 * ratio:.4g} % of the tokens left out",
                [
                    percent_spot(places[at], share)
                    for at, path in zip(part[column], part.index, strict=True)
                    if (share := shares[path])
                ],
                {**look, **line},
                key=True,
            )
            for ratio, part, look in zip(ratios, members, looks, strict=True)
        ]

    plots = []
    if len(guided):
        ranked = guided.sort_values(
            ["ratio", "acceptance", "guidance"], ascending=[False, False, True]
        )
        names = {name: float(row) for row, name in enumerate(dict.fromkeys(ranked.guidance))}
        ticks = {row: name for name, row in names.items()}
        marks = series(guided, "guidance", names)
        title = "by what chooses its visual tokens"
        plots.append(Plot("dots", title, marks, ticks=ticks, shift=0.22, **shared))
    if len(layered):
        depths = {layer: float(layer) for layer in sorted(set(layered.L))}
        ticks = {depth: f"{layer}" for layer, depth in depths.items()}
        places, title = "layer L of the target that is read", layered.guidance.iloc[0]
        marks = series(layered, "L", depths)
        looks_at = {"places": places, "ticks": ticks, "shift": 0.08, **shared}
        plots.append(Plot("scatter", f"{title}, by depth", marks, **looks_at))
    first = cells.result.iloc[0].row
    title = f"What {first['method']}'s draft should see, on {first['benchmark']}"
    return draw(plots, title, _foot(cells, _bars([*shares.values()])))


def _spots(values: Iterable[float | None]) -> list[Spot]:
    return [Spot(at, value) for at, value in enumerate(values)]


def _split(
    name: str, spots: Sequence[Spot], colour: str, shape: str, blind: Sequence[bool]
) -> list[Series]:
    """Return a line over the ratios; a text-only draft is a hollow mark apart from it at the end."""
    look = {"color": colour, "marker": shape, "markersize": 5, "clip_on": False, "zorder": 3}
    hollow = {**look, "linestyle": "", "markerfacecolor": "white"}
    seeing = [spot for spot in spots if not blind[int(spot.at)]]
    words = [spot for spot in spots if blind[int(spot.at)]]
    label = colour if name else None
    line = Series(name, seeing, look, None if words else label)
    return [line, Series(name, words, hollow, label)] if words else [line]


def _bars(shares: Sequence[Interval | None]) -> str:
    if any(share is not None and share.low < share.high for share in shares):
        return "bars: 95 % bootstrap intervals over answers"
    return ""


def _foot(cells: pd.DataFrame, *notes: str) -> str:
    return "\n".join([setting_line(cells), *filter(None, notes)])


PRESETS = {
    "decoders": "+experiment=speculative",
    "ratio": "+experiment=speculative_ratio",
    "guidance": "+experiment=speculative_guidance",
}

#: Columns of a table of decoders.
COLUMNS: Columns = {
    "method": lambda cell: cell.curve,
    "ratio": lambda cell: amount(cell.result.row),
    **{
        head: lambda cell, text=text: text(cell.result.row)  # type: ignore[misc]
        for head, text in FIGURES.items()
    },
}

#: Columns of the table of guidances; times are in the other tables.
GUIDANCES: Columns = {
    "guidance": lambda cell: cell.guidance,
    "L": lambda cell: "its own" if cell.L is None else str(cell.L),
    "ratio": COLUMNS["ratio"],
    "accepted": lambda cell: share.percent if (share := accepted_share(cell.result)) else "-",
    "mean run": lambda cell: "-" if cell.accepted_run is None else f"{cell.accepted_run:.2f}",
}


def read_page(store: Path, model: str | None, where: Sequence[str]) -> CurvesPage:
    """Return the page of a store's decoders; Raises as `read_decoders`."""
    frame = read_decoders(store, model, where)
    compared, by_ratio, by_guidance = decoders(frame), ratios(frame), guidances(frame)
    # Plain decoding has no speed-up over itself.
    speeds = {name: cells[cells.speedup_decode.notna()] for name, cells in compared.items()}
    timed = {name: cells for name, cells in speeds.items() if len(cells)}
    figures = {"decoders": draw_decoders(timed)} if timed else {}
    if len(by_ratio):
        figures["ratio"] = draw_ratio(by_ratio)
    if len(by_guidance):
        figures["guidance"] = draw_guidance(by_guidance)

    def table(cells: pd.DataFrame, columns: Columns = COLUMNS) -> Any:
        return (setting_line(cells), cell_table(cells, columns)) if len(cells) else ()

    values = {
        "guided": GUIDED,
        "compared": [(name, *table(cells)) for name, cells in compared.items()],
        "ratios": table(by_ratio),
        "guidances": table(by_guidance, GUIDANCES),
    }
    # Results of decoders that are not shown.
    older = [
        result
        for result in read_results(store)
        if "settings" not in result.row and result.row["extra"].get("speculative")
    ]
    used = pd.concat([*compared.values(), by_ratio, by_guidance])
    notes = [
        *passed_over(len(older), "without settings, from an older version"),
        *passed_over(len(set(frame.index) - set(used.index)), NOT_SHOWN),
    ]
    parts = dict(zip(PRESETS, (timed, by_ratio, by_guidance), strict=True))
    return CurvesPage(values, figures, parts, notes)


REPORT = Report(
    "decoder_report",
    "Speculative decoding",
    "speculative",
    {
        "decoders": "Speed-up of each decoder over plain decoding of the same answers.",
        "ratio": "By the share of visual tokens that the draft does without.",
        "guidance": "Drafted tokens accepted, by what chooses the draft's visual tokens.",
    },
    "decoders.md",
    __doc__,
    read_page,
    PRESETS,
)
main = REPORT.main

if __name__ == "__main__":
    sys.exit(main())
