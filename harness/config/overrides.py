"""The overrides of a command line, parsed by Hydra's grammar; every mistake is one line."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.config.catalogue import Catalogue
from espalier.harness.config.group_lists import choices
from espalier.harness.config.kept_tokens import KEEP, RATIO
from espalier.harness.config.method_names import former_name
from espalier.harness.errors import UserError, tell_once
from espalier.harness.paths import CONF
from espalier.harness.specs.plugins.code_reference import CodeReference

#: Errors that Hydra raises for a command line that it cannot use, also those of its parts.
HYDRAS = (
    *(HydraException, OmegaConfBaseException, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError, RecursionError, NotImplementedError),
)

#: A second choice from the files of one group, by the short name that a command line may give it.
SHORT = {"compressor": "method@compressor"}

#: Hydra's settings that define the cells.
SEARCH, SWEPT = "hydra.searchpath", "hydra.sweeper.params"
HEEDED = ("hydra.mode", SEARCH, SWEPT)

#: The tasks of lmms-eval on a search path; they are always searched.
TASKS = "lmms-eval://tasks"

#: Keys that hold a path, by their last part or in full.
PATHS = ("path", "include_path", "store", "curves", "report", "judge.prompt")

#: Prefixes of a path, for any key.
PLACES = ("/", "~/", "./", "../")

#: Cells that one command has at most.
MOST_CELLS = 100_000


def in_full(override: str) -> str:
    """Return an override with the group that a short name stands for: Hydra reads two choices from conf/method."""
    name, equals, value = override.partition("=")
    return f"{SHORT[name]}={value}" if equals and name in SHORT else override


def in_open_table(override: str) -> str:
    """Return an override of a setting by a table so that it may have names of its own: `cluster.options={qos: long}`.

    Hydra adds names to a table with `++` alone; those of a closed table are checked by its reader.
    """
    key, _, value = override.partition("=")
    opens = value.startswith("{") and "." in key and key[0] not in "+~" and key not in HEEDED
    return f"++{override}" if opens else override


def split_folders(
    overrides: Sequence[str], config_dir: str | None
) -> tuple[list[str], tuple[Path, ...]]:
    """Return the overrides without those of the search path, and the folders that these and `--config-dir` name.

    Raises:
        UserError: a place holds no configs.
    """
    remaining, folders = [], []
    if config_dir is not None:
        folders += _folders("--config-dir", config_dir)
    for text in overrides:
        if text.partition("=")[0].lstrip("+") != SEARCH:
            remaining.append(text)
            continue
        value = _read(text, OverridesParser.create()).value()
        for place in value if isinstance(value, list) else [value]:
            folders += _folders(text, place.text if isinstance(place, QuotedString) else place)
    return remaining, tuple(dict.fromkeys(folders))


def override_of(folders: Iterable[Path]) -> list[str]:
    """Return the override of a command line that searches folders; none for no folders."""
    places = [QuotedString(f"file://{path}", Quote.double).with_quotes() for path in folders]
    return [f"{SEARCH}=[{','.join(places)}]"] if places else []


def _folders(key: str, place: Any) -> list[Path]:
    """Return the folder of a place; none for the tasks of lmms-eval, which are always searched."""
    scheme, mark, name = str(place).rpartition("://")
    if str(place) == TASKS:
        return []
    folder = None
    if mark and scheme == "pkg":
        try:
            spec = find_spec(name.replace("/", "."))
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.submodule_search_locations:
            folder = Path(next(iter(spec.submodule_search_locations)))
    elif scheme in ("", "file"):
        folder = Path(name).expanduser().resolve()
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    if folder is None or not any((folder / group).is_dir() for group in groups):
        raise UserError(
            f"{key}: {place} holds no configs; valid: a folder with method/, model/, benchmark/, ..., as "
            "--config-dir DIR or hydra.searchpath=[file://DIR, pkg://<package>]"
        )
    return [folder]


def models_first(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the model first, so that cells of one model are neighbours and it is loaded once."""
    return sorted(overrides, key=lambda text: not text.startswith("model="))


def parse(overrides: Sequence[str], catalogue: Catalogue) -> list[Override]:
    """Return overrides as Hydra reads them.

    Raises:
        UserError: one is none.
    """
    names: Any = catalogue  # the parser only asks it for the names of a group
    parser = OverridesParser(create_functions(), names)
    return [_read(text, parser) for text in overrides]


#: Groups of names that people type without their key.
NAMED = ("method", "model", "benchmark")


def _read(text: str, parser: OverridesParser) -> Override:
    """Return an override as Hydra reads it; raises UserError for another text."""
    override = _parsed(text, parser)
    if override is not None and override.key_or_group:
        return override
    key, equals, value = text.partition("=")
    if value.endswith(",") and (shorter := _parsed(text.rstrip(","), parser)) is not None:
        raise UserError(f"{text!r} ends with a comma; valid: {shorter.input_line}")
    meant = [f"{group}={text}" for group in NAMED if text in choices(group)]
    meant += ["--help"] * (text == "help")
    hint = f" (did you mean {' or '.join(meant)}?)" if meant else ""
    line = f"{text!r} is not an override{hint}; valid: key=value, for example ratio=0.9"
    # A value that is quoted already has another mistake.
    if equals and value[:1] not in ("'", '"', "[", "{") and _parsed(f"{key}=0", parser):
        line += f"; a value with signs such as = ( ) [ ] {{ }} # is quoted, {in_quotes(text)}"
    raise UserError(line)


def _parsed(text: str, parser: OverridesParser) -> Override | None:
    try:
        return parser.parse_overrides([text])[0]
    except HYDRAS:
        return None


