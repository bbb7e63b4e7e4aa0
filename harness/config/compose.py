"""From a command line to configs; every mistake becomes one UserError line before anything runs.

Hydra's messages span several lines, and its sweeps find a bad cell only when it is next. So all cells are composed
here, before the first one runs; hydra.main only handles command lines that print information.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.config import checkpoint_names
from espalier.harness.config.benchmark_section import check_benchmarks
from espalier.harness.config.cell_config import Cell, plain, resolved
from espalier.harness.config.composer import OF_THE_SWEEP, Composer
from espalier.harness.config.grids import KEY, grids_of
from espalier.harness.config.hydra_internals import (
    Loader,
    argument_parser,
    global_loader,
    search_also,
)
from espalier.harness.config.kept_tokens import KEEP, RATIO, REPLACES, printed, settled
from espalier.harness.config.lmms_task_files import not_yaml
from espalier.harness.config.overrides import (
    HYDRAS,
    check_choice,
    check_hydras,
    check_once,
    check_one_budget,
    check_values,
    expand,
    in_full,
    in_open_table,
    in_quotes,
    models_first,
    parse,
    quoted,
    tell_former_names,
)
from espalier.harness.config.plugin_source import SCHEME, place_of
from espalier.harness.config.search_folders import (
    check_owners,
    check_preset,
    override_of,
    split_folders,
)
from espalier.harness.config.single_section import COMMAND_LINE, register_sources
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.settings import unknown_key

CONFIG_DIR = "--config-dir"


@dataclass(frozen=True)
class Command:
    """A checked command line.

    Attributes:
        argv: the checked command line; the model comes first, because the last override of a sweep varies fastest.
        cells: one composed config for each run.
        sweep: whether it is a sweep, by -m or by a preset.
        lines: the overrides that give each cell on a line of its own; none where a preset lists grids.
        folders: further folders of configs.
    """

    argv: tuple[str, ...]
    cells: tuple[Cell, ...]
    sweep: bool
    lines: tuple[tuple[str, ...], ...]
    folders: tuple[Path, ...] = ()


def read_command(
    argv: Sequence[str],
    typed: bool = False,
    progress: Callable[[int, int], None] = lambda cell, cells: None,
) -> Command | None:
    """Compose every cell of a command line; None for one that only requests information from Hydra (`--help`, `--cfg`).

    Of a key given twice the last one counts, so that programs can add to defaults; if a person `typed` the line, it is
    a contradiction. `progress` receives the number of the next cell and the number of cells. Cost: 0.5 s, and see
    `Composer.cell`.

    Raises:
        UserError: an unknown option, key, group or choice, or a value that does not parse, refers to nothing or is
            missing.
    """
    register_sources()
    options = _options(argv)
    _check_flags(options)
    if options.hydra_help or options.shell_completion:
        return None
    typed_overrides, folders = split_folders(options.overrides, options.config_dir)
    overrides, search = models_first(_in_choices(typed_overrides)), override_of(folders)
    flags = [text for text in argv if text.startswith("-") and not text.startswith(CONFIG_DIR)]
    looks = options.help or options.cfg or options.info
    with _hydra(folders) as loader:
        parsed = parse(overrides, loader)
        check_one_budget(parsed)
        if typed:
            check_once(parsed)
            tell_former_names(parsed)
        for override in parsed:
            check_values(override)
            check_choice(override, loader)
            check_owners(override, loader, folders)
            if not looks:
                check_hydras(override)
        sweeps = [override for override in parsed if override.is_sweep_override()]
        single = [str(override.input_line) for override in parsed if override not in sweeps]
        base = _compose(single, loader)
        typed_keys = {override.get_key_element().lstrip("+~") for override in parsed}
        if RATIO in typed_keys and base.keep is not None:
            # A preset's count would replace the ratio.
            overrides.append(f"{KEEP}=null")
            base = _compose([*single, overrides[-1]], loader)
        check_preset(base, folders)
        if looks:
            _check_look(options, sweeps, base)
            return None
        if options.multirun or base.hydra.mode == RunMode.MULTIRUN:
            params = base.hydra.sweeper.params or {}
            preset = [
                f"{key}={value}"
                for key, value in params.items()
                if REPLACES.get(key) not in typed_keys
            ]
            grids = grids_of(base, parsed)
            swept = [[*preset, *overrides]] if grids is None else grids
            parts = [parse(models_first(line), loader) for line in swept]
            for override in (override for part in parts for override in part):
                check_owners(override, loader, folders)
            batches = [batch for part in parts for batch in expand(part)]
        elif sweeps:
            text = sweeps[0].input_line or ""
            raise UserError(
                f"{text} is a sweep; add -m to run all its values, or give one value, in quotes if it has a comma: "
                f"{in_quotes(str(text))}"
            )
        elif base.get(KEY) is not None:
            raise UserError(
                f"{KEY} lists the grids of a sweep; add -m to run them, or leave it out"
            )
        else:
            cell = _checked([resolved(_job(base))])
            line = (*overrides, *search)
            return Command((*flags, *line), cell, sweep=False, lines=(line,), folders=folders)
        composer = Composer(loader, lambda batch: _job(_compose(batch, loader)))
        cells = []
        for number, batch in enumerate(batches, 1):
            progress(number, len(batches))
            cells.append(composer.cell(batch))
    # Picked out of grids, a key on the command line means something else.
    cell_lines = tuple((*batch, *search) for batch in batches) if grids is None else ()
    argv = (*flags, *overrides, *search)
    return Command(argv, _checked(cells), sweep=True, lines=cell_lines, folders=folders)


def _checked(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the cells after checking their benchmarks, so that mistakes in a file are reported before torch loads."""
    check_benchmarks(cells)
    return tuple(cells)


