"""Write the figure and the tables of curves, of a store's runs or of a selection of results."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from espalier.harness.errors import (
    UserError,
    brief,
    first_words,
    plain_page,
    tell_once,
    unknown_name,
)
from espalier.harness.reports.curves.comparison import panel_of, points_of, read_panels
from espalier.harness.reports.curves.curve_figure import draw_curves
from espalier.harness.reports.curves.curve_points import FLOORS, FULL, CurvePanel
from espalier.harness.reports.curves.curve_table import markdown
from espalier.harness.reports.curves.figures import (
    UNDRAWABLE,
    save,
)
from espalier.harness.reports.curves.stored_rows import filter_results, read_results, with_settings
from espalier.harness.reports.frame import StoredResult
from espalier.harness.specs.comparable import settings
from espalier.harness.store.files.folder_checks import existing_store

#: Suffixes of the files that are written.
SUFFIXES = ("png", "svg", "md", "tex", "csv")

#: Signs that stay in names of files, and the bytes of such a name.
_UNSAFE = re.compile(r"[^\w .,+=()@%-]")
LONGEST = 120


def file_name(text: str) -> str:
    """Return a name of a row as that of a file: without signs that a terminal, a page or a folder reads otherwise.

    A link to `task:pope.md` would be read as the scheme `task`. A digest tells names apart that lose other signs.
    """
    safe = _UNSAFE.sub("_", text)
    if safe == text.replace(":", "_").replace("/", "_") and len(safe.encode()) <= LONGEST:
        return safe
    cut = safe.encode()[:LONGEST].decode(errors="ignore")
    return f"{cut}-{sha256(text.encode(errors='replace')).hexdigest()[:8]}"


def write_curves(
    store: Path,
    out: Path,
    benchmarks: Sequence[str] = (),
    model: str | None = None,
    rule: str = "kept",
    run_keys: Collection[str] | None = None,
) -> tuple[Path, ...]:
    """Write the figure and the tables of a store's runs as `write_panels` does; arguments as of `read_panels`."""
    return write_panels(read_panels(store, benchmarks, model, rule, run_keys, swept=True), out)


def write_panels(panels: Sequence[CurvePanel], out: Path) -> tuple[Path, ...]:
    """Write the figure (`<out>.png`, `.svg`) and the tables (`.md`, `.tex`, `.csv`), and return the paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures = save(draw_curves(panels), out)
    table, latex, points = (out.with_name(f"{out.name}.{kind}") for kind in SUFFIXES[2:])
    table.write_text(plain_page(markdown(panels)), encoding="utf-8")
    frame = points_of(panels)
    frame.to_latex(latex)
    frame.to_csv(points, index=False, encoding="utf-8")
    return *pictures, table, latex, points


#: Keys of a row that a filter can name, besides its settings.
KEYS = ("model", "benchmark", "method", "variant", "ratio", "keep", "seed", "n_samples")


def read_selection(stores: Sequence[Path], filters: Sequence[str]) -> list[StoredResult]:
    """Return the results of stores that match all filters, those of decoders and denoised answers left out.

    Ratios of these have another meaning; they have their own figures. The unpruned model and random dropping stay
    in every selection of methods, variants or ratios: the others are compared with them.

    Args:
        stores: run stores and folders of tables.
        filters: `key=value[,value]` of a row, such as `method=fastv,divprune`, or `key=value` of its settings.

    Raises:
        UserError: a filter names no key, or a value that no result has.
    """
    results = [
        result
        for store in stores
        for result in read_results(existing_store(store))
        if not result.row["extra"].get("speculative") and not result.row["extra"].get("diffusion")
    ]
    for condition in filters:
        key, _, text = condition.partition("=")
        if key not in KEYS:
            recorded, _ = with_settings(results)
            names = {name for result in recorded for name in settings(result.row)}
            if key not in names:
                engine = sorted(name for name in names if name.startswith("engine."))
                raise unknown_name("filter", key, [*KEYS, *engine])
            results = filter_results(recorded, [condition])
            continue
        values = {result.path: _text(result.row.get(key)) for result in results}
        chosen = set(text.split(","))
        for value in sorted(chosen - {*values.values()}):
            raise unknown_name(key, value, sorted({*values.values()}))
        # What the others are compared with stays.
        compared: dict[str, tuple[str, ...]] = {
            **dict.fromkeys(("method", "variant"), (FULL, *FLOORS)),
            **dict.fromkeys(("ratio", "keep"), (FULL,)),
        }
        results = [
            result
            for result in results
            if values[result.path] in chosen or result.row["method"] in compared.get(key, ())
        ]
    return results


def write_selection(
    results: Sequence[StoredResult], out: Path
) -> tuple[list[Path], Mapping[str, Sequence[str]]]:
    """Write figure and tables of results as `<out>.png`, `.svg`, `.md`, `.tex` and `.csv`.

    Results of several models or budget rules have a set of files each, `<out>-<model>-<rule>.*`.

    Returns:
        The paths, and for each benchmark the omissions and marks.
    """
    groups: dict[tuple[str, str], dict[str, list[StoredResult]]] = {}
    for result in results:
        row = result.row
        by_benchmark = groups.setdefault((row["model"], row["budget_rule"]), {})
        by_benchmark.setdefault(row["benchmark"], []).append(result)
    paths: list[Path] = []
    notes: dict[str, Sequence[str]] = {}
    for (model, rule), by_benchmark in sorted(groups.items()):
        panels: list[CurvePanel] = []
        for benchmark, group in sorted(by_benchmark.items()):
            try:
                recorded, older = with_settings(group)
                panels.append(panel_of(benchmark, recorded, notes=older, swept=True))
                notes[f"{model} on {benchmark}"] = panels[-1].notes
            except UserError as error:
                notes[f"no curves of {model} on {benchmark}"] = [str(error)]
        several = f"-{file_name(model)}-{file_name(rule)}" if len(groups) > 1 else ""
        try:
            paths += write_panels(panels, out.with_name(out.name + several)) if panels else ()
        except UNDRAWABLE as error:
            tell_once(
                f"left out: no files of {brief(model)} by {brief(rule)}: {first_words(error)}"
            )
    return paths, notes


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
