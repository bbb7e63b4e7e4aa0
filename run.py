"""Evaluate one method on one model and benchmark, or sweep over them: `python run.py method=fastv ratio=0.9`.

A config becomes a checked RunSpec, the spec a run key; a key that the store has is not run again. What runs is
evaluated sample by sample, stored as one row, and printed; the last line of stdout is the row as one JSON object. A
person at a terminal gets the row's path and the next command instead (`json=true`: the object as well).
`torchrun --nproc_per_node <n> run.py ...` shares the samples of every run between n processes and gives the same rows.
`cluster=joblib` and `cluster=slurm` run the cells as jobs; `--dry` lists cells and jobs, what the store has of them and
what the rest costs, and runs nothing (docs/scale.md).
Exit codes: 0 done; 1 samples failed, a judge does not answer, or store or standard output cannot be written; 2 bad
input; 130 interrupted; 143 terminated (SIGTERM). But for 0, stderr has one line that says why. What is finished is kept
in all cases.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.harness.errors import JudgeLost, StoreLost, UserError, foreign
from espalier.harness.ranks import RankLost, Ranks, is_main_process, join
from espalier.harness.runs import streams
from espalier.harness.runs.status_line import Waiting
from espalier.harness.runs.streams import OutputLost, Stopped, flush, speak_plainly, stoppable
from espalier.harness.specs.commands import check_environment, short_of_memory
from espalier.harness.specs.secrets import masked, typed

if TYPE_CHECKING:
    from espalier.harness.config.compose import Command
    from espalier.harness.runs.runner import Runner
    from espalier.harness.specs.run_spec import RunSpec

#: Tells what a command line would run, and runs nothing.
DRY = "--dry"
#: Runs the cells of a job's file, as a job of `cluster=` does.
CELLS = "--cells"

# All else is imported where it is needed: a person sees a line before Hydra (0.2 s, seconds from a cold disk) and torch
# (2 s) are there, and a mistake is told without them where they are not needed to find it.


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    speak_plainly()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_environment()
        with stoppable(), Waiting(quiet=not is_main_process()) as waiting:
            code = carry_out(arguments, waiting)
            flush()
        return code
    except UserError as error:
        return complain(masked(str(error), typed(arguments)), code=2)
    except (RankLost, StoreLost, OutputLost) as error:
        return complain(error, code=1)
    except (ImportError, MemoryError) as error:
        line = short_of_memory(error)
        if line is None:
            raise
        return complain(line, code=1)
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        advice = "finished samples are kept, the same command goes on from them"
        return complain(f"{stopped}; {advice}", stopped.code)


def carry_out(arguments: Sequence[str], waiting: Waiting) -> int:
    """Do what a command line asks, in this process and the others of the launch; return the exit code."""
    waiting.say("reading the command line")
    if CELLS in arguments:
        return work_off(arguments, waiting)
    dry, arguments = DRY in arguments, [text for text in arguments if text != DRY]
    from espalier.harness.config.group_lists import asked_groups, listing

    if groups := asked_groups(arguments):
        waiting.clear()
        if is_main_process():
            with streams.output():
                print(*map(listing, groups), sep="\n", end="")
        return 0
    from espalier.harness.config.compose import CONF, read_command

    def tell(cell: int, cells: int) -> None:
        waiting.say(f"composing cell {cell} of {cells}")

    command = read_command(arguments, typed=True, progress=tell)
    if command is None:
        waiting.clear()
        if is_main_process():
            inform(arguments, str(CONF))
        return 0
    waiting.say("loading torch")
    with join() as ranks:
        code = elsewhere(command, ranks, waiting, dry)
        return run_all(command, ranks, waiting) if code is None else code


def elsewhere(command: Command, ranks: Ranks, waiting: Waiting, dry: bool) -> int | None:
    """Run the cells as jobs (`cluster=`), or only tell what there is to do (`--dry`); None if they are to run here."""
    from espalier.harness.runs.cluster.cluster_spec import cluster_of

    cluster = cluster_of(command.cells)
    if not dry and cluster.name == "local":
        return None
    if ranks.world > 1:
        asked = DRY if dry else f"cluster={cluster.name}"
        raise UserError(f"{asked} is for one process, not {ranks.world}; valid: without torchrun")
    waiting.say("loading transformers")
    if dry:
        from espalier.harness.runs.cluster.dry_run import list_cells

        return list_cells(command, cluster, waiting)
    from espalier.harness.runs.cluster.cluster_sweep import run_as_jobs

    return run_as_jobs(command, cluster, waiting)


def work_off(arguments: Sequence[str], waiting: Waiting) -> int:
    """Run the cells of a job's file that have no row yet (`--cells <file>`), and note those that give none."""
    from espalier.harness.runs.cluster.job_file import JobFile, LeftOut

    if len(arguments) != 2 or arguments[0] != CELLS:
        raise UserError(
            f"{CELLS} stands alone with the file of a job; valid: run.py {CELLS} <file>"
        )
    file = JobFile(Path(arguments[1]))
    entries = [entry for entry in file.entries() if not entry.done]
    from espalier.harness.config.build_spec import build_spec
    from espalier.harness.runs.runner import Runner

    with foreign(
        f"{CELLS} {file.path} is no file of a job", "<store>/cluster/<sweep>/job-<n>.json"
    ):
        specs = [build_spec(entry.config) for entry in entries]
    if not specs:
        return 0
    keys = {id(spec): entry.key for entry, spec in zip(entries, specs, strict=True)}
    left_out: list[LeftOut] = []

    def note(spec: RunSpec, reason: str, code: int) -> None:
        left_out.append(LeftOut(keys[id(spec)], reason, code))
        file.leave_out(left_out)

    runner = Runner(sweep=True, argv=arguments, waiting=waiting)
    runner.outcome.note = note
    runner.admit(specs)
    waiting.clear()
    return run_cells(specs, runner)


