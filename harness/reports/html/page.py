"""The page: results, curves with intervals, figures and tables as data, style and script in one file.

Figures of decoders, caches and denoised answers are drawn from the given results, or else those of the repository.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from espalier.harness.errors import UserError, first_words
from espalier.harness.paths import DEMO, ROOT, short_path
from espalier.harness.reports.curves.comparison import averages, panel_of
from espalier.harness.reports.curves.curve_points import CONTROLS, FULL, CurvePanel, CurvePoint
from espalier.harness.reports.curves.plot_style import UNDRAWABLE, looks
from espalier.harness.reports.curves.stored_rows import StoredResult
from espalier.harness.reports.printed_text import readable, render
from espalier.harness.reports.tables.rebuild import rebuild, requested_tables
from espalier.harness.reports.tables.table_formats import fragment
from espalier.harness.specs.comparable import CELL, Row, amount, identity, name, settings_digest
from espalier.harness.stats import Interval
from espalier.harness.store.exports import is_table, read_tables
from espalier.harness.store.index import Walk, memoized, walk, walk_once
from espalier.harness.store.row_text import is_marked

#: Blocks of a row that the page shows or compares.
BLOCKS = (
    *("run_key", *CELL, "keep", "metrics", "settings", "time", "flops", "memory"),
    *("extra.headline", "extra.higher_is_better", "extra.aggregation", "extra.unparsed"),
    *("extra.label", "extra.params", "extra.sites", "extra.environment"),
    *("extra.speculative", "extra.cache", "extra.diffusion"),
    *("extra.discriminates", "extra.first_token", "extra.code", "extra.plugins"),
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

    def sieve(self, reason_of: Callable[[StoredResult], tuple[str, str] | None]) -> None:
        """Exclude the results that `reason_of` has a reason for, each with the words after its description."""
        kept = []
        for result in self.rows:
            reason = reason_of(result)
            if reason is None:
                kept.append(result)
            else:
                self.drop(reason[0], f"{case_of(result.row)}{reason[1]}")
        self.rows = kept

    def newest(self, key: Callable[[Row], Hashable], reason: str) -> None:
        """Exclude all results of a key but the last."""
        last = {key(result.row): id(result) for result in self.rows}
        kept = {*last.values()}
        self.sieve(lambda result: None if id(result) in kept else (reason, ""))


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
    dated = sorted(
        (pair for store in stores for pair in _read(store, results, read)),
        key=lambda pair: (pair[0], pair[1].row["run_key"]),
    )
    results.rows = [result for _, result in dated]
    results.newest(lambda row: row["run_key"], "the run is in several stores")
    older = "the row is of an older version without settings"
    results.sieve(lambda result: None if "settings" in result.row else (older, ""))

    def other_policy(result: StoredResult) -> tuple[str, str] | None:
        """Return the policy, unless it does not apply to the method or is the page's."""
        policy = result.row["settings"]["engine"].get("positions")
        reason = f"another position policy than {positions}"
        return None if policy in (None, positions) else (reason, f", {policy}")

    results.sieve(other_policy)
    # Of each model and benchmark only the results with the most samples can be paired.
    largest: dict[tuple[str, str], int] = {}
    for result in results.rows:
        group = result.row["model"], result.row["benchmark"]
        largest[group] = max(largest.get(group, 0), result.row["n_samples"])

    def fewer_samples(result: StoredResult) -> tuple[str, str] | None:
        """Return the number of samples, unless it is the largest."""
        samples = result.row["n_samples"]
        required = largest[result.row["model"], result.row["benchmark"]]
        reason = "another number of samples", f", {samples} and not {required}"
        return None if samples == required else reason

    results.sieve(fewer_samples)
    digested = memoized(settings_digest)
    results.newest(
        lambda row: (*identity(row), digested(row["settings"])),
        "the cell was run twice, by other code; the newer row counts",
    )
    if not results.rows:
        names = ", ".join(map(str, stores))
        raise UserError(f"--store {names} holds no rows for a report; valid: {short_path(DEMO)}")
    commits = Counter(
        str(result.row["extra"].get("environment", {}).get("commit")) for result in results.rows
    )
    if len(commits) > 1:
        cases = [f"{commit}: {count} rows" for commit, count in commits.most_common()]
        results.notes["rows of several code versions are compared"] = cases
    return results


