"""Evaluate one method on one model and benchmark, or sweep over them: `python run.py method=fastv ratio=0.9`.

A config becomes an admitted RunSpec, the spec a run key; a key that the store has is not run again. A run is evaluated
sample by sample, stored as one row, and printed; the last line of stdout is the row as one JSON object. At a terminal
the row's path and the next command are printed instead (`json=true`: the object as well).
`torchrun --nproc_per_node <n> run.py ...` shares the samples of every run between n processes and gives the same rows.
`cluster=joblib` and `cluster=slurm` run the cells as jobs; `--dry` lists cells and jobs, their state in the store and
the cost of the rest, and runs nothing (docs/scale.md).
Exit codes: 0 done; 1 samples failed, a judge does not answer, or store or standard output cannot be written; 2 bad
input; 130 interrupted; 143 terminated (SIGTERM). Except for 0, stderr has one line with the reason. Finished samples
are kept in all cases.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from espalier.harness.cli.run import (
    CELLS,
    DRY,
    admit,
    hydra_help,
    print_error,
    print_listings,
    run_cells,
    run_job_file,
    run_on_cluster,
)
from espalier.harness.errors import StoreLost, UserError
from espalier.harness.ranks import RankLost, is_main_process, join
from espalier.harness.runs.status_line import StatusLine
from espalier.harness.runs.streams import OutputLost, Stopped, flush, speak_plainly, stoppable
from espalier.harness.specs.commands import check_environment, short_of_memory
from espalier.harness.specs.secrets import masked, typed

# All other modules are imported where they are needed: a status line is printed before Hydra (0.2 s, seconds from a
# cold disk) and torch (2 s) are loaded, and a mistake in the command line is reported without them where possible.


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    speak_plainly()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_environment()
        with stoppable(), StatusLine(quiet=not is_main_process()) as waiting:
            code = dispatch(arguments, waiting)
            flush()
        return code
    except UserError as error:
        return print_error(masked(str(error), typed(arguments)), code=2)
    except (RankLost, StoreLost, OutputLost) as error:
        return print_error(error, code=1)
    except (ImportError, MemoryError) as error:
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
    dry, arguments = DRY in arguments, [text for text in arguments if text != DRY]
    from espalier.harness.config.group_lists import asked_groups

    if groups := asked_groups(arguments):
        print_listings(groups, arguments, waiting)
        return 0
    from espalier.harness.config.compose import read_command

    def progress(cell: int, cells: int) -> None:
        waiting.say(f"composing cell {cell} of {cells}")

    command = read_command(arguments, typed=True, progress=progress)
    if command is None:
        waiting.clear()
        if is_main_process():
            hydra_help(arguments)
        return 0
    # Only this way of running needs it: help and mistakes are printed without it.
    from espalier.harness.runs.early_checks import check_cells

    check_cells(command.cells, dry)
    waiting.say("loading torch", clock=True)
    with join() as ranks:
        code = run_on_cluster(command, ranks, waiting, dry)
        return run_cells(*admit(command, ranks, waiting)) if code is None else code


if __name__ == "__main__":
    sys.exit(main())
