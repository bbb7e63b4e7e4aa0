"""What the reports of reducers, caches, decoders and denoisers share: texts, names of methods, page, command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import OmegaConf

from espalier.harness.config.method_names import method_section, setting_names
from espalier.harness.config.resolvers import register
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError, plain_page
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.figures import save
from espalier.harness.reports.curves.stored_rows import WHERE
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import RUN, command
from espalier.harness.specs.labels import label
from espalier.harness.store.files.folder_checks import check_folder, existing_store

#: Files written, and a line for each part that the store has no results of.
Written = tuple[list[Path], list[str]]


def texts(report: str) -> list[str]:
    """Return the paragraphs of a report (texts/<report>.txt), which lines of three dashes separate."""
    file = Path(__file__).with_name("texts") / f"{report}.txt"
    return file.read_text(encoding="utf-8").split("---\n")


def config_names(methods: Collection[str], budget: Budget) -> dict[str, str]:
    """Return setting names by curve name for some methods: `fastv queries=mean` is fastv_paper."""
    register()
    stems = {}
    for setting in setting_names():
        part = OmegaConf.create(method_section(setting))
        if part.name in methods:
            # Keys that a method's config can interpolate.
            run = {"ratio": budget.ratio, "budget": {"rule": budget.rule}, "method": part}
            resolved: Any = OmegaConf.to_container(OmegaConf.create(run).method, resolve=True)
            method = build_method(part.name, resolved["params"])
            stems[f"{part.name} {label(method, part.variant, budget)}".strip()] = setting
    return stems


def missing_parts(presets: Mapping[str, str], parts: Sequence[object]) -> list[str]:
    """Return a line for each part without results, with the sweep that produces them."""
    return [
        f"no rows for {subject}; run: {RUN} {preset}"
        for (subject, preset), part in zip(presets.items(), parts, strict=True)
        if not part
    ]


def write_page(
    folder: Path,
    parts: Sequence[str],
    figures: Mapping[str, Figure],
    missing: Sequence[str] = (),
    last: Sequence[str] = (),
) -> Written:
    """Write `README.md` and the figures by name into a folder, which is created.

    Args:
        folder: of the page.
        parts: of the page, the first one first.
        figures: each is written as .png and .svg.
        missing: lines on omissions.
        last: parts after these lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [path for name, figure in figures.items() for path in save(figure, folder / name)]
    left_out = "## Left out\n\n" + "".join(f"- {line}\n" for line in missing)
    page = folder / "README.md"
    text = "\n".join([*parts, *([left_out] if missing else []), *last])
    page.write_text(plain_page(text), encoding="utf-8")
    return [*written, page], list(missing)


def report_command(
    module: str,
    about: str | None,
    write: Callable[[Path, Path, str | None, Sequence[str]], Written],
) -> Callable[..., int]:
    """Return the main function of a report, which writes it from a store's results."""

    @command
    def main(argv: Sequence[str] | None = None) -> int:
        """Write tables and figures of a store; exit code 2 and one line if that fails."""
        parser = argparse.ArgumentParser(
            prog=f"python -m espalier.harness.reports.curves.{module}", description=about
        )
        parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
        parser.add_argument(
            "--write", type=Path, required=True, help="folder of tables and pictures"
        )
        parser.add_argument("--model", help="which model, if the store has several")
        parser.add_argument("--where", action="append", default=[], help=WHERE)
        options = parser.parse_args(argv)
        try:
            check_folder("--write", options.write)
            store = existing_store(options.store)
            paths, missing = write(store, options.write, options.model, options.where)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(*paths, sep="\n")
        for line in missing:
            print(f"left out: {line}", file=sys.stderr)
        return 0

    return main