def case_of(row: Row) -> str:
    """Return a short description of a row."""
    return f"{row['run_key']}: {name(row)} at {amount(row)}, {row['model']} on {row['benchmark']}"


def _read(store: Path, results: PageResults, read: Walk) -> Iterable[tuple[float, StoredResult]]:
    if is_table(store):
        for number, (row, entries) in enumerate(read_tables(store)):
            yield float(number), StoredResult(store / row["run_key"], row, entries)
        return
    for run in read(store, BLOCKS):
        missing = [key for key in (*CELL, "metrics") if key not in (run.row or {})]
        if run.problem is not None:
            reason = "the file is damaged, or of another version"
            results.drop(reason, str(run.problem).partition(";")[0])
        elif run.row is None:
            results.drop("the run is not finished", run.path.name)
        elif missing:
            results.drop("the row is incomplete", f"{run.path.name} lacks {', '.join(missing)}")
        else:
            yield run.committed, StoredResult(run.path, run.row)


#: Columns of a line, in this order; those of `TEXTS` are indices of a list of texts.
TEXTS = ("model", "benchmark", "method", "curve", "kind", "metric", "rule", "device")
NUMBERS = (
    *("ratio", "keep", "seed", "samples", "value", "stderr"),
    *("flops", "ms", "kv", "higher", "unread"),
)

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
    if row["method"] == FULL:
        return "unpruned"
    if extra.get("speculative"):
        return "speculative decoder"
    if row["method"] in CONTROLS:
        return "control"
    if extra.get("cache") and not sites:
        return "cache compressor"
    if extra.get("diffusion"):
        return "denoising steps"
    inside = bool(sites) and sites[0]["where"] == "layer" and sites[0]["layer"] > 0
    return "inside the LLM" if inside else "before the LLM"


def lines(rows: Sequence[StoredResult]) -> dict[str, Any]:
    """Return columns with a value for each result: numbers, and texts as indices of the list of texts."""
    line_values = [_line(result.row) for result in rows]
    frame = pd.DataFrame(line_values, columns=[*TEXTS, *NUMBERS], dtype=object)
    coded = {key: pd.factorize(frame[key]) for key in TEXTS}
    columns = {key: codes.tolist() for key, (codes, _) in coded.items()}
    columns |= {key: [_short(number) for number in frame[key]] for key in NUMBERS}
    return {"texts": {key: [*names] for key, (_, names) in coded.items()}, "columns": columns}


def _line(row: Row) -> dict[str, Any]:
    extra, time = row["extra"], row.get("time", {})
    metric = row["metrics"].get(extra.get("headline"), {})
    times = [time.get("vision_ms"), time.get("prefill_ms")]
    return {
        **{key: row[key] for key in ("model", "benchmark", "method", "ratio")},
        "keep": row.get("keep"),
        "curve": name(row),
        "kind": kind_of(row),
        "metric": readable(str(extra.get("headline"))),
        "rule": row["budget_rule"],
        "device": str(extra.get("environment", {}).get("device_name")),
        "seed": row.get("seed", 0),
        "samples": row["n_samples"],
        "value": metric.get("value"),
        "stderr": metric.get("stderr"),
        "flops": row.get("flops", {}).get("share_of_full"),
        "ms": None if None in times else sum(times),
        "kv": row.get("memory", {}).get("kv_bytes"),
        "higher": int(extra.get("higher_is_better", True)),
        "unread": int(is_marked(row)),
    }