def folders_of(argv: Sequence[str]) -> tuple[Path, ...]:
    """Return the further folders of configs of a command line.

    Raises:
        UserError: a place holds no configs.
    """
    options = _options(argv)
    return split_folders(options.overrides, options.config_dir)[1]


def without_cells(argv: Sequence[str]) -> list[str]:
    """Return the checked command line of a request for information in the order of Hydra's parser: flags first."""
    options = _options(argv)
    if options.shell_completion:
        return list(argv)
    typed_overrides, folders = split_folders(options.overrides, options.config_dir)
    words = ["--hydra-help"] if options.hydra_help else []
    for name in ("cfg", "package", "info"):
        if getattr(options, name) is not None:
            words += [f"--{name}", getattr(options, name)]
    if options.resolve:
        words.append("--resolve")
    # Here Hydra alone reads the line.
    overrides = _in_choices([part for text in typed_overrides for part in printed(text)])
    return [*words, *overrides, *override_of(folders, SCHEME)]


def _in_choices(overrides: Sequence[str]) -> list[str]:
    """Return typed overrides as Hydra's grammar and groups have them."""
    typed = checkpoint_names.with_checkpoints(overrides)
    return [in_open_table(in_full(quoted(text))) for text in typed]


def _check_flags(options: argparse.Namespace) -> None:
    """Raise if a flag is not supported, or two flags exclude each other."""
    for name in ("config_path", "config_name", "experimental_rerun"):
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} is not supported; valid: key=value overrides, -m, --cfg job, --help"
            )
    if options.help or options.hydra_help:
        return
    flags = [
        "--" + name.replace("_", "-")
        for name in ("multirun", "run", "cfg", "info", "shell_completion")
        if getattr(options, name)
    ]
    if len(flags) > 1:
        raise UserError(f"{' and '.join(flags)} exclude each other; valid: one of them")
    for name in ("package", "resolve"):
        if getattr(options, name) and not options.cfg:
            raise UserError(f"--{name} goes with --cfg; valid: --cfg job --{name}")


def _check_look(options: argparse.Namespace, sweeps: Sequence[Override], base: DictConfig) -> None:
    """Raise if a command line that prints a config has several configs, or the part to print does not exist."""
    if sweeps:
        raise UserError(
            f"{sweeps[0].input_line} is a sweep, and --cfg, --help and --info show one config; valid: one value"
        )
    if options.package in (None, "_global_"):
        section: Any = _job(base)
    else:
        try:
            section = OmegaConf.select(base, options.package)
        except HYDRAS:
            section = None
        if section is None:
            names = ", ".join(sorted(map(str, _job(base))))
            raise UserError(
                f"--package={options.package!r} is no part of the config; valid: {names}"
            )
    if options.resolve and isinstance(section, DictConfig):
        resolved(section)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return argument_parser().parse_intermixed_args(list(argv))
    except SystemExit as error:
        if error.code in (0, None):
            raise
        reason = complaint.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise UserError(
            f"command line: {reason}; valid: key=value overrides, -m, --cfg job, --help"
        ) from error


@contextlib.contextmanager
def _hydra(folders: Sequence[Path] = ()) -> Iterator[Loader]:
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        loader = global_loader()
        search_also(loader, COMMAND_LINE, map(place_of, folders))
        yield loader


def _compose(overrides: Sequence[str], loader: Loader) -> DictConfig:
    try:
        return compose("config", overrides=list(overrides), return_hydra_config=True)
    except UserError:
        raise
    except HYDRAS as error:
        raise _explain(error, overrides, loader) from error
    except yaml.YAMLError as error:
        raise not_yaml(error) from error


def _explain(error: Exception, overrides: Sequence[str], loader: Loader) -> UserError:
    """Return the error for the override that Hydra refused, with the valid keys."""
    text = " ".join(str(error).split())
    if not isinstance(error, HydraException | OmegaConfBaseException):
        text = f"{type(error).__name__}: {text}; given: {' '.join(overrides)}"
    fallback = UserError(f"config: {text}")
    values = [text for text in overrides if not loader.get_group_options(_key(text))]
    try:
        valid = compose("config", overrides=[text for text in overrides if text not in values])
    except HYDRAS:
        return fallback
    for text in values:
        # RunSpec checks added keys (`+key=`), Hydra checks its own.
        if not text.startswith("+") and not _key(text).startswith("hydra"):
            problem = _absent(_key(text), valid)
            if problem is not None:
                return problem
            if isinstance(OmegaConf.select(valid, _key(text)), DictConfig):
                return UserError(
                    f"{text}: {_key(text)} is a table; valid: {_key(text)}={{name: value}}"
                )
    return fallback


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _absent(key: str, config: DictConfig) -> UserError | None:
    """Return the error for the first part of a dotted key that the config lacks, or None if it is there."""
    table, prefix = config, ""
    for part in key.split("."):
        if not isinstance(table, DictConfig):
            return UserError(
                f"{key} is not a config key: {prefix[:-1]} is a value; valid: {prefix[:-1]}"
            )
        if part not in table:
            return unknown_key(key, (f"{prefix}{name!s}" for name in table))
        table, prefix = table[part], f"{prefix}{part}."
    return None


def _job(cfg: DictConfig) -> DictConfig:
    job = cfg.copy()
    OmegaConf.set_struct(job, False)
    for key in OF_THE_SWEEP:
        del job[key]
    if job.get(KEEP) is not None:  # a missing value is reported with those of other keys
        job.update(settled(job[KEEP], cell=plain(job)))
    return job
