"""The overrides of a command line, parsed by Hydra's grammar, each with its mistake told in one line."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from harness.config import presets, task_source
from harness.errors import UserError, unknown_name

#: A second choice from the files of one group, by the short name that a command line may give it.
SHORT = {"compressor": "method@compressor"}

#: Of Hydra's own settings those that say what the cells are.
HEEDED = ("hydra.mode", "hydra.searchpath", "hydra.sweeper.params")


def in_full(override: str) -> str:
    """Return an override with the group that a short name stands for: Hydra reads two choices from conf/method."""
    name, equals, value = override.partition("=")
    return f"{SHORT[name]}={value}" if equals and name in SHORT else override


def models_first(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the model in front: a model is loaded once for a run of cells."""
    return sorted(overrides, key=lambda text: not text.startswith("model="))


def parse(overrides: Sequence[str], loader: ConfigLoaderImpl) -> list[Override]:
    """Return overrides as Hydra reads them.

    Raises:
        UserError: one is none.
    """
    parser = OverridesParser.create(config_loader=loader)
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            raise UserError(
                f"{text!r} is not an override; valid: key=value, for example ratio=0.9"
            ) from error
    return parsed


def check_once(overrides: Sequence[Override]) -> None:
    """Raise if a key or a group is set twice: one of the two would silently not count."""
    given: dict[str, Override] = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+~")
        if key in given:
            raise UserError(
                f"{key} is given twice, {given[key].input_line} and {override.input_line}; valid: once"
            )
        given[key] = override


def check_choice(override: Override, loader: ConfigLoaderImpl) -> None:
    """Raise if the override picks an unknown option of a config group."""
    group = override.key_or_group
    options = loader.get_group_options(group)
    if not options:
        return
    picked = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    for one in picked:
        name = one.text if isinstance(one, QuotedString) else one
        if group == "method" and isinstance(name, list):
            raise UserError(
                f"{override.input_line}: a list is no method; valid: method=<drops tokens> compressor=<evicts cache "
                "entries>, each with its own ratio and compressor.ratio"
            )
        if not isinstance(name, str) or (name not in options and not is_task(group, name)):
            if override.package == "compressor":
                options = ["none", *presets.configs("compressor").split(",")]
            raise unknown_name(override.package or group, str(name), options)


def check_hydras(override: Override) -> None:
    """Raise if the override sets what only Hydra's own launching of jobs would heed."""
    if override.is_hydra_override() and not override.key_or_group.startswith(HEEDED):
        raise UserError(
            f"{override.input_line} concerns jobs that Hydra launches, and this command runs its cells itself; valid: "
            f"{', '.join(HEEDED)}"
        )


def expand(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each cell of a sweep; the last one that has several values varies fastest.

    Raises:
        UserError: what is swept over is no list, or an empty one.
    """
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} is not a list of values; valid: a,b,c or choice, range, glob"
            )
        if override.is_sweep_override() and not [*override.sweep_string_iterator()]:
            raise UserError(f"{override.input_line} has no values; valid: at least one")
    return BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]


def is_task(group: str, name: str) -> bool:
    """Say whether a choice asks for a task of lmms-eval; composing it tells whether there is one."""
    return group == "benchmark" and name.startswith(task_source.PREFIX)
