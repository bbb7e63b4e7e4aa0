"""Configs without a file: former names of methods, users' classes, presets of published tables, and anchors.

`method=fastv_paper`, `+experiment=d2pruner_table1`, `+anchor=llava15_7b_pope`. Hydra finds them after the files of
conf/. A preset of a published table is made when it is chosen: nothing of it is imported or read for other commands.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from espalier.harness.config import checkpoint_names, task_source
from espalier.harness.config.checkpoint_names import checkpoint_section
from espalier.harness.config.method_names import former_name, method_section
from espalier.harness.config.plugin_source import PluginSource, place_of
from espalier.harness.paths import CONF
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import conf_folders
from espalier.harness.specs.run_spec import ORIGINAL, VARIANTS

SCHEME = "espalier"
ANCHOR = "anchor"
#: The presets of published tables, by name: reports is a package above this one.
TABLES = "espalier.harness.reports.tables.cell_runs"


def register() -> None:
    """Make the source known to Hydra; again does no harm."""
    plugins = Plugins.instance()
    plugins.register(NameSource)
    plugins.register(PluginSource)
    plugins.register(NamePath)


def serves(group: str, name: str) -> bool:
    """Return whether a name of a group has a config here; a table that is unknown is refused when it is loaded."""
    if group == "method":
        return former_name(name) is not None or CodeReference.parse(name) is not None
    if group == checkpoint_names.GROUP:
        return name.startswith(checkpoint_names.PREFIX)
    if group == ANCHOR:
        return name in _anchors()
    return group == "experiment" and bool(_tables().is_table(name))


def descriptions(group: str) -> dict[str, str]:
    """Return the description of each config without a file, by its name. Cost: for experiments, as `table_titles`."""
    if group == ANCHOR:
        text = "{benchmark}, {published} in table {table} of {paper}"
        return {name: text.format_map(line) for name, line in _anchors().items()}
    return table_titles() if group == "experiment" else {}


def table_titles() -> dict[str, str]:
    """Return the title of each preset of a published table, by name. Cost: reads all of results/papers."""
    titles: dict[str, str] = _tables().titles()
    return titles


class NamePath(SearchPathPlugin):
    """Appends the folders outside of conf/ to every search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the tasks of lmms-eval, the folders of installed plug-ins, and this source."""
        places = [task_source.PLACE, *map(place_of, conf_folders()), f"{SCHEME}://names"]
        for place in places:
            search_path.append(provider=SCHEME, path=place)


class NameSource(ConfigSource):
    """Serves configs by their names; of groups with files it lists none, so that error lines name files."""

    @staticmethod
    def scheme() -> str:
        """Return the word before `://` in the search path."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a method's section under a former name, that of a checkpoint, the preset of a table, or an anchor.

        Raises:
            UserError: the paper has no such table, or no run fills a cell of it; no family supports the checkpoint.
        """
        group, name = _parts(config_path)
        read = {ANCHOR: _anchor, **SECTIONS}.get(group) or _tables().preset
        section: dict[str, Any] = read(name)
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=OmegaConf.create(section),
            header={"package": None if group in SECTIONS else "_global_"},
        )

    def available(self) -> bool:
        """Return True: the source has no place that could be missing."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether a path is the group of anchors, which has no folder, or the top that lists it."""
        return config_path in ("", ANCHOR)

    def is_config(self, config_path: str) -> bool:
        """Return whether a path is that of a former name or of a table."""
        return serves(*_parts(config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the group of anchors and their names, and no others."""
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [ANCHOR]
        return [*_anchors()] if config_path == ANCHOR and results_filter != ObjectType.GROUP else []


def _parts(config_path: str) -> tuple[str, str]:
    group, _, name = config_path.partition("/")
    return group, name.removesuffix(".yaml")


def _method(name: str) -> dict[str, Any]:
    """Return the section of a former name, or of a user's class."""
    reference = CodeReference.parse(name)
    if reference is None:
        return method_section(name)
    # Imports the user's file, and torch with it.
    from espalier.harness.specs.catalogue import method_class
    from espalier.harness.specs.own_methods import defaults_of

    code = str(reference.anchored(Path.cwd()))
    params = defaults_of(method_class(reference.name, code))
    return {"name": reference.name, "variant": VARIANTS[0], "code": code, "params": params}


#: How a section is read, of groups that a section is chosen from.
SECTIONS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "method": _method,
    checkpoint_names.GROUP: checkpoint_section,
}


def _anchor(name: str) -> dict[str, Any]:
    """Return the preset that runs the unpruned model of a line of conf/anchors.csv."""
    line = _anchors()[name]
    choices = [{f"override /{group}": line[group]} for group in ("model", "benchmark")]
    prompt = line["prompt"]
    model = {} if prompt == ORIGINAL else {"model": {"prompt": prompt}}
    return {"defaults": choices, **model}


@lru_cache(maxsize=1)
def _anchors() -> dict[str, dict[str, str]]:
    with (CONF / "anchors.csv").open(encoding="utf-8", newline="") as file:
        return {line["anchor"]: line for line in csv.DictReader(file)}


def _tables() -> Any:
    return import_module(TABLES)