def panels(results: PageResults) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return curves with intervals for each model, benchmark and budget rule, and averages over benchmarks.

    Curves that cannot be paired are excluded. Drafts and denoised answers have their own figures, because their ratio
    has another meaning.
    """
    groups: dict[tuple[str, str, str], list[StoredResult]] = {}
    for result in results.rows:
        if not result.row["extra"].get("speculative") and not result.row["extra"].get("diffusion"):
            key = (result.row["model"], result.row["benchmark"], result.row["budget_rule"])
            groups.setdefault(key, []).append(result)
    page_panels = []
    measured: dict[tuple[str, str], list[CurvePanel]] = {}
    for (model, benchmark, rule), rows in sorted(groups.items()):
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
                        **{"name": curve.name, "kind": kinds[curve.name], "floor": curve.floor},
                        "points": [_point(point) for point in curve.points],
                    }
                    for curve in panel.curves
                ],
            }
        )
        measured.setdefault((model, rule), []).append(panel)
    means = []
    for (model, rule), group in measured.items():
        points = {point.amount: point for curve in group[0].curves for point in curve.points}
        means += [
            {
                **{"model": model, "rule": rule, "curve": curve, "ratio": points[removed].ratio},
                **{"keep": points[removed].keep, "benchmarks": len(group)},
                "retention": _ends(interval),
            }
            for (curve, removed), interval in averages(group).items()
        ]
    return page_panels, means


def _point(point: CurvePoint) -> dict[str, Any]:
    return {
        "ratio": point.ratio,
        "keep": point.keep,
        "flops": _short(point.flops),
        "score": _ends(point.score),
        "retention": _ends(point.retention),
        "gain": _ends(point.gain),
        "chance": _short(point.corrected_pvalue),
        "unread": int(point.unread),
    }


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

    def no_number(result: StoredResult) -> tuple[str, str] | None:
        metric = result.row["metrics"].get(result.row["extra"].get("headline"), {})
        return ("the headline has no number", "") if metric.get("value") is None else None

    results.sieve(no_number)


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
        "pictures": pictures(results, stores),
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


@dataclass(frozen=True)
class PictureSource:
    """Figures of one kind: title, the row block of its results, report, folder in the repository, and captions.

    The report has a name only, because it needs torch, which takes seconds to import.
    """

    title: str
    block: str
    report: str
    folder: str
    captions: dict[str, str]


PICTURES = (
    PictureSource(
        "Speculative decoding",
        "speculative",
        "decoder_report:REPORT",
        "lab/measured/speculative",
        {
            "decoders": "Speed-up of each decoder over plain decoding of the same answers.",
            "ratio": "By the share of visual tokens that the draft does without.",
            "guidance": "Drafted tokens accepted, by what chooses the draft's visual tokens.",
        },
    ),
    PictureSource(
        "Cache compression",
        "cache",
        "cache_report:REPORT",
        "lab/measured/kv",
        {"curves": "Score by the share of visual cache entries kept."},
    ),
    PictureSource(
        "Denoised answers",
        "diffusion",
        "diffusion_report:REPORT",
        "lab/measured/diffusion",
        {"merging": "Score by denoising steps and share kept, with the FLOPs of an answer."},
    ),
)


def pictures(results: PageResults, stores: Sequence[Path]) -> list[dict[str, Any]]:
    """Return titles, captions and figures; one that the results cannot provide is the repository's, if this is it."""
    entries = []
    for kind in PICTURES:
        drawn = _draw(kind, results, stores)
        for stem, caption in kind.captions.items():
            measured = ROOT / kind.folder / f"{stem}.svg"
            if stem in drawn or measured.is_file():
                encoded = base64.b64encode(drawn.get(stem) or measured.read_bytes()).decode()
                origin = "the rows of this report" if stem in drawn else kind.folder
                entries.append(
                    {
                        "title": kind.title,
                        "caption": f"{caption} Drawn from {origin}.",
                        "source": f"data:image/svg+xml;base64,{encoded}",
                    }
                )
    return entries


def _draw(source: PictureSource, results: PageResults, stores: Sequence[Path]) -> dict[str, bytes]:
    """Return the figures of the first store with results of the kind."""
    if not any(result.row["extra"].get(source.block) for result in results.rows):
        return {}
    report = resolve_name(f"espalier.harness.reports.curves.{source.report}")
    with TemporaryDirectory() as folder:
        for store in stores:
            try:
                files, _ = report.write(store, Path(folder))
                return {path.stem: path.read_bytes() for path in files if path.suffix == ".svg"}
            except UNDRAWABLE as error:
                reason = error if isinstance(error, UserError) else first_words(error)
                results.drop(f"no picture of {source.title.lower()}", f"{store}: {reason}")
    return {}
