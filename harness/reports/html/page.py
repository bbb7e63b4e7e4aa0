"""The page: results, curves with intervals, figures and tables as data, style and script in one file.

Figures of decoders, caches and denoised answers are drawn from the given results alone.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from espalier.harness.errors import UserError, first_words
from espalier.harness.paths import DEMO, short_path
from espalier.harness.reports.curves import cache_report, decoder_report, diffusion_report
from espalier.harness.reports.curves.comparison import averages, panel_of
from espalier.harness.reports.curves.curve_points import CONTROLS, FULL, CurvePanel
from espalier.harness.reports.curves.figures import UNDRAWABLE, looks
from espalier.harness.reports.curves.report_page import Report
from espalier.harness.reports.frame import StoredResult, at, stored_results
from espalier.harness.reports.printed_text import readable, render
from espalier.harness.reports.tables.rebuild import rebuild, requested_tables
from espalier.harness.reports.tables.table_formats import fragment
from espalier.harness.specs.commands import RUN
from espalier.harness.specs.comparable import CELL, Row, amount, identity, name, settings_digest
from espalier.harness.stats import SMALLEST, Interval
from espalier.harness.store.index import ReadRun, Walk, memoized, walk, walk_once
from espalier.harness.store.row_text import is_marked, prompt_notes, prompt_settings

#: Blocks of a row that the page shows or compares.
BLOCKS = (
    *("run_key", *CELL, "keep", "metrics", "settings", "time", "flops", "memory"),
    *("extra.headline", "extra.higher_is_better", "extra.aggregation", "extra.unparsed"),
    *("extra.label", "extra.params", "extra.sites", "extra.environment"),
    *("extra.speculative", "extra.cache", "extra.diffusion"),
    *("extra.discriminates", "extra.first_token", "extra.code", "extra.plugins"),
    *("extra.speedup", "extra.time_iqr"),
)


@dataclass
class PageResults:
    """Results, oldest first; excluded cases and notes by reason."""

    rows: list[StoredResult] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, case: str) -> None:
        """Record an excluded case."""
        self.left_out.setdefault(reason, []).append(case)

    def skip(self, run: ReadRun) -> None:
        """Record a run without a row: a damaged one, or one that is not finished."""
        if run.problem is None:
            self.drop("the run is not finished", run.path.name)
        else:
            reason = "the file is damaged, or of another version"
            self.drop(reason, str(run.problem).partition(";")[0])

    def sieve(
        self,
        reason: str,
        is_out: Callable[[Row], bool],
        words: Callable[[Row], str] = lambda row: "",
    ) -> None:
        """Exclude the results that `is_out` holds for, each with `words` after its description."""
        kept = []
        for result in self.rows:
            if is_out(result.row):
                self.drop(reason, f"{case_of(result.row)}{words(result.row)}")
            else:
                kept.append(result)
        self.rows = kept

    def newest(self, key: Callable[[Row], Hashable], reason: str) -> None:
        """Exclude all results of a key but the last."""
        last = {key(result.row): id(result.row) for result in self.rows}
        kept = {*last.values()}
        self.sieve(reason, lambda row: id(row) not in kept)


def gather(stores: Sequence[Path], positions: str, read: Walk = walk) -> PageResults:
    """Return the comparable results of run stores and folders of tables.

    Args:
        stores: folders; of a run that is in several, the row written last is used.
        positions: the position policy of the results.
        read: reads run stores; its rows have at least `BLOCKS`.

    Raises:
        UserError: a table is damaged, or no result remains.

    Cost: about 30 us for each result of a store with an index; scores of samples are read later.
    """
    results = PageResults()
    for store in stores:
        for result in stored_results(store, BLOCKS, results.skip, read):
            missing = [key for key in (*CELL, "metrics") if key not in result.row]
            if missing:
                case = f"{result.path.name} lacks {', '.join(missing)}"
                results.drop("the row is incomplete", case)
            else:
                results.rows.append(result)
    results.rows.sort(key=lambda result: (result.committed, result.row["run_key"]))
    results.newest(lambda row: row["run_key"], "the run is in several stores")
    results.sieve(
        "the row is of an older version without settings", lambda row: "settings" not in row
    )
    # A method that the policy does not apply to has none.
    policy = at("settings.engine.positions")
    results.sieve(
        f"another position policy than {positions}",
        lambda row: policy(row) not in (None, positions),
        lambda row: f", {policy(row)}",
    )
    # Of each model and benchmark only the results with the most samples can be paired. A decoder answers as the model
    # does: its speed counts with any number of samples.
    drafts = at("extra.speculative")
    largest: dict[tuple[str, str], int] = defaultdict(int)
    for result in results.rows:
        if not drafts(result.row):
            largest[_place(result.row)] = max(largest[_place(result.row)], result.row["n_samples"])
    results.sieve(
        "another number of samples",
        lambda row: not drafts(row) and row["n_samples"] != largest[_place(row)],
        lambda row: f", {row['n_samples']} and not {largest[_place(row)]}",
    )
    digested = memoized(settings_digest)
    results.newest(
        lambda row: (*identity(row), digested(row["settings"])),
        "the cell was run twice, by other code; the newer row counts",
    )
    if not results.rows:
        raise UserError(
            f"--store {', '.join(map(str, stores))} holds no rows for a report; valid: {short_path(DEMO)}"
        )
    commits = Counter(
        str(result.row["extra"].get("environment", {}).get("commit")) for result in results.rows
    )
    if len(commits) > 1:
        cases = [f"{commit}: {count} rows" for commit, count in commits.most_common()]
        results.notes["rows of several code versions are compared"] = cases
    return results


_place = itemgetter("model", "benchmark")


def case_of(row: Row) -> str:
    """Return a short description of a row."""
    return f"{row['run_key']}: {name(row)} at {amount(row)}, {row['model']} on {row['benchmark']}"


#: Kinds of methods by site, in the order of the filter.
KINDS = (
    "unpruned",
    "control",
    "before the LLM",
    "inside the LLM",
    "cache compressor",
    "denoising steps",
    "speculative decoder",
)


def kind_of(row: Row) -> str:
    """Return the kind of a row's method."""
    extra = row["extra"]
    sites = extra.get("sites") or []
    tests = {
        "unpruned": row["method"] == FULL,
        "speculative decoder": extra.get("speculative"),
        "control": row["method"] in CONTROLS,
        "cache compressor": extra.get("cache") and not sites,
        "denoising steps": extra.get("diffusion"),
        "inside the LLM": sites and sites[0]["where"] == "layer" and sites[0]["layer"] > 0,
        "before the LLM": True,
    }
    return next(kind for kind, holds in tests.items() if holds)


