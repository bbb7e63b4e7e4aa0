"""`store show --pictures`: samples of a stored run as pictures with the kept tokens drawn, and a page of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from html import escape
from pathlib import Path

from espalier.harness.errors import UserError, first_words, plain
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.row_job import job_of_row
from espalier.harness.runs.sample_pictures import SamplePicture, draw_samples
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.stored_answers import AnsweredRun

#: Style of the page: pictures side by side, words below.
STYLE = (
    "body{font:14px sans-serif;margin:2em}main{display:flex;flex-wrap:wrap;gap:1.5em}"
    "figure{width:26em;margin:0}img{width:100%}dl{display:grid;grid-template-columns:8em 1fr;gap:.2em}"
    "dt{color:#666}dd{margin:0}"
)

#: The words beside a sample's picture, by name.
Words = Mapping[str, str]


def write_pictures(
    run: AnsweredRun,
    words: Mapping[Key, Words],
    store: Path,
    folder: Path,
    overrides: Sequence[str],
) -> list[str]:
    """Draw samples of a stored run into a folder, with a page `index.html`; return lines about it.

    Args:
        run: the run.
        words: of each sample to draw, in the order of the page.
        store: its store.
        folder: a folder that does not exist, or is empty or has earlier pictures.
        overrides: those of the run's command line that its row does not hold.

    Raises:
        UserError: the run cannot be made again from its row, or the folder cannot be written.
    """
    started = time.monotonic()
    _make(folder)
    pictures: dict[Key, SamplePicture] = {}
    with redirect_stdout(sys.stderr):
        job = job_of_row(run.row, store, overrides)
        adapter = Pool().adapter(job.spec.model)
        for picture in draw_samples(job.spec, job.method, adapter, words):
            if picture.drawing is not None:
                picture.drawing.savefig(folder / picture.file, bbox_inches="tight")
            pictures[picture.key] = picture
    changed = [key for key in words if pictures[key].answer != run.answers[key].answer]
    _write_page(folder / "index.html", _title(run), [(pictures[key], words[key]) for key in words])
    seconds = time.monotonic() - started
    lines = [
        f"{len(words)} samples drawn in {folder}/index.html; {seconds:.0f} s to load the model and answer them again"
    ]
    if changed:
        names = ", ".join(f"{task}/{doc_id}" for task, doc_id in changed[:5])
        lines.append(
            f"{len(changed)} of them have another answer than in the store ({names}): one by one, and with the code of "
            "now, numbers round differently"
        )
    return lines


def _title(run: AnsweredRun) -> str:
    return f"{run.row['model']} {run.name} {run.row['benchmark']}"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").touch()
    except OSError as error:
        raise UserError(
            f"--pictures={str(folder)!r} cannot be written ({first_words(error)}); valid: a folder"
        ) from error


def _write_page(path: Path, title: str, samples: Sequence[tuple[SamplePicture, Words]]) -> None:
    """Write a page of pictures that are in the same folder."""
    figures = []
    for picture, words in samples:
        image = f'<img src="{escape(picture.file)}">' if picture.drawing else "<p>no picture</p>"
        items = {**words, "answer now": picture.answer}
        if items["answer now"] == words.get("answer"):
            del items["answer now"]
        texts = "".join(
            f"<dt>{name}</dt><dd>{escape(plain(text))}</dd>" for name, text in items.items()
        )
        figures.append(f"<figure>{image}<figcaption><dl>{texts}</dl></figcaption></figure>")
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><main>{''.join(figures)}</main>\n",
        encoding="utf-8",
    )