def key_of(override: Override) -> str:
    """Return the key or the group that an override sets, adds or deletes."""
    return str(override.get_key_element().lstrip("+~"))


def quoted(text: str) -> str:
    """Return an override with its path in quotes if Hydra's grammar would refuse it: `store=/d/a=b`."""
    key, equals, value = text.partition("=")
    plain = key.lstrip("+")
    names_path = plain in PATHS or plain.rpartition(".")[2] in PATHS
    holds_path = names_path or value.startswith(PLACES) or CodeReference.parse(value) is not None
    # A comma stands between the values of a sweep; what begins with a quote is quoted already.
    if not equals or not holds_path or "," in value or value[:1] in ("'", '"'):
        return text
    return text if _parsed(text, OverridesParser.create()) else f"{key}={spelled(value)}"


def in_quotes(override: str) -> str:
    """Return an override with its value in quotes, where any sign is valid, quoted for a shell."""
    key, _, value = override.partition("=")
    return shlex.quote(f"{key}={spelled(value)}")


def spelled(value: Any, key: str = "value") -> str:
    """Return a value of Python as the value of an override.

    Raises:
        UserError: it is no value of a config; the line names the key.
    """
    if isinstance(value, str | PathLike):
        return QuotedString(fspath(value), Quote.double).with_quotes()
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{spelled(item, key)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(spelled(item, key) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return spelled(value.item(), key)
    if isinstance(value, int | float):
        return repr(value)
    raise UserError(
        f"{key} is a {type(value).__name__}; valid: a number, a text, a list or a table of these"
    )


def check_overrides(overrides: Sequence[Override], catalogue: Catalogue, typed: bool) -> None:
    """Raise UserError for overrides that contradict each other, choose unknown names, or that no run heeds.

    Of a key given twice the last one counts, unless a person `typed` the line; former names of methods are reported.
    """
    by_key: dict[str, Override] = {}
    for override in overrides:
        key = key_of(override)
        if typed and key in by_key:
            raise UserError(
                f"{key} is given twice, {by_key[key].input_line} and {override.input_line}; valid: once"
            )
        by_key[key] = override
    budgets = [by_key[key] for key in (RATIO, KEEP) if key in by_key]
    lines = [
        override.input_line
        for override in budgets
        if override.is_sweep_override() or override.value() is not None
    ]
    if len(lines) > 1:
        raise UserError(f"{' and '.join(map(str, lines))} both set the budget; valid: one of them")
    for override in overrides:
        if catalogue.is_group(override.key_or_group):
            _check_choice(override, catalogue, typed)
        _check_hydras(override)


def _check_choice(override: Override, catalogue: Catalogue, typed: bool) -> None:
    """Raise if the override picks an unknown name of a group, or one that two folders of configs have."""
    group, values = override.key_or_group, [override.value()]
    if override.is_sweep_override():
        values = [*override.sweep_iterator()]
    names = [value.text if isinstance(value, QuotedString) else value for value in values]
    for name in names:
        if group == "method" and isinstance(name, list):
            raise UserError(
                f"{override.input_line}: a list is no method; valid: method=<drops tokens> compressor=<evicts cache "
                "entries>, each with its own ratio and compressor.ratio"
            )
        catalogue.check(override.package or group, group, name)
    if group != "method":
        return
    for name in names:
        setting = former_name(name) if typed and isinstance(name, str) else None
        if setting is not None:
            key = override.package or group
            tell_once(f"{key}={name} is a former name of {setting.overrides(key)}")
    by_name: dict[str, CodeReference] = {}
    for reference in filter(None, map(CodeReference.parse, names)):
        first = by_name.setdefault(reference.name, reference)
        if first != reference:
            raise UserError(
                f"{override.input_line}: {first} and {reference} have one name in results; valid: another class name"
            )


def _check_hydras(override: Override) -> None:
    """Raise if the override sets what only Hydra's own launching of jobs would heed."""
    if override.key_or_group.startswith(f"{SWEPT}.") or (
        override.key_or_group == SWEPT
        and (override.is_add() or override.is_sweep_override() or override.value() is not None)
    ):
        raise UserError(
            f"{override.input_line}: presets set what a sweep goes over so; valid: -m with the key itself, as "
            "ratio=0.5,0.9"
        )
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
    by_key: dict[str, list[str]] = {}
    for override in overrides:
        line, key = override.input_line, override.get_key_element()
        if not override.is_sweep_override():
            texts = [override.get_value_element_as_str()]
        else:
            if not override.is_discrete_sweep():
                raise UserError(
                    f"{line} is not a list of values; valid: a,b,c or choice, range, glob"
                )
            try:
                # A range can be endless.
                texts = [*itertools.islice(override.sweep_string_iterator(), MOST_CELLS + 1)]
            except (*HYDRAS, ValueError) as error:
                raise UserError(
                    f"{line} is no list of values: {one_line(error)}; valid: a,b,c or choice, range, glob"
                ) from error
            if not texts:
                raise UserError(f"{line} has no values; valid: at least one")
        # The last of two values counts, in the place of the first.
        by_key[key] = [f"{key}={text}" for text in texts]
        cells = math.prod(map(len, by_key.values()))
        if cells > MOST_CELLS:
            raise UserError(
                f"{line}: the sweep has {cells} cells or more; valid: at most {MOST_CELLS}"
            )
    return [list(cell) for cell in itertools.product(*by_key.values())]


def one_line(error: Exception) -> str:
    """Return an error of a library in one line, without the lines that OmegaConf adds."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return (
        text.strip()
        if isinstance(error, HydraException | OmegaConfBaseException)
        else (f"{type(error).__name__}: {text.strip()}")
    )
