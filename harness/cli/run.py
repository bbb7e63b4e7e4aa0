"""Evaluate one method on one model and benchmark, or sweep over them: `espalier run method=fastv ratio=0.9`.

A config becomes an admitted RunSpec, the spec a run key; a key that the store has is not run again. A run is evaluated
sample by sample, stored as one row, and printed with the row's path and a next command. With `json=true` the last line
of stdout is the row as one JSON object instead; a sweep prints a line for each row.
`torchrun --nproc_per_node <n> -m espalier run ...` shares the samples of every run between n processes and gives the
same rows.
`cluster=joblib` and `cluster=slurm` run the cells as jobs; `--dry` lists cells and jobs, their state in the store and
the cost of the rest, and runs nothing (docs/scale.md).
Exit codes: 0 done; 1 samples failed, a judge does not answer, or store or standard output cannot be written; 2 bad
input; 130 interrupted; 143 terminated (SIGTERM). Except for 0, stderr has one line with the reason. Finished samples
are kept in all cases.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import (
    EngineEnded,
    JudgeLost,
    StoreLost,
    UserError,
    foreign,
    missing_extra,
    tell_once,
)
from espalier.harness.paths import ROOT
from espalier.harness.ranks import RankLost, Ranks, is_main_process, join
from espalier.harness.runs import streams
from espalier.harness.runs.streams import (
    OutputLost,
    StatusLine,
    Stopped,
    flush,
    speak_plainly,
    stoppable,
)
from espalier.harness.specs.commands import check_environment, resting_collector, short_of_memory
from espalier.harness.specs.hub_cache import downloads
from espalier.harness.specs.secrets import masked, typed

# All other modules are imported where they are needed: a status line is printed before Hydra (0.2 s, seconds from a
# cold disk) and torch (2 s) are loaded, and a mistake in the command line is reported without them where possible.

if TYPE_CHECKING:
    from espalier.harness.config.cell_settings import CellSettings
    from espalier.harness.config.compose import Command
    from espalier.harness.runs.runner import Runner
    from espalier.harness.specs.run_spec import RunSpec


from espalier.harness.specs.commands import RUN

_IN_REPOSITORY = """\
python run.py KEY=VALUE ...    runs a model, a method and a ratio on a benchmark; stores the result

  python run.py method=fastv ratio=0.9 limit=20              # one run, on the embedded model
  python run.py -m method=none,random,fastv ratio=0.5,0.9    # a sweep: all combinations, one table
  python run.py model=llava15_7b benchmark=pope method=visionzip keep=64
  python run.py -m +experiment=quickstart curves=out/quick   # a preset of conf/experiment; curves

What runs
  method=NAME        what drops or merges visual tokens. method=? lists the methods by kind;
                     model=NAME method=? marks those that run on this model; mine.py:MyMethod is
                     a class of your own (docs/plugins.md, also for --config-dir DIR)
  model=NAME         model=? lists the models; or a hub id (Qwen/Qwen2.5-VL-7B-Instruct), or the
                     folder of a checkpoint (./ckpt)
  benchmark=NAME     benchmark=? lists the benchmarks, first those without a download; task:NAME is
                     any task of lmms-eval
  compressor=NAME    evicts cache entries of what the method leaves; compressor.ratio: share evicted

How much
  ratio=0.9          the share of visual tokens REMOVED: of 576 tokens 58 stay
  keep=64, keep=10%  in place of ratio: the number, or the share, of visual tokens KEPT
  budget=NAME        what ratio and keep count; budget=? lists the rules
  limit=100          the first 100 samples; limit=null: all. seed=1: of random methods

Where
  store=DIR          results. The same command again prints the stored result, or goes on where it
                     stopped; force=true runs again
  curves=PATH        retention curves of all runs of the command; report=DIR: tables and figures
  cluster=slurm      runs of a sweep as jobs; cluster=? lists the ways

