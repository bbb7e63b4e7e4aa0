"""One section of the config by the name of its choice: `method=fastv` for `espalier.apply`, a draft's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from espalier.harness.config import checkpoint_names, name_source, resolvers, task_source
from espalier.harness.config.cell_config import plain
from espalier.harness.config.group_lists import ConfFolders
from espalier.harness.config.hydra_internals import apply_overrides, loader_of, search_also
from espalier.harness.config.overrides import HYDRAS, check_name
from espalier.harness.config.plugin_source import place_of
from espalier.harness.config.search_folders import check_owner
from espalier.harness.paths import CONF

#: What Hydra calls the origin of further folders.
COMMAND_LINE = "command line"


def register_sources() -> None:
    """Register the resolvers and sources that the files of conf use; a second call changes nothing."""
    resolvers.register()
    task_source.register()
    name_source.register()


def compose_section(
    group: str,
    name: str,
    key: str | None = None,
    values: Sequence[str] = (),
    folders: Sequence[Path] = (),
) -> dict[str, Any]:
    """Return the section that `<group>=<name>` composes, as plain data; hydra.main's own state stays as it is.

    Args:
        group: a folder of conf.
        name: a file in it.
        key: what an error line calls the name; None: the group.
        values: further overrides.
        folders: further folders of configs.

    Raises:
        UserError: no folder has such a file, or two have it.

    Cost: 20 ms, and 0.2 s where the section refers to others.
    """
    register_sources()
    if group == checkpoint_names.GROUP:
        name = checkpoint_names.model_choice(name, key or group)
    files = ConfFolders((CONF, *folders), _load)
    if len(files.owners(group, name)) == 1:
        try:
            return section_alone(group, files.read_choice(group, name), values)
        except (*HYDRAS, OSError, yaml.YAMLError):
            # It refers to other sections, or composing in full raises the error with its reason.
            pass
    return section_in_full(group, name, key or group, values, folders)


def section_alone(group: str, section: Mapping[str, Any], values: Sequence[str]) -> dict[str, Any]:
    """Return a section that refers to itself alone, after overrides.

    Raises:
        one of HYDRAS: it refers to others, or an override does not apply.
    """
    config = OmegaConf.create({group: dict(section)})
    OmegaConf.set_struct(config, True)
    if values:
        apply_overrides(OverridesParser.create().parse_overrides(list(values)), config)
    return plain(config[group], resolve=True)


def section_in_full(
    group: str, name: str, key: str, values: Sequence[str] = (), folders: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return a section as Hydra composes it with the whole config; arguments as of `compose_section`."""
    # `compose` needs Hydra's global state, which belongs to the calling run.
    loader = loader_of(CONF)
    search_also(loader, COMMAND_LINE, map(place_of, folders))
    options = loader.get_group_options(group)
    check_name(key, group, name, options)
    if name in options:
        check_owner(key, group, name, folders)
    composed = loader.load_configuration(
        "config", [f"{group}={name}", *values], run_mode=RunMode.RUN
    )
    return plain(composed[group], resolve=True)


def _load(path: Path) -> dict[str, Any]:
    """Return the content of a file that Hydra would merge in place.

    Raises:
        LookupError: a default or the header puts content elsewhere, which Hydra alone follows.
    """
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    content = plain(config)
    defaults = content.get("defaults", ())
    if "@package" in path.read_text(encoding="utf-8") or not all(map(_is_in_place, defaults)):
        raise LookupError(f"{path} has content of another section")
    return content


def _is_in_place(default: Any) -> bool:
    if isinstance(default, Mapping):
        return all(str(key).startswith("override /") for key in default)
    name, at, package = str(default).partition("@")
    return package == "_here_" if at else "/" not in name
