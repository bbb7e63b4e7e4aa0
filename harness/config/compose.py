"""From a command line to configs; every mistake becomes one UserError line before anything runs.

All cells are composed here, before the first one runs. Hydra gives the grammar of overrides, and completes words of a
shell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.config import checkpoint_names
from espalier.harness.config.catalogue import Catalogue
from espalier.harness.config.cell_settings import RUN_KEYS
from espalier.harness.config.composer import (
    Cell,
    Composer,
    Piece,
    resolved,
    settled_pieces,
)
from espalier.harness.config.grids import KEY, grids_of
from espalier.harness.config.kept_tokens import KEEP, RATIO, REPLACES
from espalier.harness.config.overrides import (
    check_overrides,
    expand,
    in_full,
    in_open_table,
    in_quotes,
    key_of,
    models_first,
    override_of,
    parse,
    quoted,
    split_folders,
)
from espalier.harness.errors import UserError
from espalier.harness.settings import choice

#: Beginning of the keys of hyper-parameters.
PARAMS = "method.params."


@dataclass(frozen=True)
class Command:
    """A checked command line.

    Attributes:
        argv: the checked command line; the model comes first, because the last override of a sweep varies fastest.
        cells: one composed config for each run; none for a line that only wants to see something.
        sweep: whether it is a sweep, by -m or by a preset.
        lines: the overrides that give each cell on a line of its own; none where a preset lists grids.
        folders: further folders of configs.
        text: what `--cfg job` prints; None for other commands.
    """

    argv: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    sweep: bool = False
    lines: tuple[tuple[str, ...], ...] = ()
    folders: tuple[Path, ...] = ()
    text: str | None = None


def read_command(
    argv: Sequence[str],
    typed: bool = False,
    progress: Callable[[int, int], None] = lambda cell, cells: None,
) -> Command:
    """Compose every cell of a command line; one that wants help, or words that Hydra completes, has no cells.

    Of a key given twice the last one counts, so that programs can add to defaults; if a person `typed` the line, it is
    a contradiction. `progress` receives the number of the next cell and the number of cells. Cost: 0.5 s, and see
    `Composer.cell`.

    Raises:
        UserError: an unknown option, key, group or choice, or a value that does not parse, refers to nothing or is
            missing.
    """
    options = _options(argv)
    if options.shell_completion:
        return Command()
    typed_overrides, folders = split_folders(options.overrides, options.config_dir)
    with_checkpoints = checkpoint_names.with_checkpoints(typed_overrides)
    # As Hydra's grammar and groups have them.
    overrides = models_first([in_open_table(in_full(quoted(text))) for text in with_checkpoints])
    catalogue = Catalogue(folders)
    composer, parsed = Composer(catalogue), parse(overrides, catalogue)
    check_overrides(parsed, catalogue, typed)
    sweeps = [override for override in parsed if override.is_sweep_override()]
    single = [str(override.input_line) for override in parsed if override not in sweeps]
    if any(override.key_or_group == "method" for override in sweeps):
        # Which method has them is known for each cell.
        single = [text for text in single if _param_of(text) is None]
    base, typed_keys = composer.pieces(single), set(map(key_of, parsed))
    if RATIO in typed_keys and KEEP in base and base[KEEP].written is not None:
        # A preset's count would replace the ratio.
        overrides.append(f"{KEEP}=null")
        base = composer.pieces([*single, overrides[-1]])
    hydra = resolved(base, ["hydra"])["hydra"]
    mode = choice("hydra.mode", hydra["mode"] or "RUN", ("RUN", "MULTIRUN"))
    if options.help or options.cfg:
        text = _shown(options, sweeps, base)
        return Command(text=text if options.cfg else None)
    search = override_of(folders)
    argv = (*(["-m"] if options.multirun else []), *overrides, *search)
    grids = base[KEY].written if KEY in base else None
    if options.multirun or mode == "MULTIRUN":
        preset = [
            f"{key}={value}"
            for key, value in (hydra["sweeper"]["params"] or {}).items()
            if REPLACES.get(key) not in typed_keys
        ]
        swept = grids_of(grids, parsed) or [[*preset, *overrides]]
        parts = [parse(models_first(line), catalogue) for line in swept]
        batches = with_own_params([batch for part in parts for batch in expand(part)], composer)
        cells = []
        for number, batch in enumerate(batches, 1):
            progress(number, len(batches))
            cells.append(composer.cell(batch))
        # Picked out of grids, a key on the command line means something else.
        lines = [(*batch, *search) for batch in batches] if grids is None else []
    elif sweeps:
        sweep = str(sweeps[0].input_line)
        raise UserError(
            f"{sweep} is a sweep; add -m to run all its values, or give one value, in quotes if it has a comma: "
            f"{in_quotes(sweep)}"
        )
    elif grids is not None:
        raise UserError(f"{KEY} lists the grids of a sweep; add -m to run them, or leave it out")
    else:
        cells, lines = [resolved(settled_pieces(base))], [(*overrides, *search)]
    is_sweep = options.multirun or mode == "MULTIRUN"
    return Command(argv, tuple(cells), is_sweep, tuple(lines), folders)


def with_own_params(
    batches: Sequence[Sequence[str]], composer: Composer
) -> Sequence[Sequence[str]]:
    """Return the cells of a sweep, each with the hyper-parameters that its method has; those equal without others once.

    One that no method of the sweep has stays, to be refused.
    """
    if not any(_param_of(text) for batch in batches for text in batch):
        return batches
    params: dict[str, Collection[str]] = {}
    for batch in batches:
        name = _method_of(batch)
        if name not in params:
            plain = [text for text in batch if _param_of(text) is None]
            params[name] = resolved(composer.pieces(plain), ["method"])["method"]["params"] or {}
    param_keys = {key for keys in params.values() for key in keys}
    cells: list[tuple[str, ...]] = []
    for batch in batches:
        foreign = param_keys - set(params[_method_of(batch)])
        cell = tuple(text for text in batch if _param_of(text) not in foreign)
        if len(cell) == len(batch) or cell not in cells:
            cells.append(cell)
    return cells


def _method_of(batch: Sequence[str]) -> str:
    """Return the last choice of a method in a cell's overrides."""
    names = [text.partition("=")[2] for text in batch if text.startswith("method=")]
    return names[-1] if names else ""