Options
  -m                 a sweep: values separated by commas, every combination is a run
  --dry              lists the runs, which of them are stored, and the cost of the others
  --rehearse cards=4x80   one prompt of each run on simulated cards of 80 GiB (4xH100: a GPU of
                     conf/gpus.yaml): does it run and fit, and what does it cost; no GPU, no weights
  --cfg job          prints all keys with their values, of the command as it stands; conf/ explains
                     them in comments. GROUP=?, such as engine=?, lists the files of a group
  eval "$(python run.py -sc install=bash)"   completes keys and values at the tab key, in bash

A mistake is one line with the key, the value and what is valid. Other commands: python -m espalier
"""

#: Where the package is installed, its console script stands for run.py.
HELP = (
    _IN_REPOSITORY
    if RUN == "python run.py"
    else _IN_REPOSITORY.replace("python run.py -sc install=bash", "espalier --completion")
    .replace("python run.py", RUN)
    .replace("python -m espalier", "espalier --help")
)


#: Prints what a command line would run, and runs nothing.
DRY = "--dry"
#: Runs a prompt of each cell on simulated cards.
REHEARSE = "--rehearse"
#: Runs the cells of a job file, as a job of `cluster=` does.
CELLS = "--cells"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    speak_plainly()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_environment()
        with (
            stoppable(),
            resting_collector(),
            StatusLine(quiet=not is_main_process()) as waiting,
        ):
            code = dispatch(arguments, waiting)
            flush()
        return code
    except UserError as error:
        return print_error(masked(str(error), typed(arguments)), code=2)
    except (RankLost, StoreLost, OutputLost) as error:
        return print_error(error, code=1)
    except (ImportError, MemoryError) as error:
        if absent := missing_extra(error):
            return print_error(absent, code=2)
        line = short_of_memory(error)
        if line is None:
            raise
        return print_error(line, code=1)
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        advice = "finished samples are kept, the same command goes on from them"
        return print_error(f"{stopped}; {advice}", stopped.code)


def dispatch(arguments: Sequence[str], waiting: StatusLine) -> int:
    """Carry out a command line, in this process and the others of the launch; return the exit code."""
    waiting.say("reading the command line")
    if CELLS in arguments:
        return run_job_file(arguments, waiting)
    if REHEARSE in arguments:
        return rehearse_cells(arguments, waiting)
    if arguments in (["-h"], ["--help"]):
        waiting.clear()
        if is_main_process():
            with streams.output():
                print(HELP, end="")
        return 0
    dry, arguments = DRY in arguments, [text for text in arguments if text != DRY]
    downloads.set(not dry)
    # Imported here as all below: a line is printed before.
    from espalier.harness.config.group_lists import asked_groups

    if groups := asked_groups(arguments):
        print_listings(groups, arguments, waiting)
        return 0
    # Lists of names do not need it.
    from espalier.harness.config.compose import read_command

    def progress(cell: int, cells: int) -> None:
        waiting.say(f"composing cell {cell} of {cells}")

    command = read_command(arguments, typed=True, progress=progress)
    if not command.cells:
        waiting.clear()
        if is_main_process():
            look(arguments, command)
        return 0
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.runs.early_checks import check_cells

    settings = check_cells(command.cells, dry)
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.runs.stored_cells import StoredCell

    stored = None if dry else StoredCell.of(command)
    row = None if stored is None else stored.row()
    if row is not None:
        print_stored(row, command, settings[0], waiting)
        return 0
    waiting.say("loading torch")
    with join() as ranks:
        code = run_on_cluster(command, settings, ranks, waiting, dry)
        if code is not None:
            return code
        notes = tell_once.cache_info().currsize
        runner = ranks.each(lambda: admit(command, settings, ranks, waiting))
        waiting.clear()
        code = run_cells(runner)
    # A line that is printed of the cell is printed next time, too.
    silent = notes == tell_once.cache_info().currsize
    if stored is not None and code == 0 and silent and stored == StoredCell.of(command):
        stored.remember(runner.rows[-1])
    return code


def print_stored(
    row: Mapping[str, Any], command: Command, settings: CellSettings, waiting: StatusLine
) -> None:
    """Print the stored row of a command's only cell."""
    # Only this way of running needs them: help and mistakes are printed without them.
    from espalier.harness.runs import console, hints

    waiting.clear()
    with streams.output():
        console.print_rows([row], sys.stdout, full=True)
    advice = hints.next_step(command.argv, [row])
    console.print_end(settings, [row], advice, sys.stdout)


