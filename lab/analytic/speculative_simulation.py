"""Simulate the gain of speculative decoding from two forward times and an acceptance rate.

`python -m lab.analytic.speculative_simulation --target 420 --draft 46.6 --acceptance 0.872`

Runs the state machine on a virtual clock with given forward times of both sides (in any unit, for example
from `extra.speculative` of a row) and a draft that is right with the given probability, for every window up to
`--windows`. No model is loaded. `expected` is from the formula, `played` from the state machine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from espalier.harness.decoding.speculative.drafts import EMPTY_DRAFT, Draft, Greedy, Row
from espalier.harness.decoding.speculative.speculative_summary import (
    check_drafting,
    parallel_speedup,
    sequential_speedup,
)
from espalier.harness.decoding.speculative.state_machine import Lap, Machine, TimedRound

#: Number of tokens played for each window.
LENGTH = 20_000


@dataclass(frozen=True)
class Virtual:
    """A virtual clock: each step of a side costs a given time.

    Attributes:
        target: seconds of one forward of the target.
        draft: seconds of one forward of the drafter.
        message: seconds of one exchange between the two.
        depth: number of forwards of a draft, by default one per token (a tree needs one per level).
    """

    target: float
    draft: float
    message: float = 0.0
    depth: Callable[[Draft], int] = lambda draft: len(draft.tokens)

    def in_turn(
        self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]
    ) -> TimedRound:
        """Charge one side after the other."""
        proposed = draft()
        drafting = self.draft * self.depth(proposed)
        total = drafting + self.target + self.message
        return TimedRound(proposed, rows(proposed), total, _lap(drafting), _lap(self.target))

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Charge the longer side."""
        proposed = draft()
        drafting = self.draft * self.depth(proposed)
        total = max(drafting, self.target) + self.message
        return TimedRound(proposed, rows(), total, _lap(drafting), _lap(self.target))

    def verify_only(self, rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Charge the target."""
        return TimedRound(EMPTY_DRAFT, rows(), self.target, verifying=_lap(self.target))


def _lap(seconds: float) -> Lap:
    return Lap(seconds, seconds)


@dataclass(frozen=True)
class Counting:
    """A target that counts, and a draft that counts too, except at the places where it is `wrong`."""

    wrong: Sequence[bool]

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next numbers; -1 where the draft is wrong."""
        start = len(tokens)
        places = range(start, start + count)
        return Draft(tuple(-1 if self.wrong[place] else place for place in places))

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[Row]:
        """Return the numbers that follow."""
        return list(range(len(tokens), len(tokens) + len(draft.tokens) + 1))


def played(
    acceptance: float, gamma: int, target: float, draft: float, message: float, overlap: bool
) -> float:
    """Return the machine's speed-up over the target alone under the virtual clock.

    Raises:
        ValueError: an acceptance outside [0, 1], a window below 1.
    """
    check_drafting(acceptance, gamma)
    chance = random.Random(0)
    sides = Counting([chance.random() >= acceptance for _ in range(LENGTH + 4 * gamma)])
    clock = Virtual(target, draft, message)
    trace = Machine(sides, sides, Greedy(), clock, gamma, overlap).run(LENGTH)
    return LENGTH * target / trace.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of windows; return 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m lab.analytic.speculative_simulation")
    parser.add_argument("--target", type=float, required=True, help="time of a forward, T_p")
    parser.add_argument("--draft", type=float, required=True, help="time of a forward, T_q")
    parser.add_argument(
        "--acceptance", type=float, required=True, help="probability per verified token"
    )
    parser.add_argument("--message", type=float, default=0.0, help="time of an exchange per round")
    parser.add_argument("--windows", type=int, default=10, help="largest gamma")
    options = parser.parse_args(argv)
    if min(options.target, options.draft) <= 0 or options.message < 0 or options.windows < 1:
        print("error: times are above 0, --message 0 or more, --windows 1 or more", file=sys.stderr)
        return 2
    if not 0 <= options.acceptance <= 1:
        print(f"error: --acceptance {options.acceptance} is not in [0, 1]", file=sys.stderr)
        return 2
    times = (options.target, options.draft)
    table = Table(title=f"speed-up over plain decoding, c = {options.target / options.draft:.3g}")
    for heading in ("gamma", "in turn: expected", "played", "at once: expected", "played"):
        table.add_column(heading, justify="right")
    for gamma in range(1, options.windows + 1):
        cells = [str(gamma)]
        for overlap, formula in (
            (False, sequential_speedup),
            (True, parallel_speedup),
        ):
            cells.append(f"{formula(options.acceptance, gamma, *times):.3f}")
            speedup = played(options.acceptance, gamma, *times, options.message, overlap)
            cells.append(f"{speedup:.3f}")
        table.add_row(*cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