def _headline(key: str) -> Callable[[Row], Any]:
    """Return a function that reads a number of the headline metric."""
    return lambda row: row["metrics"].get(row["extra"].get("headline"), {}).get(key)


def _milliseconds(row: Row) -> float | None:
    """Return the time of tower and prefill, None where one of them was not measured."""
    times = [at(f"time.{phase}_ms")(row) for phase in ("vision", "prefill")]
    return None if None in times else sum(times)


def _quartile(end: int) -> Callable[[Row], float | None]:
    """Return a function that adds up a quartile over samples of the same two times."""

    def read(row: Row) -> float | None:
        times = [at(f"extra.time_iqr.{phase}")(row) for phase in ("vision", "prefill")]
        return None if None in times else sum(ends[end] for ends in times)

    return read


#: Columns of a line on the page: texts, of which it holds indices of a list, and numbers.
TEXTS: Mapping[str, Callable[[Row], str]] = {
    **{key: at(key) for key in ("model", "benchmark", "method")},
    "curve": name,
    "kind": kind_of,
    "metric": lambda row: readable(str(row["extra"].get("headline"))),
    "rule": at("budget_rule"),
    "device": lambda row: str(at("extra.environment.device_name")(row)),
    "key": at("run_key"),
}
NUMBERS: Mapping[str, Callable[[Row], float | None]] = {
    **{key: at(key) for key in ("ratio", "keep")},
    "seed": lambda row: row.get("seed", 0),
    "samples": at("n_samples"),
    **{key: _headline(key) for key in ("value", "stderr")},
    "flops": at("flops.share_of_full"),
    "ms": _milliseconds,
    **{f"ms_{end}": _quartile(place) for place, end in enumerate(("low", "high"))},
    **{
        f"faster{end}": at(f"extra.speedup.first_token.{key}")
        for end, key in (("", "ratio"), ("_low", "low"), ("_high", "high"))
    },
    "kv": at("memory.kv_bytes"),
    "higher": lambda row: int(row["extra"].get("higher_is_better", True)),
    "unread": lambda row: int(is_marked(row)),
}


