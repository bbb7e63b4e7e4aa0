"""The shape of the reports of caches, decoders and denoisers: results become parts, parts a page, and a command.

Rows become a frame (stored_rows.py), a comparison selects from it, a specification names the tables and figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from omegaconf import OmegaConf

from espalier.harness.config.method_names import method_section, setting_names
from espalier.harness.config.resolvers import register
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import plain_page, print_lines
from espalier.harness.kinds.lookup import label_of
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.curve_points import share
from espalier.harness.reports.curves.figures import save
from espalier.harness.reports.curves.stored_rows import WHERE
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import RUN, PlainParser, command
from espalier.harness.specs.labels import label
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.folder_checks import check_folder, existing_store
from espalier.harness.store.row_text import FOOTNOTE

#: Files written, and a line for each part that the store has no results of.
Written = tuple[list[Path], list[str]]


class Part(NamedTuple):
    """A part of a page, left out if there are no results of it.

    Attributes:
        results: what it shows.
        text: first paragraphs.
        tables: paragraphs after these, made only if there are results.
        figures: draw its figures from the results, by name of the file.
        subject: name in the line that it is missing; see `Report.presets`.
    """

    results: Sized
    text: str = ""
    tables: Iterable[str] = ()
    figures: Mapping[str, Callable[[Any], Figure]] = {}
    subject: str = ""


class Page(NamedTuple):
    """A page of parts.

    Attributes:
        intro: first paragraphs.
        notes: lines on results that no part shows.
        is_marked: whether some numbers bear a footnote mark.
    """

    intro: str
    parts: Sequence[Part]
    notes: Sequence[str] = ()
    is_marked: bool = False


@dataclass(frozen=True)
class Report:
    """A page, how it is read from a store, and its command.

    Attributes:
        module: the file below `curves/` that specifies it.
        about: help text of the command.
        read: returns the page of a store, of one model and of the rows that match `key=value` conditions.
        presets: the sweep that produces the results of a part, by its name.
    """

    module: str
    about: str | None
    read: Callable[[Path, str | None, Sequence[str]], Page]
    presets: Mapping[str, str]

    def write(
        self, store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
    ) -> Written:
        """Write `README.md` and the figures into a folder, which is created; Raises as `read`."""
        page = self.read(store, model, where)
        parts = [part for part in page.parts if len(part.results)]
        figures = {
            name: draw(part.results) for part in parts for name, draw in part.figures.items()
        }
        subjects = {part.subject for part in parts}
        missing = [
            f"no rows for {subject}; run: {RUN} {preset}"
            for subject, preset in self.presets.items()
            if subject not in subjects
        ]
        missing += page.notes
        paragraphs = [page.intro]
        for part in parts:
            paragraphs += [*[part.text] * bool(part.text), *part.tables]
        if missing:
            paragraphs.append("## Left out\n\n" + "".join(f"- {line}\n" for line in missing))
        if page.is_marked:
            paragraphs.append(f"{FOOTNOTE}.\n")
        folder.mkdir(parents=True, exist_ok=True)
        written = [path for name, figure in figures.items() for path in save(figure, folder / name)]
        return [*written, write_text(folder / "README.md", paragraphs)], missing

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


def write_text(path: Path, paragraphs: Sequence[str]) -> Path:
    """Write the paragraphs of a Markdown file; return its path."""
    path.write_text(plain_page("\n".join(paragraphs)), encoding="utf-8")
    return path


def texts(report: str, **words: str) -> list[str]:
    """Return the paragraphs of a report (texts/<report>.txt), which lines of three dashes separate.

    Args:
        report: name of the file.
        **words: for the braces in them; without any, the braces stay.
    """
    file = Path(__file__).with_name("texts") / f"{report}.txt"
    paragraphs = file.read_text(encoding="utf-8").split("---\n")
    return [text.format(**words) for text in paragraphs] if words else paragraphs


def config_names(methods: Collection[str], budget: Budget) -> dict[str, str]:
    """Return setting names by curve name for some methods: `fastv paper` is fastv_paper."""
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
    name = f"{spec.method.title} {label_of(spec)}".strip()
    kept = share(spec.budget.ratio) if spec.budget.count is None else spec.budget.amount
    return config_names({spec.method.name}, spec.budget).get(name, name), kept
