"""`store show --pictures`: samples of a stored run as pictures with the kept tokens drawn, and a page of them.

The job of the run is made again from its row alone: its cell, and the settings that differ from the config's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from espalier.harness.config.benchmark_section import NAME as OWN_DATA
from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import Cell
from espalier.harness.config.group_lists import ConfFolders
from espalier.harness.config.lmms_task_files import TASK, library
from espalier.harness.config.method_names import is_combination, setting_names
from espalier.harness.config.overrides import in_full
from espalier.harness.errors import UserError, foreign, plain
from espalier.harness.paths import CONF
from espalier.harness.runs.admission import Job, admit
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.run_settings import plugin_digest
from espalier.harness.runs.sample_pictures import SamplePicture, draw_samples
from espalier.harness.settings import PLUS
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import conf_folders, plugin_at
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
DERIVED = ("model.adapter", "model.revision", "model.facts", "benchmark.data", "draft", "artifacts")

#: How a user allows other code than that of the row.
OTHER_CODE = "the code of then, or --set method=<file>.py:<class> for another"

#: The config key that chooses each part of a run.
GROUPS = {
    key: in_full(f"{key}=").removesuffix("=")
    for key in ("model", "benchmark", "method", "compressor")
}

#: Entries of a row's cell that are compared as they are; names of models and benchmarks have several spellings.
CELL = ("method", "variant", "ratio", "keep", "budget_rule", "seed")

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
    with foreign(f"--pictures={str(folder)!r} cannot be written", "a folder"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").touch()
    pictures: dict[Key, SamplePicture] = {}
    with redirect_stdout(sys.stderr):
        job = job_of_row(run.row, store, overrides)
        for picture in draw_samples(job.spec, job.method, Pool().adapter(job.spec.model), words):
            if picture.drawing is not None:
                picture.drawing.savefig(folder / picture.file, bbox_inches="tight")
            pictures[picture.key] = picture
    changed = [key for key in words if pictures[key].answer != run.answers[key].answer]
    title = f"{run.row['model']} {run.name} {run.row['benchmark']}"
    _write_page(folder / "index.html", title, [(pictures[key], words[key]) for key in words])
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


def _write_page(path: Path, title: str, samples: Sequence[tuple[SamplePicture, Words]]) -> None:
    """Write a page of pictures that are in the same folder."""
    figures = []
    for picture, words in samples:
        image = f'<img src="{escape(picture.file)}">' if picture.drawing else "<p>no picture</p>"
        is_same = picture.answer == words.get("answer")
        items = words if is_same else {**words, "answer now": picture.answer}
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

    Names of the row are looked up, and its values are put into the composed config: no text of a row is read as an
    override. Code that it names is imported while it has the digest in the row.

    Args:
        row: as stored.
        store: where calibrations are searched first.
        overrides: of its command line that a row does not hold, such as `model.path=...`; `method=...` allows code with
            another digest.

    Raises:
        UserError: a setting of the row cannot be made again; the line names it.
    """
    typed = {in_full(text).lstrip("+~").partition("=")[0] for text in overrides}
    run = f"run {row['run_key'][:12]}"
    with foreign(f"{run} cannot be made again from its row", "a row that this version wrote"):
        evicts = "cache_ratio" in row["settings"]["method"]["params"]
        method, _, compressor = (
            row["method"].rpartition(PLUS) if evicts else (row["method"], "", "")
        )
        names = {"model": row["model"], "benchmark": row["benchmark"], "method": method}
        names |= {"compressor": compressor} if compressor else {}
        names = {key: name for key, name in names.items() if GROUPS[key] not in typed}
        values = {
            "method.variant": row["variant"],
            "keep": row.get("keep"),
            # A number of kept tokens leaves the ratio open.
            "ratio": None if "keep" in row else row["ratio"],
            "budget.rule": row["budget_rule"],
            "seed": row["seed"],
            "limit": row["settings"]["benchmark"]["limit"],
        }
        values = {key: value for key, value in values.items() if key not in typed}
        for key in ("method", "compressor"):
            code = stored_code(row, names[key], OTHER_CODE) if key in names else None
            if code is not None:
                values |= {f"{key}.name": names[key], f"{key}.code": code, f"{key}.params": {}}
                names[key] = "none"
        choices = [f"{GROUPS[key]}={_choice(key, name, typed)}" for key, name in names.items()]
    (cell,) = read_command([*choices, *overrides]).cells
    values["store"] = str(store)
    job = _job(cell, values)
    settable = {
        config_key: value
        for path, value in _differences(row["settings"], job.parts["settings"])
        if (config_key := _config_key(path, job)) is not None and config_key not in typed
    }
    if settable:
        job = _job(cell, values | settable)
    differences = [path for path, _ in _differences(row["settings"], job.parts["settings"])]
    differences += [key for key in CELL if job.parts["cell"].get(key) not in (None, row.get(key))]
    if typed.isdisjoint(GROUPS.values()) and job.parts.get("plugins", []) != code_digests(row):
        differences.append("extra.plugins")
    if differences:
        raise UserError(
            f"{run} cannot be made again from its row: {', '.join(differences)} differ; "
            "valid: --set with the overrides of its command line, such as model.path=<folder>, or the files of then"
        )
    return job


