"""Evaluate one method on one model and benchmark, or sweep over them: `python run.py method=fastv ratio=0.9`.

A config becomes a checked RunSpec, the spec a run key; a key that the store has is not run again. What runs is
evaluated sample by sample, stored as one row, and printed; the last line of stdout is the row as one JSON object. A
person at a terminal gets the row's path and the next command instead (`json=true`: the object as well).
`torchrun --nproc_per_node <n> run.py ...` shares the samples of every run between n processes and gives the same rows.
Exit codes: 0 done; 1 samples failed, a judge does not answer, or store or standard output cannot be written; 2 bad
input; 130 interrupted; 143 terminated (SIGTERM). But for 0, stderr has one line that says why. What is finished is kept
in all cases.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.errors import JudgeLost, StoreLost, UserError
from harness.ranks import RankLost, Ranks, join, speaks
from harness.running import streams
from harness.running.streams import OutputLost, Stopped, flush, speak_plainly, stoppable
from harness.running.waiting import Waiting

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.config.compose import Command
    from harness.running.runner import Runner

# All else is imported where it is needed: a person sees a line before Hydra (0.2 s, seconds from a cold disk) and torch
# (2 s) are there, and a mistake is told without them where they are not needed to find it.


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    speak_plainly()
    try:
        with stoppable(), Waiting(quiet=not speaks()) as waiting:
            code = carry_out(list(sys.argv[1:] if argv is None else argv), waiting)
            flush()
        return code
    except UserError as error:
        return complain(error, code=2)
    except (RankLost, StoreLost, OutputLost) as error:
        return complain(error, code=1)
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        advice = "finished samples are kept, the same command goes on from them"
        return complain(f"{stopped}; {advice}", stopped.code)


def carry_out(arguments: Sequence[str], waiting: Waiting) -> int:
    """Do what a command line asks, in this process and the others of the launch; return the exit code."""
    waiting.say("reading the command line")
    from harness.config.listing import asked_groups, listing

    if groups := asked_groups(arguments):
        waiting.clear()
        if speaks():
            with streams.output():
                print(*map(listing, groups), sep="\n", end="")
        return 0
    from harness.config.compose import CONF, read_command

    def tell(cell: int, cells: int) -> None:
        waiting.say(f"composing cell {cell} of {cells}")

    command = read_command(arguments, typed=True, progress=tell)
    if command is None:
        waiting.clear()
        if speaks():
            launch(arguments, lambda cfg: None, str(CONF))
        return 0
    waiting.say("loading torch")
    with join() as ranks:
        return run_all(command, ranks, waiting)


def run_all(command: Command, ranks: Ranks, waiting: Waiting) -> int:
    """Check every cell before the first one runs, then run them; return the worst exit code."""
    from harness.config.build import build_spec
    from harness.config.compose import CONF
    from harness.specs import RunSpec

    def check() -> tuple[Runner, list[RunSpec]]:
        specs = [build_spec(cfg) for cfg in command.cells]
        waiting.say("loading transformers")
        from harness.running.runner import Runner

        runner = Runner(command.sweep, ranks, command.argv, waiting)
        runner.admit(specs)
        return runner, specs

    runner, specs = ranks.each(check)
    waiting.clear()
    codes: list[int] = []
    try:
        for argv in command.launches:
            launch(argv, lambda cfg: codes.append(run(cfg, runner)), str(CONF))
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else 1)
    finally:
        runner.finish(specs[-1])
    return max(codes, default=0)


def run(cfg: DictConfig, runner: Runner) -> int:
    """Run one cell, in all processes together, and return its exit code; one that fails is noted as left out."""
    from harness.budget import BudgetMismatch
    from harness.config.build import build_spec
    from harness.evaluation.evaluate import SampleErrors
    from methods.base import MethodError

    spec = build_spec(cfg)
    try:
        runner.ranks.each(lambda: runner.run(spec))
    except (SampleErrors, BudgetMismatch, JudgeLost, UserError, MethodError) as error:
        runner.left_out.append((spec, " ".join(str(error).split())))
        return complain(error, code=2 if isinstance(error, UserError | MethodError) else 1)
    except (RankLost, StoreLost, OutputLost) as error:
        # No other cell can run, and Hydra would print a traceback.
        sys.exit(complain(error, code=1))
    return 0


def launch(argv: Sequence[str], task: Callable[[DictConfig], object], folder: str) -> None:
    """Hand a command line to Hydra, which reads the configs of `folder` and calls `task` once for each cell.

    Raises:
        StoreLost: Hydra cannot write its record of a sweep.
    """
    import hydra

    with _command_line([__file__, *argv]):
        try:
            hydra.main(version_base="1.3", config_path=folder, config_name="config")(task)()
        except OSError as error:
            raise StoreLost(f"hydra: {error}") from error


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


def complain(problem: object, code: int) -> int:
    """Print one line on stderr, once for all processes of a run, and return the exit code."""
    if speaks():
        streams.complain(problem)
    return code


if __name__ == "__main__":
    sys.exit(main())