def print_listings(groups: Sequence[str], arguments: Sequence[str], waiting: StatusLine) -> None:
    """Print the choices of config groups; `model=NAME method=?` marks the methods that run on this model.

    Raises:
        UserError: there is no such model.
    """
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.config.group_lists import asked_model, names_folders
    from espalier.harness.config.group_table import listing

    folders: Sequence[Path] = ()
    if names_folders(arguments):
        # Imports the parser of command lines.
        from espalier.harness.config.compose import folders_of

        folders = folders_of(arguments)
    model, refused = asked_model(arguments), None
    if model is not None and "method" in groups:
        waiting.say("loading torch")
        # Imports all methods.
        from espalier.harness.runs.admission import refused_methods

        refused = refused_methods(model, folders)
    waiting.clear()
    if is_main_process():
        with streams.output():
            print(*(listing(group, refused, folders) for group in groups), sep="\n", end="")


def run_on_cluster(
    command: Command, settings: Sequence[CellSettings], ranks: Ranks, waiting: StatusLine, dry: bool
) -> int | None:
    """Run the cells as jobs (`cluster=`), or print what there is to do (`--dry`); None if they are to run here."""
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.runs.cluster.resources import cluster_of

    cluster = cluster_of(command.cells)
    if not dry and cluster.name == "local":
        return None
    if ranks.world > 1:
        option = DRY if dry else f"cluster={cluster.name}"
        raise UserError(f"{option} is for one process, not {ranks.world}; valid: without torchrun")
    # Only these ways of running need them: help and mistakes are printed without them.
    from espalier.harness.runs.cluster.cluster_sweep import cells_of, run_as_jobs
    from espalier.harness.runs.cluster.dry_run import list_cells

    if dry:
        return list_cells(cells_of(command, settings, cluster), cluster, waiting)
    return run_as_jobs(command, settings, cluster, waiting)


def rehearse_cells(arguments: Sequence[str], waiting: StatusLine) -> int:
    """Rehearse every cell of a command line and print the results; return 1 if one fails or does not fit."""
    place = arguments.index(REHEARSE)
    waiting.say("loading torch")
    # Imports the engine, which takes seconds.
    from espalier.harness.config.build_spec import build_spec
    from espalier.harness.config.compose import read_command
    from espalier.harness.tools.rehearsal.real_sizes import RealSizes
    from espalier.harness.tools.rehearsal.rehearsal_text import lines_of
    from espalier.harness.tools.rehearsal.rehearse import read_cards, rehearse_run
    from espalier.methods.base import MethodError

    count, kind = read_cards("".join(arguments[place + 1 : place + 2]).removeprefix("cards="))
    command = read_command([*arguments[:place], *arguments[place + 2 :]], typed=True)
    code = 0
    for cell in command.cells:
        waiting.say(f"rehearsing on {count} cards")
        try:
            with RealSizes(count, kind) as cards:
                rehearsal = rehearse_run(build_spec(cell, folders=command.folders), cards)
        except (MethodError, RuntimeError) as error:
            code = print_error(f"the run does not end on these cards: {error}", code=1)
            continue
        waiting.clear()
        with streams.output():
            print(*lines_of(rehearsal), sep="\n", end="\n\n")
        code = code if rehearsal.fits else 1
    return code