def _job(cell: Cell, values: Mapping[str, Any]) -> Job:
    """Return the job of a cell after values, by their dotted keys, have replaced those of the config."""
    changed = deepcopy(dict(cell))
    for key, value in values.items():
        *tables, name = key.split(".")
        table: Any = changed
        for part in tables:
            table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict):  # else the setting stays different, and the caller names it
            table[name] = value
    return admit(replace(build_spec(changed), offline=True), Digests(), places=False)


def _choice(key: str, name: str, typed: Collection[str]) -> str:
    """Return the choice of a group that a name in a row stands for.

    Raises:
        UserError: there is none, or the row is of own data and their place is not given.
    """
    if is_named("method" if key == "compressor" else key, name):
        return name
    if key == "benchmark" and name.startswith(f"{OWN_DATA}:"):
        if "benchmark.path" not in typed:
            raise UserError(
                f"benchmark={name!r}: its row does not hold the place of your data; "
                "valid: --set benchmark.path=<file or folder>"
            )
        return OWN_DATA
    task = name.removeprefix(TASK)
    if key == "benchmark" and task != name and task in library().names:
        return name
    raise UserError(f"{key}={name!r} is no name of conf/{key}; valid: --set {key}=<name or place>")


def _differences(
    stored: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the stored value of each leaf that differs and decides how samples are answered."""
    for name in {**stored, **current}:
        path, value, now = f"{prefix}{name}", stored.get(name, _ABSENT), current.get(name, _ABSENT)
        counts = name not in SCORED if prefix == "benchmark." else prefix or name in ANSWERED
        if not counts or value == now:
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
    if path.startswith("benchmark.score."):
        name = path.rpartition(".")[2]
        return "benchmark.score" if name == "name" else f"benchmark.tolerance.{name}"
    if path.startswith("method.params.") and len(job.method.parts) > 1:
        return _key_of_part(*path.removeprefix("method.params.").partition(".")[::2], job)
    return path


def _key_of_part(owner: str, name: str, job: Job) -> str | None:
    """Return the config key of a hyper-parameter of several methods on a prompt, `owner` is a class or a parameter."""
    if not name:
        keys = {"cache_ratio": "compressor.ratio", "first_ratio": "method.params.first_ratio"}
        return keys.get(owner)
    reducers = job.spec.method.name.split(PLUS)
    place = [type(part).__qualname__ for part in job.method.parts].index(owner)
    if place == len(reducers):
        return f"compressor.params.{name}"
    part = f"{reducers[place]}." if len(reducers) > 1 else ""
    return f"method.params.{part}{name}"


def code_digests(row: Mapping[str, Any]) -> list[Any]:
    """Return the digests of users' code in a row."""
    return [plugin.get("digest") for plugin in row["extra"].get("plugins", ())]


def named_choices(group: str) -> set[str]:
    """Return the names of a group in conf/ and in installed plug-ins, and former names of methods."""
    names = set(ConfFolders((CONF, *conf_folders())).choices(group))
    return names | set(setting_names()) if group == "method" else names


def is_named(group: str, name: str) -> bool:
    """Return whether a name chooses a config of a group, or two methods joined by a plus."""
    return name in named_choices(group) or (group == "method" and is_combination(name))


def stored_code(row: Mapping[str, Any], name: str, remedy: str = "the code of then") -> str | None:
    """Return the place of a user's class that a row names for a method; None: the name is that of a config.

    Nothing is imported: the digest of the code in that place is compared with the one in the row.

    Args:
        row: as stored.
        name: of the method.
        remedy: what is valid otherwise.

    Raises:
        UserError: there is no such code, or it has another digest, or the row has none.
    """
    if is_named("method", name):
        return None
    problem = f"run {row['run_key'][:12]}: the code of method={name!r}"
    with foreign(f"{problem} cannot be read", remedy):
        place = row["extra"]["code"][name]
        reference = CodeReference.parse(place)
        # Rows have absolute paths; another would lead to a file of the folder in which the row is read.
        is_whole = reference is not None and str(reference.anchored(Path.cwd())) == place
        root = reference.root if reference is not None and is_whole else None
        files = None if root is None else plugin_digest(plugin_at(root), Digests())
        if files is None or files not in code_digests(row):
            raise UserError(
                f"{problem} is not there or has changed since, and is not imported: {place!r}; valid: {remedy}"
            )
    return str(place)
