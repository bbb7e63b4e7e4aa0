"""Mirror of a committed row in Weights & Biases: offline unless WANDB_API_KEY is set and the server answers.

The row is in the store before; whatever goes wrong here costs one line on stderr and a bounded time, never a row.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from harness.errors import UserError, tell_once, unknown_name

#: Arguments of `wandb.init` that follow from the run.
OURS = ("id", "name", "dir", "config", "reinit", "settings")

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


def mirror(
    row: Mapping[str, Any], config: Mapping[str, Any], store: Path, options: Mapping[str, Any]
) -> None:
    """Log one run: the config it was keyed by, its metrics, and the row as the summary.

    Trouble is told in one line on stderr.

    Args:
        row: a committed row; the run takes its key as id, so that logging it again replaces it.
        config: what the key was computed from.
        store: everything wandb writes goes below `<store>/wandb`.
        options: keyword arguments of `wandb.init`: project, group, tags and so on.
    """
    try:
        _mirror(row, config, store, options)
    except Exception as error:  # a third party's service may fail in any way, and the row is stored
        line = next(iter(str(error).splitlines()), "")
        print(
            f"log=wandb: run {row['run_key']} was not logged: {type(error).__name__}: {line}; "
            "its row is in the store",
            file=sys.stderr,
            flush=True,
        )


def _mirror(
    row: Mapping[str, Any], config: Mapping[str, Any], store: Path, options: Mapping[str, Any]
) -> None:
    # wandb takes a second to import and need not be installed.
    import wandb

    folder = store / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    # Without these, artifacts and settings land in the home directory and an offline run cannot be moved.
    for name in ("DATA", "CACHE", "CONFIG"):
        os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / name.lower()))
    run = wandb.init(
        **{"mode": mode(), **options},
        id=row["run_key"],
        name=f"{row['model']} {row['method']} {row['ratio']:g} {row['benchmark']}",
        dir=str(store),
        config=dict(config),
        reinit="finish_previous",
        settings=wandb.Settings(
            silent=True, console="off", x_disable_stats=True, init_timeout=OPEN
        ),
    )
    try:
        run.log({f"metrics/{name}": values["value"] for name, values in row["metrics"].items()})
        run.summary.update(dict(row))
    finally:
        run.finish()


def mode() -> str:
    """Return `online` if a key is set and the server answers, else `offline`."""
    if not os.environ.get("WANDB_API_KEY"):
        return "offline"
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if reachable(address):
        return "online"
    tell_once(
        f"log=wandb: {address} does not answer; runs are logged offline, `wandb sync` sends them"
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
