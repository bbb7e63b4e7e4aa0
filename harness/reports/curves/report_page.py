"""The shape of the reports of caches, decoders and denoisers: results become a page and figures, by a command.

Rows become a frame (stored_rows.py), a comparison selects from it, a template places tables and figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.figure import Figure
from omegaconf import OmegaConf

from espalier.harness.config.method_names import method_section, setting_names
from espalier.harness.config.resolvers import register
from espalier.harness.errors import plain_page, print_lines
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.curve_points import share
from espalier.harness.reports.curves.figures import save
from espalier.harness.reports.curves.stored_rows import WHERE
from espalier.harness.reports.printed_text import render
from espalier.harness.specs.commands import RUN, PlainParser, command
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.folder_checks import check_folder, existing_store
from espalier.harness.store.row_text import FOOTNOTE

if TYPE_CHECKING:
    from espalier.harness.cost.budget import Budget


class CurvesPage(NamedTuple):
    """What a report shows.

    Attributes:
        values: of its template.
        figures: by name of the file.
        parts: what is shown of each subject (`Report.presets`); one without anything is named as missing.
        notes: lines on results that are not shown.
        marked: whether some numbers bear a footnote mark.
    """

    values: Mapping[str, Any]
    figures: Mapping[str, Figure]
    parts: Mapping[str, Sized]
    notes: Sequence[str] = ()
    marked: bool = False


@dataclass(frozen=True)
class Report:
    """A page of a kind of methods, how it is read from a store, and its command.

    Attributes:
        module: the file below `curves/` that specifies it.
        title: of its figures.
        block: of `extra` that the rows of the kind have.
        captions: of its figures, by name of the file.
        template: of its page.
        about: help text of the command.
        read: returns the page of a store, of one model and of the rows that match `key=value` conditions.
        presets: the sweep that produces the results of a part, by its name.
    """

    module: str
    title: str
    block: str
    captions: Mapping[str, str]
    template: str
    about: str | None
    read: Callable[[Path, str | None, Sequence[str]], CurvesPage]
    presets: Mapping[str, str]

    def write(
        self, store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
    ) -> tuple[list[Path], list[str]]:
        """Write `README.md` and the figures into a folder, which is created; Raises as `read`.

        Returns:
            The files written, and a line for each part that the store has no results of.
        """
        page = self.read(store, model, where)
        missing = [
            f"no rows for {subject}; run: {RUN} {preset}"
            for subject, preset in self.presets.items()
            if not len(page.parts[subject])
        ]
        missing += page.notes
        folder.mkdir(parents=True, exist_ok=True)
        written = [
            path for name, figure in page.figures.items() for path in save(figure, folder / name)
        ]
        values = {**page.values, "figures": page.figures, "missing": missing, "marked": page.marked}
        return [*written, write_page(folder / "README.md", self.template, **values)], missing

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Write tables and figures of a store; exit code 2 and one line if that fails."""
        return command(self._run)(argv)

    def _run(self, argv: Sequence[str] | None) -> int:
        parser = PlainParser(
            prog=f"python -m espalier.harness.reports.curves.{self.module}", description=self.about
        )
        parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
        parser.add_argument(
            "--write", type=Path, required=True, help="folder of tables and pictures"
        )
        parser.add_argument("--model", help="which model, if the store has several")
        parser.add_argument("--where", action="append", default=[], help=WHERE)
        options = parser.parse_args(argv)
        check_folder("--write", options.write)
        store = existing_store(options.store)
        paths, missing = self.write(store, options.write, options.model, options.where)
        print_lines(*paths)
        print_lines(*(f"left out: {line}" for line in missing), file=sys.stderr)
        return 0


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a Markdown page by its template; return its path."""
    text = render(template, footnote=FOOTNOTE, **values)
    path.write_text(plain_page(text.rstrip() + "\n"), encoding="utf-8")
    return path


def config_names(methods: Collection[str], budget: Budget | None = None) -> dict[str, str]:
    """Return setting names by curve name for some methods: `fastv paper` is fastv_paper.

    Args:
        methods: their names.
        budget: some settings depend on it; None: nothing is removed.
    """
    # Imported here: methods need torch, which takes half of the memory of a page without these names.
    from espalier.harness.cost.budget import Budget
    from espalier.harness.kinds.kind import label
    from espalier.harness.specs.catalogue import build_method

    budget = budget or Budget("kept", 0.0)
    register()
    stems = {}
    for setting in setting_names():
        part = OmegaConf.create(method_section(setting))
        if part.name in methods:
            # Keys that a method's config can interpolate.
            run = {"ratio": budget.ratio, "budget": {"rule": budget.rule}, "method": part}
            resolved: Any = OmegaConf.to_container(OmegaConf.create(run).method, resolve=True)
            method = build_method(part.name, resolved["params"])
            words = label(method, part.variant, resolved.get("variants") or {}, budget)
            stems[f"{part.name} {words}".strip()] = setting
    return stems


def name_and_share(spec: RunSpec) -> tuple[str, str]:
    """Return a run's setting name, or its method with what is off its defaults, and what it keeps."""
    # Imported here, as above: it needs torch.
    from espalier.harness.kinds.lookup import label_of

    name = f"{spec.method.title} {label_of(spec)}".strip()
    kept = share(spec.budget.ratio) if spec.budget.count is None else spec.budget.amount
    return config_names({spec.method.name}, spec.budget).get(name, name), kept
