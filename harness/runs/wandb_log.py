"""Mirror of a committed row in Weights & Biases: offline unless WANDB_API_KEY is set and the server answers.

The row is in the store before; whatever goes wrong here costs one line on stderr and a bounded time, never a row.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from espalier.harness.errors import UserError, plain, tell_once, unknown_name
from espalier.harness.runs.wandb_marks import Mark
from espalier.harness.settings import Names, Text, choice, read_value
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.specs.secrets import masked, scrub, wandb_keys
from espalier.harness.store import RunDir

#: Arguments of `wandb.init` that follow from the run.
OURS = ("id", "name", "dir", "config", "reinit", "settings")

#: Overrides that say nothing of which cells a sweep has.
UNNAMED = (
    "-",
    "log",
    "store=",
    "force=",
    "json=",
    "curves=",
    "report=",
    "cluster",
    "hydra",
    "engine.threads=",
)

#: Options that are texts, and the values of `mode`.
TEXTS = ("entity", "project", "group", "job_type", "notes", "resume_from", "fork_from")
MODES = ("online", "offline", "disabled", "shared")

#: Seconds that the server has to answer, and that a run has to be opened.
ANSWER, OPEN = 5.0, 20.0


def check(options: Mapping[str, Any]) -> None:
    """Raise UserError if the wandb package is missing or an option is none of `wandb.init`'s. Cost: its import."""
    if find_spec("wandb") is None:
        raise UserError("log='wandb' needs the package wandb, which is not installed; valid: none")
    # wandb takes a second to import and need not be installed.
    import wandb

    valid = [name for name in inspect.signature(wandb.init).parameters if name not in OURS]
    for name in options:
        if name not in valid:
            raise unknown_name("log.options", name, valid)
    check_values(options)


def check_values(options: Mapping[str, Any]) -> None:
    """Raise UserError if a value of an option is none that `wandb.init` takes; null says nothing."""
    for name, value in _given(options).items():
        key = f"log.options.{name}"
        if name == "mode":
            choice(key, value, MODES)
        elif name == "tags":
            read_value(key, value, Names)
        elif name in TEXTS:
            read_value(key, value, Text)


def mirror(
    directory: RunDir, config: Mapping[str, Any], spec: RunSpec, group: str | None = None
) -> None:
    """Log a committed run once: its config, metrics, answers and row; nothing where this row has been logged before.

    A run takes its key as id, so that whatever logs it again adds to no second one. Trouble is told in one line on
    stderr.

    Args:
        directory: of the run, whose row is committed.
        config: what the key was computed from.
        spec: its store, options of `wandb.init`, and how many answers are shown.
        group: of a sweep, where the options name none.
    """
    try:
        _mirror(directory, config, spec, group)
    except Exception as error:  # a third party's service may fail in any way, and the row is stored
        line = plain(masked(next(iter(str(error).splitlines()), ""), wandb_keys()))
        print(
            f"log=wandb: run {directory.path.name} was not logged: {type(error).__name__}: {line}; "
            "its row is in the store",
            file=sys.stderr,
            flush=True,
        )
    finally:
        scrub(logs(spec.store / "wandb", directory.path.name), wandb_keys())


def logs(folder: Path, key: str) -> list[Path]:
    """Return what wandb logged of its own work on a run, which repeats what servers answer."""
    places = (
        "*.log",
        f"*run-*-{key}/logs/*",
        f"*run-*-{key}/*.log",
        "cache/logs/**/*",
        "cache/wandb/logs/**/*",
    )
    return [path for place in places for path in folder.glob(place) if path.is_file()]


def group_of(argv: Sequence[str]) -> str:
    """Return the name of a sweep: what its command line asks for, and a digest that tells long ones apart.

    Whatever does not say which cells there are is left out, so that the same sweep has one name when it goes on.
    """
    asked = [one for one in argv if not one.lstrip("+~").startswith(UNNAMED)]
    digest = sha256("\n".join(asked).encode()).hexdigest()[:8]
    return f"{' '.join(asked)[:100]} {digest}"


def _mirror(directory: RunDir, config: Mapping[str, Any], spec: RunSpec, group: str | None) -> None:
    mark = Mark.of(spec.store, directory.path.name)
    row = directory.row()
    if row is None or mark.says(row):
        return
    with mark.held():
        if mark.says(row):  # another command has logged it meanwhile
            return
        # What a killed command began, or the run of an earlier row: there is one run of a key.
        mark.clear()
        options = {"mode": mode(), "group": group, **_given(spec.log_options)}
        folder = _log(directory, row, config, spec, options)
        mark.write(row, options["mode"], options.get("project"), options["group"], folder)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _log(
    directory: RunDir,
    row: Mapping[str, Any],
    config: Mapping[str, Any],
    spec: RunSpec,
    options: Mapping[str, Any],
) -> Path:
    """Write one run of wandb and return its folder."""
    # wandb takes a second to import and need not be installed.
    import wandb

    from espalier.harness.runs import wandb_content as content

    with _below(spec.store / "wandb"):
        run = wandb.init(
            **options,
            id=row["run_key"],
            name=f"{row['model']} {row['method']} {row['ratio']:g} {row['benchmark']}",
            dir=str(spec.store),
            config=dict(config),
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, init_timeout=OPEN
            ),
        )
        try:
            folder = Path(run.dir).parent
            run.log(content.history(row, directory.journal.entries(), spec.log_samples))
            run.summary.update(dict(row))
            run.log_artifact(content.artifact(directory))
        finally:
            run.finish()
    return folder


@contextmanager
def _below(folder: Path) -> Iterator[None]:
    """Keep files of artifacts and settings in a folder: in the home directory, an offline run could not be moved."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {f"WANDB_{name}_DIR": folder / name.lower() for name in ("DATA", "CACHE", "CONFIG")}
    ours = {name: str(path) for name, path in names.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def mode() -> str:
    """Return `online` if a key is set and the server answers, else `offline`."""
    if not os.environ.get("WANDB_API_KEY"):
        return "offline"
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if reachable(address):
        return "online"
    tell_once(
        f"log=wandb: {masked(address, wandb_keys())} does not answer; runs are logged offline, "
        "`python -m espalier wandb` sends them"
    )
    return "offline"


@cache
def reachable(address: str) -> bool:
    """Say whether a server answers at all, over the proxy if one is set. Cost: `ANSWER` seconds at most, once."""

    def ask() -> bool:
        try:
            urlopen(address, timeout=ANSWER).close()
        except HTTPError:
            return True  # it answers, if only to refuse
        except (OSError, ValueError):
            return False
        return True

    # Looking the name up has no time limit of its own; nobody waits for the thread then.
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(ANSWER)
    return answers == [True]
