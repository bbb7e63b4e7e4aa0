"""`store show --pictures`: samples of a stored run as pictures with the kept tokens drawn, and a page of them.

The job of the run is made again from its row alone: its cell, and the settings that differ from the config's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.group_lists import ConfFolders
from espalier.harness.config.overrides import spelled
from espalier.harness.errors import UserError, first_words, plain
from espalier.harness.paths import CONF
from espalier.harness.runs.admission import Job, admit
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.sample_pictures import SamplePicture, draw_samples
from espalier.harness.specs.plugins.installed import conf_folders
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.stored_answers import AnsweredRun

#: Style of the page: pictures side by side, words below.
STYLE = (
    "body{font:14px sans-serif;margin:2em}main{display:flex;flex-wrap:wrap;gap:1.5em}"
    "figure{width:26em;margin:0}img{width:100%}dl{display:grid;grid-template-columns:8em 1fr;gap:.2em}"
    "dt{color:#666}dd{margin:0}"
)

#: The words beside a sample's picture, by name.
Words = Mapping[str, str]

#: Blocks of a row's settings that decide how samples are answered. Those of a benchmark in `SCORED` do not.
ANSWERED = ("model", "method", "draft", "benchmark", "engine", "artifacts")
SCORED = ("files", "metrics", "headline", "higher_is_better", "derived", "answers", "intervals")

#: Settings that follow from others, or that a row has and no config key sets.
DERIVED = ("model.adapter", "model.revision", "model.facts", "draft", "artifacts")

#: A value that a block lacks.
_ABSENT = object()


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


def job_of_row(row: Mapping[str, Any], store: Path, overrides: Sequence[str] = ()) -> Job:
    """Return the job that answers samples as those of a row were answered.

    Args:
        row: as stored.
        store: where calibrations are searched first.
        overrides: of its command line that a row does not hold, such as `model.path=...`.

    Raises:
        UserError: a setting of the row cannot be made again; the line names it.
    """
    cell = _cell_overrides(row)
    job = _job([*cell, f"store={spelled(str(store))}", *overrides])
    settable = [
        f"{key}={spelled(value)}"
        for path, value in _differences(row["settings"], job.parts["settings"])
        if (key := _config_key(path, job)) is not None
    ]
    if settable:
        job = _job([*cell, *settable, f"store={spelled(str(store))}", *overrides])
    differences = [path for path, _ in _differences(row["settings"], job.parts["settings"])]
    if differences:
        raise UserError(
            f"run {row['run_key'][:12]} cannot be made again from its row: {', '.join(differences)} differ; "
            "valid: --set with the overrides of its command line, such as model.path=<folder>, or the files of then"
        )
    return job


def _job(overrides: Sequence[str]) -> Job:
    command = read_command(overrides)
    assert command is not None  # only options request information from Hydra
    (cell,) = command.cells
    return admit(replace(build_spec(cell), offline=True), Digests(), places=False)


def _cell_overrides(row: Mapping[str, Any]) -> list[str]:
    method, _, compressor = row["method"].partition("+")
    limit = row["settings"]["benchmark"]["limit"]
    return [
        f"model={row['model']}",
        f"benchmark={row['benchmark']}",
        f"method={_place(row, method)}",
        f"method.variant={row['variant']}",
        *([f"compressor={_place(row, compressor)}"] if compressor else []),
        f"ratio={row['ratio']}" if row.get("keep") is None else f"keep={row['keep']}",
        f"budget.rule={row['budget_rule']}",
        f"seed={row['seed']}",
        f"limit={spelled(limit)}",
    ]


def _place(row: Mapping[str, Any], name: str) -> str:
    """Return what chooses a method: its name, or the place of a user's class that no folder of configs names."""
    owners = ConfFolders((CONF, *conf_folders())).owners("method", name)
    places: Mapping[str, str] = row["extra"].get("code", {})
    return name if owners or name not in places else spelled(places[name])


def _differences(
    stored: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the stored value of each leaf that differs and decides how samples are answered."""
    for name in {**stored, **current}:
        path, value, now = f"{prefix}{name}", stored.get(name, _ABSENT), current.get(name, _ABSENT)
        counts = prefix or name in ANSWERED
        if not counts or value == now or (prefix == "benchmark." and name in SCORED):
            continue
        if isinstance(value, Mapping) and isinstance(now, Mapping):
            yield from _differences(value, now, f"{path}.")
        else:
            yield path, None if value is _ABSENT else value


def _config_key(path: str, job: Job) -> str | None:
    """Return the config key of a setting in a row; None if none sets it."""
    if path.startswith(DERIVED):
        return None
    if path == "benchmark.limit":
        return "limit"
    if path.startswith("method.params.") and len(job.method.parts) > 1:
        owner, _, name = path.removeprefix("method.params.").partition(".")
        if not name:
            return "compressor.ratio" if owner == "cache_ratio" else None
        first = type(job.method.parts[0]).__qualname__ == owner
        return f"{'method' if first else 'compressor'}.params.{name}"
    return path
