"""Evaluate one method on one model and benchmark, or sweep over them: `python run.py method=fastv ratio=0.9`.

A config becomes a checked RunSpec, the spec a run key; a key that the store has is not run again. What runs is
evaluated sample by sample, stored as one row, and printed; the last line of stdout is the row as one JSON object.
`torchrun --nproc_per_node <n> run.py ...` shares the samples of every run between n processes and gives the same rows.
Exit codes: 0 done; 1 samples failed, or store or standard output cannot be written; 2 bad input; 130 interrupted; 143
terminated (SIGTERM). But for 0, stderr has one line that says why. What is finished is kept in all cases.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from unittest.mock import patch

import hydra
from omegaconf import DictConfig

from harness.config.compose import CONF, Command, read_command
from harness.errors import StoreLost, UserError
from harness.ranks import RankLost, Ranks, join, speaks
from harness.running import streams
from harness.running.streams import OutputLost, Stopped, flush, speak_plainly, stoppable

if TYPE_CHECKING:
    from harness.running.runner import Runner


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    speak_plainly()
    try:
        with stoppable():
            code = carry_out(list(sys.argv[1:] if argv is None else argv))
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


def carry_out(arguments: Sequence[str]) -> int:
    """Do what a command line asks, in this process and the others of the launch; return the exit code."""
    command = read_command(arguments, typed=True)
    if command is None:
        if speaks():
            launch(arguments, lambda cfg: None)
        return 0
    with join() as ranks:
        return run_all(command, ranks)


def run_all(command: Command, ranks: Ranks) -> int:
    """Check every cell before the first one runs, then run them; return the worst exit code."""
    # A misspelt name was told at once; torch, seconds to import, comes only after it.
    from harness.config.build import build_spec
    from harness.running.runner import Runner
    from harness.specs import RunSpec

    runner = Runner(sweep=command.sweep, ranks=ranks)

    def check() -> list[RunSpec]:
        specs = [build_spec(cfg) for cfg in command.cells]
        runner.admit(specs)
        return specs

    specs = ranks.each(check)
    codes: list[int] = []
    try:
        launch(command.argv, lambda cfg: codes.append(run(cfg, runner)))
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
    except (SampleErrors, BudgetMismatch, UserError, MethodError) as error:
        runner.left_out.append((spec, " ".join(str(error).split())))
        return complain(error, code=1 if isinstance(error, SampleErrors | BudgetMismatch) else 2)
    except (RankLost, StoreLost, OutputLost) as error:
        # No other cell can run, and Hydra would print a traceback.
        sys.exit(complain(error, code=1))
    return 0


def launch(argv: Sequence[str], task: Callable[[DictConfig], object]) -> None:
    """Hand a command line to Hydra, which calls `task` once for each cell.

    Raises:
        StoreLost: Hydra cannot write its record of a sweep.
    """
    # Or Hydra would print a traceback of its own and leave.
    plain = patch.dict(os.environ, HYDRA_FULL_ERROR="1")
    with patch.object(sys, "argv", [__file__, *argv]), plain:
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
        except OSError as error:
            raise StoreLost(f"hydra: {error}") from error


def complain(problem: object, code: int) -> int:
    """Print one line on stderr, once for all processes of a run, and return the exit code."""
    if speaks():
        streams.complain(problem)
    return code


if __name__ == "__main__":
    sys.exit(main())