def lines(rows: Sequence[StoredResult]) -> dict[str, Any]:
    """Return columns with a value for each result: numbers, and texts as indices of the list of texts."""
    texts: dict[str, list[str]] = {}
    columns: dict[str, list[Any]] = {}
    for key, text in TEXTS.items():
        cells = [text(result.row) for result in rows]
        if key == "curve":
            cells = _with_prompts(cells, rows)
        codes, names = pd.factorize(pd.Series(cells, dtype=object))
        columns[key], texts[key] = codes.tolist(), [*names]
    # Results of tables have no folder and no answers to show.
    folders = [result.path for result in rows]
    cells = [short_path(folder.parents[1]) if folder.is_dir() else "" for folder in folders]
    codes, names = pd.factorize(pd.Series(cells, dtype=object))
    columns["store"], texts["store"] = codes.tolist(), [*names]
    numbers = {key: [_short(of(result.row)) for result in rows] for key, of in NUMBERS.items()}
    return {"texts": texts, "columns": columns | numbers}


def _with_prompts(curves: Sequence[str], rows: Sequence[StoredResult]) -> list[str]:
    """Return names of curves, each with the settings of its prompt if rows of this name differ in them."""
    cells = [(*_place(result.row), curve) for result, curve in zip(rows, curves, strict=True)]
    notes = prompt_notes(cells, [prompt_settings(result.row) for result in rows])
    return [f"{curve} {note}".rstrip() for curve, note in zip(curves, notes, strict=True)]


def panels(results: PageResults) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return curves with intervals for each model, benchmark and budget rule, and averages over benchmarks.

    Curves that cannot be paired are excluded. Drafts and denoised answers have their own figures, because their ratio
    has another meaning.
    """

    def key(result: StoredResult) -> tuple[str, ...]:
        return tuple(result.row[name] for name in ("model", "benchmark", "budget_rule"))

    curve_results = [
        result
        for result in results.rows
        if not result.row["extra"].get("speculative") and not result.row["extra"].get("diffusion")
    ]
    page_panels = []
    measured: dict[tuple[str, str], list[CurvePanel]] = defaultdict(list)
    for (model, benchmark, rule), group in groupby(sorted(curve_results, key=key), key):
        rows = [*group]
        try:
            panel = panel_of(benchmark, rows)
        except UserError as error:
            results.drop(f"no curves of {model} on {benchmark}", str(error))
            continue
        for note in panel.notes:
            results.notes.setdefault(f"{model} on {benchmark}", []).append(note)
        kinds = {name(result.row): kind_of(result.row) for result in rows}
        page_panels.append(
            {
                **{"model": model, "benchmark": benchmark, "rule": rule},
                **{"metric": readable(panel.metric), "samples": panel.n_samples},
                "full": _ends(panel.full),
                "curves": [
                    {
                        **{"name": curve, "kind": kinds[curve], "floor": points.floor.iloc[0]},
                        "layer": points.layer.iloc[0],
                        "points": [_point(point) for point in points.itertuples()],
                    }
                    for curve, points in panel.points.groupby("curve", sort=False)
                ],
            }
        )
        measured[model, rule].append(panel)
    means = [
        {
            **{"model": model, "rule": rule, "curve": mean.curve, "ratio": mean.ratio},
            **{"keep": mean.keep, "benchmarks": len(compared)},
            "retention": _ends(mean.retention),
        }
        for (model, rule), compared in measured.items()
        for mean in averages(compared).itertuples()
    ]
    return page_panels, means


def _point(point: Any) -> dict[str, Any]:
    return {
        "ratio": point.ratio,
        "keep": point.keep,
        "flops": _short(point.flops_share),
        "score": _ends(point.score),
        "retention": _ends(point.retention),
        "gain": _ends(point.gain),
        "chance": _short(point.gain_p_holm),
        "bound": int(point.gain_p == SMALLEST),
        "best": _short(point.best_p),
        "unread": int(point.unread),
    }


def decoders(results: PageResults) -> list[dict[str, Any]]:
    """Return a line for each result of a speculative decoder, the fastest of a benchmark first."""
    lines = []
    for row in (result.row for result in results.rows):
        if figures := row["extra"].get("speculative"):
            speeds = {
                key: [
                    _short(number)
                    for number in (
                        figures.get(f"speedup_{key}"),
                        *(figures.get(f"speedup_{key}_interval") or (None, None)),
                    )
                ]
                for key in ("decode", "end_to_end")
            }
            texts = {key: row[key] for key in ("model", "benchmark", "ratio")}
            numbers = {
                key: _short(figures.get(key)) for key in ("tokens_per_target_forward", "acceptance")
            }
            lines.append(
                {**texts, **speeds, **numbers, "curve": name(row), "samples": row["n_samples"],
                 "device": str(at("extra.environment.device_name")(row))}
            )  # fmt: skip
    return sorted(
        lines, key=lambda line: (line["model"], line["benchmark"], -(line["decode"][0] or 0))
    )


def styles(page_lines: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the look of each curve by name, from the columns that `lines` returned."""
    texts, columns = page_lines["texts"], page_lines["columns"]
    pairs = set(zip(columns["curve"], columns["kind"], strict=True))
    return looks(
        (texts["curve"][curve], texts["kind"][kind] in ("control", "unpruned"))
        for curve, kind in pairs
    )


