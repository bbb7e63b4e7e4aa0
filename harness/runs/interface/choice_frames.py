"""What `evaluate` takes, as pandas frames: methods, models and benchmarks of conf/ and of installed plug-ins.

Without a plug-in nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from espalier.harness.config.catalogue import own_choices
from espalier.harness.config.group_lists import Section
from espalier.harness.config.method_names import method_kind
from espalier.harness.errors import tell_once
from espalier.harness.paths import located


def methods() -> pd.DataFrame:
    """Return a line for each method: its name, kind, variants, hyper-parameters, and paper or rule in a sentence."""
    lines = [
        {
            "name": name,
            "kind": kind or method_kind(section["name"]),
            "variants": ", ".join(section.get("variants") or ()),
            "params": ", ".join(section["params"] or ()),
            "title": title,
        }
        for name, kind, section, title in _choices("method")
    ]
    return pd.DataFrame(lines).set_index("name").sort_values("kind", kind="stable")


def models() -> pd.DataFrame:
    """Return a line for each model: its name, family, id on the hub, whether it is on this machine, and a sentence."""
    return _here_first(
        {
            "name": name,
            "family": section["adapter"],
            "hub": section["hub"],
            "offline": _is_cached("models", section["hub"])
            if section["path"] is None
            else (located(section["path"]) / "config.json").is_file(),
            "title": title,
        }
        for name, _, section, title in _choices("model")
    )


def benchmarks() -> pd.DataFrame:
    """Return a line for each benchmark: name, kind, samples, what scoring needs, whether it is here, and its title.

    `offline`: its samples are generated, or in the cache of Hugging Face; `needs`: a judge, a server or Java.
    """
    frame = _here_first(
        {
            "name": name,
            "kind": section["kind"],
            "samples": section["dataset"]["samples"],
            "needs": ", ".join(section["needs"]),
            "offline": section["dataset"]["path"] is None
            or _is_cached("datasets", section["dataset"]["path"]),
            "title": section["title"] or title,
        }
        for name, _, section, title in _choices("benchmark")
    )
    return frame.astype({"samples": "Int64"})


def _choices(group: str) -> Iterator[tuple[str, str | None, Section, str]]:
    """Yield name, kind of a user's method, section and comment of each file; print a line on skipped plug-ins."""
    listed = own_choices(group)
    for note in listed.notes:
        tell_once(note)
    for name in listed.all_names:
        section = listed.folders.read_choice(group, name)
        yield name, listed.kinds.get(name), section, listed.folders.comment(group, name)


def _here_first(lines: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return lines as a frame by name; those on this machine come first."""
    frame = pd.DataFrame(lines).set_index("name")
    return frame.sort_values("offline", ascending=False, kind="stable")


def _is_cached(kind: str, repository: str | None) -> bool:
    """Return whether the cache of Hugging Face has a snapshot of a repository."""
    # Imported here: the names of methods do not need it.
    from huggingface_hub.constants import HF_HUB_CACHE

    name = f"{kind}--{str(repository).replace('/', '--')}"
    return any(Path(HF_HUB_CACHE, name, "snapshots").glob("*"))
