"""What `evaluate` takes, as pandas frames: methods, models and benchmarks of conf/ and of installed plug-ins.

Without a plug-in nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from espalier.harness.config.catalogue import OwnChoices, own_choices
from espalier.harness.config.method_names import method_kind
from espalier.harness.errors import tell_once
from espalier.harness.paths import located


def methods() -> pd.DataFrame:
    """Return a line for each method: its name, kind, variants, hyper-parameters, and paper or rule in a sentence."""
    listed = _choices("method")
    sections = {name: listed.folders.read_choice("method", name) for name in listed.all_names}
    lines = [
        {
            "name": name,
            "kind": listed.kinds.get(name) or method_kind(section["name"]),
            "variants": ", ".join(section.get("variants") or ()),
            "params": ", ".join(section["params"] or ()),
            "title": listed.folders.comment("method", name),
        }
        for name, section in sections.items()
    ]
    return _frame(lines, "kind")


def models() -> pd.DataFrame:
    """Return a line for each model: its name, family, id on the hub, whether it is on this machine, and a sentence."""
    lines, listed = [], _choices("model")
    for name in listed.all_names:
        section = listed.folders.read_choice("model", name)
        lines.append(
            {
                "name": name,
                "family": section["adapter"],
                "hub": section["hub"],
                "offline": _has_model(section),
                "title": listed.folders.comment("model", name),
            }
        )
    return _frame(lines, "offline")


def benchmarks() -> pd.DataFrame:
    """Return a line for each benchmark: name, kind, samples, what scoring needs, whether it is here, and its title.

    `offline`: its samples are generated, or in the cache of Hugging Face; `needs`: a judge, a server or Java.
    """
    lines, listed = [], _choices("benchmark")
    for name in listed.all_names:
        section = listed.folders.read_choice("benchmark", name)
        dataset = section["dataset"]
        lines.append(
            {
                "name": name,
                "kind": section["kind"],
                "samples": dataset["samples"],
                "needs": ", ".join(section["needs"]),
                "offline": dataset["path"] is None or _has_data(dataset["path"]),
                "title": section["title"] or listed.folders.comment("benchmark", name),
            }
        )
    frame = _frame(lines, "offline")
    return frame.astype({"samples": "Int64"})


def _choices(group: str) -> OwnChoices:
    """Return the files of a group; print a line on skipped plug-ins."""
    listed = own_choices(group)
    for note in listed.notes:
        tell_once(note)
    return listed


def _frame(lines: list[dict[str, Any]], first: str) -> pd.DataFrame:
    """Return lines as a frame by name, sorted by a column: files on this machine come first."""
    frame = pd.DataFrame(lines).set_index("name")
    ascending = first != "offline"
    return frame.sort_values(first, ascending=ascending, kind="stable")


def _has_model(section: Mapping[str, Any]) -> bool:
    if section["path"] is not None:
        return (located(section["path"]) / "config.json").is_file()
    return _is_cached("models", section["hub"])


def _has_data(dataset: str) -> bool:
    return _is_cached("datasets", dataset)


def _is_cached(kind: str, repository: str | None) -> bool:
    """Return whether the cache of Hugging Face has a snapshot of a repository."""
    # Imported here: the names of methods do not need it.
    from huggingface_hub.constants import HF_HUB_CACHE

    if repository is None:
        return False
    folder = Path(HF_HUB_CACHE, f"{kind}--{repository.replace('/', '--')}", "snapshots")
    return folder.is_dir() and any(folder.iterdir())
