"""Mirror of a committed row in Weights & Biases: offline unless WANDB_API_KEY is set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import UserError


def check_installed() -> None:
    """Raise UserError if the wandb package is missing. Cost: a look at the installed packages, no import."""
    from importlib.util import find_spec

    if find_spec("wandb") is None:
        raise UserError("log='wandb' needs the package wandb, which is not installed; valid: none")


def mirror(
    row: Mapping[str, Any], config: Mapping[str, Any], store: Path, options: Mapping[str, Any]
) -> None:
    """Log one run: the config it was keyed by, its metrics, and the row as the summary.

    Args:
        row: a committed row; the run takes its key as id, so that logging it again replaces it.
        config: what the key was computed from.
        store: everything wandb writes goes below `<store>/wandb`.
        options: keyword arguments of `wandb.init`: project, group, tags and so on.
    """
    import wandb

    folder = store / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    # Without these, artifacts and settings land in the home directory and an offline run cannot be moved.
    for name in ("DATA", "CACHE", "CONFIG"):
        os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / name.lower()))
    run = wandb.init(
        mode="online" if os.environ.get("WANDB_API_KEY") else "offline",
        id=row["run_key"],
        name=f"{row['model']} {row['method']} {row['ratio']:g} {row['benchmark']}",
        dir=str(store),
        config=dict(config),
        reinit="finish_previous",
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        **options,
    )
    try:
        run.log({f"metrics/{name}": values["value"] for name, values in row["metrics"].items()})
        run.summary.update(dict(row))
    finally:
        run.finish()
