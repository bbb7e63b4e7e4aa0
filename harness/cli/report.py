"""Write a page of a store's rows that opens from a file, with tables and pictures of a selection next to it.

The page has curves, costs, kept tokens and published tables. Filters choose the content of these (.png, .svg, .md,
.tex, .csv): `benchmark=pope,gqa method=fastv engine.positions=renumbered`; `none` and random dropping stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError, print_lines
from espalier.harness.paths import located, usual_store
from espalier.harness.reports.curves.curve_files import SUFFIXES, read_selection, write_selection
from espalier.harness.reports.curves.curve_points import CONTROLS, FULL
from espalier.harness.reports.frame import StoredResult
from espalier.harness.reports.html.page import LIMIT, PageResults, assemble, collect
from espalier.harness.reports.protocols.downsampled_groups import downsampled_groups
from espalier.harness.reports.protocols.equal_cost import equal_cost
from espalier.harness.reports.protocols.kept_sets import kept_sets
from espalier.harness.reports.protocols.overall_scores import effivlm, uniprunebench
from espalier.harness.reports.protocols.protocol_table import ProtocolTable
from espalier.harness.reports.protocols.rank_stability import rank_stability
from espalier.harness.reports.tables.table_rows import usual_positions
from espalier.harness.settings import choice
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.specs.run_spec import POSITIONS
from espalier.harness.store import RunDir
from espalier.harness.store.answer_view import BROKE, compare, picture_words
from espalier.harness.store.files.folder_checks import check_file, check_files, existing_store
from espalier.harness.store.stored_answers import read_answers

PROTOCOLS: Mapping[str, Callable[[Sequence[StoredResult]], ProtocolTable]] = {
    "vtc": downsampled_groups,
    "uniprunebench": uniprunebench,
    "effivlm": effivlm,
    "cost": equal_cost,
    "ranks": rank_stability,
    "kept": kept_sets,
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; exit code 2 and one line if that fails."""
    parser = command_parser(
        "report",
        __doc__,
        "",
        "results/demo benchmark=seedling_rec method=fastv,divprune",
        "--store mine --store theirs --no-overlays",
        "mine --protocol vtc --protocol ranks",
    )
    parser.add_argument(
        "selection", nargs="*", metavar="STORE|KEY=VALUE", help="stores, and filters of the files"
    )
    parser.add_argument(
        "--store",
        type=located,
        action="append",
        help="a run store or a folder of tables; repeatable (default: results if it has runs, else results/demo)",
    )
    parser.add_argument("--out", type=Path, default=Path("report/index.html"), help="the page")
    parser.add_argument(
        "--positions",
        default=usual_positions(),
        help=f"position policy of the rows: {', '.join(POSITIONS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--protocol",
        action="append",
        default=[],
        metavar="NAME",
        help=f"{', '.join(PROTOCOLS)}: a table in the page, and files next to it; repeatable",
    )
    parser.add_argument(
        "--no-overlays",
        action="store_true",
        help="omit pictures of kept tokens, which need answers of the embedded model",
    )
    parser.add_argument(
        "--broken",
        type=int,
        default=0,
        metavar="N",
        help="of each selected run N samples that it breaks, as pictures with the kept tokens, a page beside the page",
    )
    options = parser.parse_args(argv)
    filters = [word for word in options.selection if "=" in word]
    named = [located(word) for word in options.selection if "=" not in word]
    stores = [*(options.store or []), *named] or [usual_store()]
    check_file("--out", options.out)
    base = options.out.with_suffix("")
    check_files("--out", base, SUFFIXES)
    choice("--positions", options.positions, POSITIONS)
    for name in options.protocol:
        choice("--protocol", name, list(PROTOCOLS))
        check_files("--out", base.with_name(f"{base.name}-{name}"), SUFFIXES)
    for store in stores:
        existing_store(store)
    selection = read_selection(stores, filters)
    tables = protocol_tables(options.protocol, selection)
    content = collect(stores, options.positions, None if options.no_overlays else _overlays)
    content["tables"] += [
        {
            "name": table.name,
            "paper": "protocols",
            "title": table.title,
            "html": table.fragment(),
        }
        for table in tables
    ]
    if options.broken > 0:
        folder = options.out.with_name(f"{base.name}-broken")
        content["broken"] = _broken(selection, folder, options.broken, content["left_out"])
    page = assemble(content)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page, encoding="utf-8")
    files, notes = write_selection(selection, base)
    files += [path for table in tables for path in table.write(base)]
    left_out = {f"left out: {reason}": cases for reason, cases in content["left_out"].items()}
    # Without filters the page has the notes on the files.
    for notes_by_label in (notes if filters else {}, left_out, content["notes"]):
        for label, cases in notes_by_label.items():
            print_lines(*(f"{label}: {case}" for case in cases), file=sys.stderr)
    if len(page) > LIMIT:
        size = f"{len(page) / 1e6:.1f} MB"
        print_lines(f"{options.out} has {size}; browsers open it, mail may not", file=sys.stderr)
    print_lines(options.out, *files)
    return 0


def _overlays(results: PageResults) -> dict[str, Any]:
    """Return what methods keep of example pictures."""
    # They import torch and transformers, which take seconds.
    from espalier.harness.reports.html.overlays import overlays
    from espalier.harness.runs.stored_pictures import stored_code

    return overlays(results, stored_code)


def _broken(
    results: Sequence[StoredResult], folder: Path, limit: int, left_out: dict[str, list[str]]
) -> dict[str, dict[str, str]]:
    """Draw samples that the unpruned model answers and a run does not; return page and words by run key.

    Args:
        results: with those of the unpruned model; controls, and tables, which have no answers, are passed over.
        folder: of the pages, one for each run.
        limit: of samples of a run.
        left_out: receives runs with samples that cannot be drawn.
    """
    # It loads torch and lmms-eval.
    from espalier.harness.runs.stored_pictures import write_pictures

    pages: dict[str, dict[str, str]] = {}
    stored = [result for result in results if result.path.is_dir()]
    unpruned = {_place(result.row): result for result in stored if result.row["method"] == FULL}
    for result in stored:
        key, base = result.row["run_key"], unpruned.get(_place(result.row))
        if base is None or result.row["method"] in (FULL, *CONTROLS):
            continue
        try:
            run, full = (read_answers(RunDir(each.path)) for each in (result, base))
            pairs = [pair for pair in compare(run, full).pairs if pair.change == BROKE]
            words = {pair.ours.key: picture_words(pair.ours, pair.theirs) for pair in pairs[:limit]}
            if words:
                write_pictures(run, words, result.path.parents[1], folder / key, ())
                pages[key] = {
                    "page": f"{folder.name}/{key}/index.html",
                    "words": f"{len(words)} of {len(pairs)} samples that broke, run {key}",
                }
        except UserError as error:
            left_out.setdefault("no pictures of broken samples", []).append(f"{key}: {error}")
    return pages


_place = itemgetter("model", "benchmark", "n_samples")


def protocol_tables(names: Sequence[str], results: Sequence[StoredResult]) -> list[ProtocolTable]:
    """Return the table of each named protocol, over the results of a selection.

    Raises:
        UserError: the results lack what a protocol compares.
    """
    return [PROTOCOLS[name](results) for name in dict.fromkeys(names)]