def unscored(results: PageResults) -> None:
    """Exclude results without a value of their headline metric."""
    value = _headline("value")
    results.sieve("the headline has no number", lambda row: value(row) is None)


def _ends(interval: Interval | None) -> list[float | None] | None:
    if interval is None:
        return None
    return [_short(end) for end in (interval.value, interval.low, interval.high)]


def _short(number: float | None) -> float | None:
    """Return a number with five significant digits, as many as the page shows."""
    if number is None or not isfinite(number):
        return None
    return number if isinstance(number, int) else float(f"{number:.5g}")


#: Largest convenient size of a page in bytes.
LIMIT = 10_000_000

HERE = Path(__file__).parent
SCRIPTS = (
    "state.js",
    "plots.js",
    "tables.js",
    "leaders.js",
    "board.js",
    "curves.js",
    "methods.js",
    "page.js",
)


def collect(
    stores: Sequence[Path],
    positions: str,
    draw: Callable[[PageResults], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the content of the page.

    Args:
        stores: run stores and folders of tables.
        positions: the position policy of the results.
        draw: runs methods of results with the embedded model and returns what they keep (overlays.py); None: nothing
            is run.

    Raises:
        UserError: there are no results, or a table is damaged.
    """
    # The tables read first: they name their blocks, and the page adds its own.
    read = walk_once(BLOCKS)
    tables, table_notes = rebuild(requested_tables("all", []), stores, read=read)
    results = gather(stores, positions, read)
    unscored(results)
    page_panels, means = panels(results)
    drawings = {"pictures": [], "curves": {}} if draw is None else draw(results)
    page_lines = lines(results.rows)
    content: dict[str, Any] = {
        "stores": [short_path(store.absolute()) for store in stores],
        "positions": positions,
        "kinds": KINDS,
        "rows": page_lines,
        "styles": styles(page_lines),
        "panels": page_panels,
        "averages": means,
        "overlays": drawings,
        "decoders": decoders(results),
        "pictures": pictures(results, stores),
        "broken": {},
        "tables": [
            {
                "name": table.name,
                "paper": table.paper.paper,
                "title": table.title.removeprefix(f"{table.paper.paper}, "),
                "html": fragment(table),
            }
            for table in tables
        ],
    }
    if table_notes:
        results.notes["published tables"] = table_notes
    # Last, because every step before can exclude results.
    return {**content, "left_out": results.left_out, "notes": results.notes}


def assemble(content: dict[str, Any]) -> str:
    """Return the page as one self-contained file."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return render(
        "page.html",
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        stores=", ".join(content["stores"]),
        # The data must not close its element.
        data=data.replace("<", "\\u003c"),
        script="\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


def pictures(results: PageResults, stores: Sequence[Path]) -> list[dict[str, Any]]:
    """Return titles, captions and figures of each kind of results, or how to get such results."""
    entries: list[dict[str, Any]] = []
    for report in (decoder_report.REPORT, cache_report.REPORT, diffusion_report.REPORT):
        drawn = _draw(report, results, stores)
        for stem, caption in report.captions.items():
            if stem in drawn:
                encoded = base64.b64encode(drawn[stem]).decode()
                source = f"data:image/svg+xml;base64,{encoded}"
                entries.append({"title": report.title, "caption": caption, "source": source})
        if not drawn:
            presets = dict.fromkeys(report.presets.values())
            commands = " or ".join(f"{RUN} {preset}" for preset in presets)
            caption = f"No rows of it can be drawn. Such rows come from {commands}."
            entries.append({"title": report.title, "caption": caption, "source": None})
    return entries


def _draw(report: Report, results: PageResults, stores: Sequence[Path]) -> dict[str, bytes]:
    """Return the figures of the first store with results of the report's kind, of the model with most of them."""
    kind_results = [result for result in results.rows if result.row["extra"].get(report.block)]
    models = Counter(result.row["model"] for result in kind_results)
    with TemporaryDirectory() as folder:
        for store in stores:
            if not any(store in result.path.parents for result in kind_results):
                continue
            try:
                files, _ = report.write(store, Path(folder), models.most_common(1)[0][0])
                return {path.stem: path.read_bytes() for path in files if path.suffix == ".svg"}
            except UNDRAWABLE as error:
                reason = error if isinstance(error, UserError) else first_words(error)
                results.drop(f"no picture of {report.title.lower()}", f"{store}: {reason}")
    return {}
