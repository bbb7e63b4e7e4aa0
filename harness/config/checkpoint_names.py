"""Checkpoints in the place of a model's name: `model=llava-hf/llava-1.5-7b-hf`, `model=./ckpt`.

The hub id of a file in conf/model is another name of that file. A folder, or another id, becomes the choice
`checkpoint:<folder or id>`: its section is made from its config.json.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import UserError, brief, foreign, near_names
from espalier.harness.models.families import check_format, family_of
from espalier.harness.paths import CONF
from espalier.harness.specs.hub_cache import (
    downloads,
    file_of_hub,
    go_offline,
    may_download,
    other_format,
)

GROUP = "model"
PREFIX = "checkpoint:"
CONFIG = "config.json"
REVISION = "main"
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PLACES = ("/", "./", "../", "~")


def with_checkpoints(overrides: Sequence[str]) -> list[str]:
    """Return overrides with a `model_choice` for each checkpoint in the place of a model's name."""
    if "offline=true" in map(str.lower, overrides):
        downloads.set(False)
    if any(map(_names_checkpoint, overrides)):
        go_offline()
    return [_with_choices(text) if _names_checkpoint(text) else text for text in overrides]


def _names_checkpoint(override: str) -> bool:
    key, _, value = override.partition("=")
    return (
        key == GROUP and value[:1] not in ("[", "{") and ("/" in value or value[:1] in (".", "~"))
    )


def _with_choices(override: str) -> str:
    key, _, value = override.partition("=")
    if value[:1] in ("'", '"') and value[:1] == value[-1:]:
        value = value[1:-1]
    elif not os.path.isdir(os.path.expanduser(value)):
        if "(" in value:  # an expression of Hydra's grammar
            return override
        return f"{key}={','.join(map(model_choice, value.split(',')))}"
    return f"{key}={model_choice(value)}"


def model_choice(name: str, key: str = GROUP) -> str:
    """Return the choice of the group `model` that a name, a hub id or a folder stands for; unknown names stay.

    Args:
        name: as typed; a folder may be relative to the working directory.
        key: the start of an error line.

    Raises:
        UserError: neither a folder with a config.json, nor an id of conf/model, of the local Hugging Face cache or of
            the hub, or the config.json is of no supported family.
    """
    if "/" not in name and name in choices(GROUP):
        return name
    # Not Path.is_file and Path.is_dir, which raise for names that are too long.
    folder = Path(os.path.expanduser(name))
    if os.path.isfile(folder / CONFIG):
        _check_family(folder / CONFIG, name, key)
        return PREFIX + _quoted(str(folder.absolute()))
    if name.startswith(_PLACES):
        near = f"holds no {CONFIG}" if os.path.isdir(folder) else "is not a folder"
        raise UserError(
            f"{key}={brief(name)!r} {near}{other_format(folder)}; "
            f"valid: the folder of a checkpoint, a hub id, or a name of conf/model (model=?)"
        )
    if "/" not in name or name.startswith(PREFIX):
        return name
    if name in hub_names():
        return hub_names()[name]
    config = file_of_hub(name, CONFIG, REVISION) if _ID.fullmatch(name) else None
    if config is None and _ID.fullmatch(name) and may_download():
        config = _downloaded(name, key)
    if config is None:
        hub_id = brief(name) if _ID.fullmatch(name) else "<owner>/<name>"
        raise UserError(
            f"{key}={brief(name)!r} is no hub id of conf/model, and not in the local Hugging Face cache"
            f"{near_names(name, hub_names(), at_most=1)}; valid: a name or hub id of conf/model (model=?), a folder, "
            f"or first, where there is a network: hf download {hub_id}"
        )
    _check_family(config, name, key)
    return PREFIX + _quoted(name)


@cache  # a sweep composes it several times
def checkpoint_section(choice: str) -> dict[str, Any]:
    """Return the section of the group `model` for a choice that `model_choice` made. Cost: imports the family, seconds.

    Raises:
        UserError: the checkpoint is not complete, or does not describe a model of a supported family.
    """
    # Import torch and transformers, and most commands name models of conf/.
    import torch

    from espalier.harness.config.model_section import model_spec
    from espalier.harness.models.build_adapter import UNREAD, read_checkpoint

    source = unquote(choice.removeprefix(PREFIX))
    place = (
        {"path": source} if Path(source).is_absolute() else {"hub": source, "revision": REVISION}
    )
    # A GPU computes in half precision.
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    named = {"name": Path(source).name, **place, "dtype": dtype}
    unread = {**read_choice("base", GROUP), **named, "adapter": "none", "facts": UNREAD}
    spec = read_checkpoint(model_spec(unread), GROUP)
    facts = asdict(spec.facts)
    facts["signals"] = sorted(facts["signals"])
    return {
        "defaults": ["/base/model@_here_", "_self_"],
        **named,
        "adapter": spec.adapter,
        "conversation": spec.conversation,
        "facts": facts,
    }


@cache
def hub_names() -> Mapping[str, str]:
    """Return the file of conf/model that states each hub id."""
    files = {name: CONF / GROUP / f"{name}.yaml" for name in choices(GROUP)}
    sections = {name: read_yaml(path) for name, path in files.items()}
    return {section["hub"]: name for name, section in sections.items() if section.get("hub")}


def _downloaded(name: str, key: str) -> Path:
    """Return the config.json of a hub id after a download of all files but the weights."""
    # Imports the hub's library.
    from espalier.harness.specs.hub_files import Wanted, fetch
    from espalier.harness.specs.revisions import MODEL_FILES

    small = tuple(pattern for pattern in MODEL_FILES if pattern != "*.safetensors")
    try:
        return fetch(Wanted(name, "model", REVISION, small)) / CONFIG
    except UserError as error:
        near = near_names(name, hub_names(), at_most=1)
        raise UserError(
            f"{key}={brief(name)!r} is no hub id of conf/model{near}; {error}"
        ) from error


def _check_family(file: Path, name: str, key: str) -> None:
    """Raise UserError unless a config.json is that of a supported family, in a supported format."""
    with foreign(f"{key}={name!r}: {CONFIG} cannot be read", "the original file"):
        config = json.loads(file.read_bytes())
        model_type = config.get("model_type")
    check_format(name, str(file.parent), config)
    family_of(model_type, f"{key}={name!r}: model_type")


def as_typed(override: str) -> str:
    """Return an override with hub ids and folders as they are typed, where Hydra's grammar takes them."""

    def source(match: re.Match[str]) -> str:
        name = unquote(match[1])
        return name if re.fullmatch(r"[\w./-]+", name) else match[0]

    return re.sub(rf"\b{PREFIX}([^,]+)", source, override)


def _quoted(source: str) -> str:
    """Return a folder or id in characters that Hydra's grammar takes without quotes."""
    return quote(source, safe="").replace("~", "%7E")
