"""Checks of composed cells before torch is imported.

Admission repeats them with all others (harness/runs/admission.py), except for data sets, which tasks miss when opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from espalier.harness.config.cell_settings import CellSettings, read_amount, read_settings
from espalier.harness.config.checkpoint_names import GROUP, PREFIX, REVISION, model_choice
from espalier.harness.config.composer import Cell
from espalier.harness.config.group_lists import choices, merged, read_choice
from espalier.harness.config.method_names import method_kind, methods_of
from espalier.harness.errors import Refused, UserError
from espalier.harness.paths import located
from espalier.harness.settings import shared_reader, table
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.hub_cache import (
    data_set_cached,
    downloads,
    go_offline,
    may_download,
    other_format,
    require_cached,
    way_to_download,
)
from espalier.harness.specs.run_spec import in_words_of_the_draft

#: Bytes at the start of a row that hold its cell.
CELL_BYTES = 1024


def check_cells(cells: Iterable[Cell], dry: bool) -> list[CellSettings]:
    """Return the settings of cells; refuse those that cannot run, then download checkpoints of the hub.

    What is refused: a wrong value, a wrong pair, a missing checkpoint, a missing data set.

    Values that depend on a method's class or a model's facts are left to later checks.

    Args:
        cells: the cells of a command.
        dry: whether nothing runs, so that no data are needed.

    Raises:
        UserError: one line with the config key, the value and what is valid.

    Cost: 0.5 ms a cell; once for each model, benchmark and method 0.1 s if one is looked up in the hub's cache.
    """
    settings, checked, read = [], set(), shared_reader()
    wanted: dict[tuple[str, str | None], Callable[[], AbstractContextManager[None]]] = {}
    go_offline()
    for cell in cells:
        values = read_settings(cell, read)
        settings.append(values)
        # A draft can do without every token.
        kind = "decoder" if values.method.code else method_kind(values.method.name)
        read_amount(values.ratio, values.keep, drafts=kind == "decoder")
        model, benchmark = values.model, values.benchmark.name
        names = *map(model.get, ("name", "hub", "path")), benchmark, cell["method"].get("draft")
        key = tuple(map(str, (*names, values.method.name, values.compressor.name, values.store)))
        if key in checked:
            continue
        checked.add(key)
        if cell["cluster"].get("name") != "local":
            downloads.set(False)
        if "name" in model:  # a missing name is reported later
            _check_pair(cell)
        if not dry and _check_checkpoint(model, cell["offline"]):
            wanted[model["hub"], model.get("revision")] = nullcontext
        draft = None if dry else _draft_of(cell)
        if draft is not None:
            with in_words_of_the_draft():
                if _check_checkpoint(draft, cell["offline"]):
                    key = draft["hub"], draft["revision"]
                    wanted.setdefault(key, in_words_of_the_draft)
        if not dry and cell["cluster"].get("name") == "local":
            _check_data(cell)
    if wanted:
        # Imports the hub's library.
        from espalier.harness.specs.hub_files import checkpoint_folder

        for (hub, revision), words in wanted.items():
            with words():
                checkpoint_folder(hub, revision)
    return settings


#: Start of the folders of the package's own tasks.
SHIPPED = "pkg://espalier/"


def check_vocabulary(spec: Any) -> None:
    """Refuse a published benchmark on a model with a closed vocabulary, of a run or a cell.

    Raises:
        UserError: the answers would be noise, and the row looks like any other.
    """
    refuse(
        "vocabulary",
        spec,
        benchmarks=lambda: ", ".join(
            name for name in choices("benchmark") if name.startswith("seedling_")
        ),
    )


def _check_pair(cell: Cell) -> None:
    check_vocabulary(cell)
    method, compressor = cell["method"], cell["compressor"]
    kinds = method_kind(method["name"]), method_kind(compressor["name"])
    pair = {"model": cell["model"], "method": {**method, "compressor": compressor}}
    stacked = compressor["name"] != "none"
    facts = table("model.facts", cell["model"]["facts"])
    denoises = any(facts.get(name) is not None for name in ("diffusion", "canvas"))
    try:
        if stacked and None not in kinds:
            refuse(
                "two methods",
                pair,
                kinds=kinds,
                compressors=lambda: ", ".join(methods_of("compressor")),
            )
        if denoises and (stacked or kinds[0] in ("compressor", "decoder")):
            refuse("a model that denoises", pair, of_steps=False)
    except Refused:
        # Such cells of a sweep are left out later.
        if cell["refused"] != "skip":
            raise


def _draft_of(cell: Cell) -> dict[str, Any] | None:
    """Return the section of a cell's draft model; None: there is none, or admission looks for it in further folders."""
    method, drafts = cell["method"], cell["model"].get("drafts") or ()
    name = method.get("draft") or next(iter(drafts if "draft" in method else ()), None)
    if name is None:
        return None
    choice = model_choice(name, "method.draft")
    if choice in choices(GROUP):
        section = read_choice(GROUP, choice)
    elif choice.startswith(PREFIX) and not os.path.isdir(name):
        section = {"name": name, "hub": name, "revision": REVISION, "weights": "trained"}
    else:
        return None
    return merged(section, method.get("draft_options") or {})


def _check_checkpoint(model: Mapping[str, Any], offline: bool) -> bool:
    """Return whether a checkpoint of the hub may be downloaded."""
    path, hub, revision = model.get("path"), model.get("hub"), model.get("revision")
    if model.get("weights") != "trained":
        return False
    if isinstance(path, str):
        folder = located(path)
        if not os.path.exists(folder / "config.json"):
            raise UserError(
                f"model.path={str(folder)!r} holds no model{other_format(folder)}; "
                f"valid: a directory with config.json and *.safetensors"
            )
    elif path is None and isinstance(hub, str):
        return require_cached(model["name"], hub, revision, offline) is None
    return False


def _check_data(cell: Cell) -> None:
    """Raise UserError if a run without a row needs a data set that is neither here nor on the hub."""
    benchmark, name = cell["benchmark"], cell["benchmark"]["dataset"].get("path")
    if benchmark.get("path") is not None or not isinstance(name, str):
        return
    if not str(benchmark.get("include_path") or SHIPPED).startswith(SHIPPED):
        return  # a task of the user's loads what it names itself
    if data_set_cached(name) or (not cell["force"] and _stored(cell)):
        return
    if may_download(cell["offline"]):
        # Imports the hub's library.
        from espalier.harness.specs.hub_files import Wanted, reach

        reach(Wanted(name, revision=benchmark["dataset"].get("revision")))
        return
    raise UserError(
        f"benchmark={benchmark['name']!r}: its data set {name!r} is not in the local Hugging Face cache; valid: "
        f"benchmark.path=<a folder with a copy>, or {way_to_download(cell['offline'])}first, where "
        f"there is a network: python -m espalier benchmarks prefetch {benchmark['name']}"
    )


def _stored(cell: Cell) -> bool:
    """Return whether the store may have rows of a cell's model and benchmark, which need no data."""
    marks = [f'"{key}": "{cell[key]["name"]}"'.encode() for key in ("model", "benchmark")]

    def is_of_cell(path: Path) -> bool:
        with path.open("rb") as file:
            start = file.read(CELL_BYTES)
        return all(mark in start for mark in marks)

    return any(map(is_of_cell, located(str(cell["store"])).glob("runs/*/row.json")))