def run_all(command: Command, ranks: Ranks, waiting: Waiting) -> int:
    """Check every cell before the first one runs, then run them; return the worst exit code."""
    from espalier.harness.config.build_spec import build_spec

    def check() -> tuple[Runner, list[RunSpec]]:
        specs = [build_spec(cell) for cell in command.cells]
        waiting.say("loading transformers")
        from espalier.harness.runs.runner import Runner

        runner = Runner(command.sweep, ranks, command.argv, waiting, command.lines)
        runner.admit(specs)
        if command.sweep:
            runner.announce(specs)
        return runner, specs

    runner, specs = ranks.each(check)
    waiting.clear()
    return run_cells(specs, runner)


def run_cells(specs: Sequence[RunSpec], runner: Runner) -> int:
    """Run admitted cells one after the other, in all processes together, and return the worst exit code.

    A cell that fails is reported and noted as left out; the next one runs.
    """
    from espalier.harness.cost.budget import BudgetMismatch
    from espalier.harness.evaluation.evaluate import SampleErrors
    from espalier.methods.base import MethodError

    mistakes: list[Exception] = []
    stopped = 0
    try:
        for spec in specs:
            try:
                with runner.ranks.together():
                    runner.run(spec)
            except (SampleErrors, BudgetMismatch, JudgeLost, UserError, MethodError) as error:
                code = 2 if isinstance(error, UserError | MethodError) else 1
                runner.failed(spec, _one_line(error), code)
                complain(error, code)
            except (RankLost, StoreLost, OutputLost):
                raise
            except Exception as mistake:
                # Nobody foresaw it: the other cells have their turn first, then it shows as what it is.
                runner.failed(spec, _one_line(mistake, type(mistake).__name__), 1)
                mistakes.append(mistake)
    except (RankLost, StoreLost, OutputLost) as error:
        # No other cell can run.
        stopped = complain(error, code=1)
    finally:
        runner.finish(specs[-1])
    if mistakes:
        raise mistakes[0]
    return max(stopped, runner.outcome.code)


def inform(argv: Sequence[str], folder: str) -> None:
    """Let Hydra answer a command line that asks for the config, the help or the like; no cell is run.

    Raises:
        UserError: Hydra refuses what `read_command` has let through.
    """
    import hydra

    from espalier.harness.config.compose import without_cells
    from espalier.harness.config.overrides import HYDRAS, one_line

    with _command_line([__file__, *without_cells(argv)]):
        try:
            hydra.main(version_base="1.3", config_path=folder, config_name="config")(
                lambda _: None
            )()
        except OSError:
            with streams.output():
                raise
        except HYDRAS as error:
            raise UserError(f"command line: {one_line(error)}; valid: --help") from error


@contextmanager
def _command_line(argv: list[str]) -> Iterator[None]:
    """Show Hydra a command line, and keep it from printing a traceback of its own and leaving."""
    full = "HYDRA_FULL_ERROR"
    former, told = sys.argv, os.environ.get(full)
    sys.argv, os.environ[full] = argv, "1"
    try:
        yield
    finally:
        sys.argv = former
        if told is None:
            del os.environ[full]
        else:
            os.environ[full] = told


def _one_line(error: Exception, kind: str = "") -> str:
    return " ".join(f"{kind}: {error}".removeprefix(": ").split())


def complain(problem: object, code: int) -> int:
    """Print one line on stderr, once for all processes of a run, and return the exit code."""
    return streams.complain(problem, code) if is_main_process() else code


if __name__ == "__main__":
    sys.exit(main())