def _param_of(text: str) -> str | None:
    """Return the hyper-parameter that an override sets; None: it sets something else."""
    key = text.partition("=")[0]
    return key.removeprefix(PARAMS).partition(".")[0] if key.startswith(PARAMS) else None


def folders_of(argv: Sequence[str]) -> tuple[Path, ...]:
    """Return the further folders of configs of a command line.

    Raises:
        UserError: a place holds no configs.
    """
    options = _options(argv)
    return split_folders(options.overrides, options.config_dir)[1]


def _shown(
    options: argparse.Namespace, sweeps: Sequence[Override], base: Mapping[str, Piece]
) -> str:
    """Return the config that a command line prints.

    Raises:
        UserError: it has several configs, or the part to print does not exist.
    """
    if sweeps:
        raise UserError(
            f"{sweeps[0].input_line} is a sweep, and --cfg and --help show one config; valid: one value"
        )
    pieces = {KEY: base[KEY], **settled_pieces(base)} if KEY in base else settled_pieces(base)
    written = {key: pieces[key].written for key in base if key in pieces}
    config = OmegaConf.create(resolved(pieces) if options.resolve else written)
    package = None if options.package == "_global_" else options.package
    try:
        part = config if package is None else OmegaConf.select(config, package)
    except OmegaConfBaseException:
        part = None
    if part is None:
        raise UserError(
            f"--package={package!r} is no part of the config; valid: {', '.join(sorted(pieces))}"
        )
    if not OmegaConf.is_config(part):
        return f"{part}\n"
    header = "" if package is None else f"# @package {package}\n"
    return f"{header}{OmegaConf.to_yaml(part)}"


class _Flags(argparse.ArgumentParser):
    """The flags of a command line.

    Args:
        words: the command line.
    """

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self.words = words

    def error(self, message: str) -> NoReturn:
        """Raise UserError, with the override that an option stands for."""
        flag = f"--{message.partition(' --')[2].partition(' ')[0]}"
        name, _, value = flag.removeprefix("--").partition("=")
        following = [*self.words, "..."][self.words.index(flag) + 1] if flag in self.words else ""
        hint = f" (did you mean {name}={value or following}?)" if name in RUN_KEYS else ""
        raise UserError(
            f"command line: {message}{hint}; valid: key=value overrides, -m, --cfg job, --help"
        )


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags and overrides of a command line.

    Raises:
        UserError: a flag is unknown, or two flags exclude each other.
    """
    parser = _Flags(list(argv), add_help=False, allow_abbrev=False)
    single_flags = parser.add_mutually_exclusive_group()
    for flags in (("--help", "-h"), ("--multirun", "-m"), ("--shell-completion", "-sc")):
        single_flags.add_argument(*flags, action="store_true")
    single_flags.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(list(argv))
    for name in ("package", "resolve"):
        if getattr(options, name) and not options.cfg:
            raise UserError(f"--{name} goes with --cfg; valid: --cfg job --{name}")
    return options
