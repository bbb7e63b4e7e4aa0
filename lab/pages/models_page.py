"""The tables of docs/models.md: `python -m lab.pages.models_page [--write docs/models.md]`.

They follow from conf/model, adapters and tests. Nothing is built; the test modules are imported, which takes seconds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from espalier.harness.config.compose import read_command
from espalier.harness.models.families import ADAPTERS
from espalier.harness.paths import CONF, ROOT
from espalier.harness.specs.commands import command
from lab.pages.family_checks import CHECKS, families_of, instances
from lab.pages.page_writer import print_or_write, table

PAGE = ROOT / "docs" / "models.md"

#: A generated part of the page, by name.
PART = re.compile(r"(<!-- (families|files|checks) -->\n).*?(<!-- end -->\n)", re.DOTALL)

#: What `espalier convert` makes checkpoints of, by family.
CONVERTED = {
    "llava": "llava",
    "llava_next": "llava",
    "internvl": "internvl",
}


def page() -> str:
    """Return the page with its tables."""
    cells = _cells()
    parts = {
        "families": families_table([cell["model"] for cell in cells]),
        "files": files_table(cells),
        "checks": checks_table(),
    }
    text = PAGE.read_text(encoding="utf-8")
    return PART.sub(lambda part: f"{part[1]}{parts[part[2]]}{part[3]}", text)


def _cells() -> list[Mapping[str, Any]]:
    """Return the composed configuration of every file of conf/model."""
    names = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    # A sweep composes what its cells share once.
    request = read_command(["-m", f"model={','.join(names)}", "model.weights=random"])
    assert request is not None
    return list(request.cells)


def families_table(models: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each family: class, media, sites, kinds of method, formats."""
    lines = []
    for family in dict.fromkeys(model["adapter"] for model in models):
        adapter = ADAPTERS.load(family)
        facts = [model["facts"] for model in models if model["adapter"] == family]
        denoises = all(part.get("diffusion") for part in facts)
        partial = all(
            part["text"].get("window_layers") or part["text"].get("linear") for part in facts
        )
        if denoises:
            kinds = "reducers, denoisers"
        elif facts[0].get("canvas"):
            kinds = "reducers"
        else:
            kinds = "reducers, compressors" if partial else "reducers, compressors, decoders"
        lines.append(
            (
                f"`{family}`",
                _class_name(adapter.data.model_class),
                _media(family, adapter),
                _sites(facts, partial),
                kinds,
                _formats(family, adapter),
            )
        )
    return table(
        ("family", "class", "proved on", "sites", "kinds of method", "original format"), lines
    )


def _class_name(model_class: Any) -> str:
    """Return a class's name; a class of the project is marked."""
    is_local = model_class.__module__.startswith("espalier.")
    return f"`{model_class.__name__}`" + (" (here)" if is_local else "")


def _media(family: str, adapter: Any) -> str:
    """Return which media the family's tiny instances are given."""
    chats = [
        chat
        for instance in instances().values()
        if instance.spec.adapter == family
        for chat in instance.chats
    ]
    kinds = [[part["type"] for turn in chat for part in turn["content"]] for chat in chats]
    words = [
        ("a picture", any(parts.count("image") == 1 for parts in kinds)),
        ("several", any(parts.count("image") > 1 for parts in kinds)),
        ("video", adapter.data.takes_video and any("video" in parts for parts in kinds)),
        ("both", any({"image", "video"} <= set(parts) for parts in kinds)),
    ]
    return ", ".join(word for word, holds in words if holds) or "embedded models"


def _sites(facts: Sequence[Mapping[str, Any]], partial: bool) -> str:
    """Return the kinds of site at which methods may act; inside the tower where tokens are its patches.

    Decoding steps of layers that hold a window or a state are not among them.
    """
    tower = ["tower"] if any(part.get("patch_tokens") for part in facts) else []
    if facts[0].get("canvas"):
        after = []
    elif all(part.get("diffusion") for part in facts):
        after = ["block"]
    else:
        after = ["cache"] if partial else ["cache", "decode"]
    return ", ".join([*tower, "vision", "prefix", "layer", *after])


def _formats(family: str, adapter: Any) -> str:
    """Return how a release in the format of its own code is read."""
    if family in CONVERTED:
        return f"`espalier convert {CONVERTED[family]}`"
    return "as it is" if adapter.data.renames or adapter.data.types else "transformers'"


def files_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each file: checkpoint, how it loads, drafts, benchmark."""
    lines = []
    for cell in cells:
        model = cell["model"]
        revision = str(model["revision"])
        hub = "in this repository" if model["hub"] is None else f"`{model['hub']}` {revision[:8]}"
        lines.append(
            (
                f"`{model['name']}`",
                f"`{model['adapter']}`",
                hub,
                "as it is" if model["conversion"] is None else "converted",
                ", ".join(f"`{draft}`" for draft in model["drafts"]),
                f"`{cell['benchmark']['name']}`",
            )
        )
    return table(("`model=`", "family", "checkpoint", "loads", "`drafts`", "benchmark"), lines)


def checks_table() -> str:
    """Return the checks, and which of them run on each family."""
    legend = []
    by_family: dict[str, list[int]] = {}
    for number, check in enumerate(CHECKS, 1):
        file, _, _ = check.test.partition("::")
        subjects = check.subjects()
        for family in families_of(subjects):
            by_family.setdefault(family, []).append(number)
        legend.append((str(number), check.compares, f"[{file}](../{file})", str(len(subjects))))
    lines = [
        (f"`{family}`", _instances(family), _spans(by_family[family]))
        for family in sorted(by_family)
    ]
    return (
        table(("check", "compares", "test", "on"), legend)
        + "\n"
        + table(("family", "tiny instances", "checks"), lines)
    )


def _instances(family: str) -> str:
    """Return the names of a family's tiny instances."""
    names = [name for name, instance in instances().items() if instance.spec.adapter == family]
    return ", ".join(f"`{name}`" for name in names)


def _spans(numbers: Sequence[int]) -> str:
    """Return numbers with runs as spans: 1-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    return print_or_write(page, "lab.pages.models_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