def run_job_file(arguments: Sequence[str], waiting: StatusLine) -> int:
    """Run the cells of a job file that have no row yet (`--cells <file>`), and note those that fail in the file."""
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.runs.cluster.job_file import JobFile, LeftOut

    if len(arguments) != 2 or arguments[0] != CELLS:
        raise UserError(
            f"{CELLS} stands alone with the file of a job; valid: run.py {CELLS} <file>"
        )
    downloads.set(False)
    file = JobFile(Path(arguments[1]))
    entries = [entry for entry in file.entries() if not entry.done]
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.config.build_spec import build_spec
    from espalier.harness.runs.runner import Runner

    with foreign(
        f"{CELLS} {file.path} is no file of a job", "<store>/cluster/<sweep>/job-<n>.json"
    ):
        specs = [
            build_spec(entry.config, folders=tuple(map(Path, entry.conf))) for entry in entries
        ]
    if not specs:
        return 0
    keys = {id(spec): entry.key for entry, spec in zip(entries, specs, strict=True)}
    left_out: list[LeftOut] = []

    def note(spec: RunSpec, reason: str, code: int) -> None:
        left_out.append(LeftOut(keys[id(spec)], reason, code))
        file.leave_out(left_out)

    runner = Runner(sweep=True, argv=arguments, waiting=waiting, note=note)
    runner.admit(specs)
    waiting.clear()
    return run_cells(runner)


def admit(
    command: Command, settings: Sequence[CellSettings], ranks: Ranks, waiting: StatusLine
) -> Runner:
    """Admit every cell before the first one runs; return what runs them."""
    # Only this way of running needs them: help and mistakes are printed without them.
    from espalier.harness.config.build_spec import build_specs
    from espalier.harness.runs.runner import Runner

    specs = build_specs(settings, command.folders)
    runner = Runner(command.sweep, ranks, command.argv, waiting, command.lines)
    runner.admit(specs)
    if command.sweep:
        runner.announce()
    return runner


def run_cells(runner: Runner) -> int:
    """Run admitted cells one after the other and return the worst exit code.

    A failure is printed and noted as left out; the next cell runs.
    """
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.cost.budget import BudgetMismatch
    from espalier.harness.evaluation.evaluate import SampleErrors
    from espalier.methods.base import MethodError

    foreseen = (SampleErrors, BudgetMismatch, EngineEnded, JudgeLost, UserError, MethodError)
    bugs: list[Exception] = []
    lost = 0
    try:
        for cell in runner.admitted:
            try:
                with runner.ranks.together():
                    runner.run(cell)
            except (RankLost, StoreLost, OutputLost):
                raise
            except Exception as error:
                code = 2 if isinstance(error, UserError | MethodError) else 1
                kind = "" if isinstance(error, foreseen) else f"{type(error).__name__}: "
                runner.failed(cell, " ".join(f"{kind}{error}".split()), code)
                if kind:
                    # An error that nobody foresaw is raised as it is, after the other cells have run.
                    bugs.append(error)
                else:
                    print_error(error, code)
    except (RankLost, StoreLost, OutputLost) as error:
        # No other cell can run.
        lost = print_error(error, code=1)
    finally:
        runner.finish()
    if bugs:
        raise bugs[0]
    return max(lost, runner.code)


def look(arguments: Sequence[str], command: Command) -> None:
    """Print the config or the help that a command line requests, or the words that Hydra completes.

    Raises:
        UserError: Hydra refuses the line.
    """
    if command.text is not None or not {"-h", "--help"}.isdisjoint(arguments):
        with streams.output():
            print(HELP if command.text is None else command.text, end="")
        return
    # Only this way of running needs it: help and mistakes are printed without it.
    import hydra

    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.config.overrides import HYDRAS, one_line
    from espalier.harness.paths import CONF

    # Hydra reads the command line there, and would print a traceback and exit by itself.
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [str(ROOT / "run.py"), *arguments], "1"
    complete = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    try:
        complete(lambda _: None)()
    except OSError:
        with streams.output():
            raise
    except HYDRAS as error:
        raise UserError(f"command line: {one_line(error)}; valid: --help") from error


def print_error(problem: object, code: int) -> int:
    """Print one line on stderr, once for all processes of a run, and return the exit code."""
    return streams.print_error(problem, code) if is_main_process() else code
