"""Tables and pictures of a selection of stored results: what `espalier report` writes next to its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from espalier.harness.errors import UserError, brief, first_words, tell_once, unknown_name
from espalier.harness.reports.curves.comparison import panel_of
from espalier.harness.reports.curves.curve_files import file_name, write_panels
from espalier.harness.reports.curves.curve_points import FLOORS, FULL, CurvePanel
from espalier.harness.reports.curves.plot_style import UNDRAWABLE
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
    filter_results,
    read_results,
    with_settings,
)
from espalier.harness.specs.comparable import settings
from espalier.harness.store.files.folder_checks import existing_store

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
        values = set(text.split(","))
        present = {_text(result, key) for result in results}
        for value in sorted(values - present):
            raise unknown_name(key, value, sorted(present))
        results = [
            result
            for result in results
            if _text(result, key) in values
            or (key in ("method", "variant") and result.row["method"] in (FULL, *FLOORS))
            or (key in ("ratio", "keep") and result.row["method"] == FULL)
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
            except UserError as error:
                notes[f"no curves of {model} on {benchmark}"] = [str(error)]
                continue
            notes[f"{model} on {benchmark}"] = panels[-1].notes
        several = f"-{file_name(model)}-{file_name(rule)}" if len(groups) > 1 else ""
        try:
            paths += write_panels(panels, out.with_name(out.name + several)) if panels else ()
        except UNDRAWABLE as error:
            tell_once(
                f"left out: no files of {brief(model)} by {brief(rule)}: {first_words(error)}"
            )
    return paths, notes


def _text(result: StoredResult, key: str) -> str:
    value = result.row.get(key)
    return f"{value:g}" if isinstance(value, float) else str(value)
