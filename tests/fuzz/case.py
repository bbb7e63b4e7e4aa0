"""A case: a command, what lies in its folder, and what is known of its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Stands in the environment of every case; no stream may show it.
KEY = "sk-fuzz-0123456789abcdef"

#: Stand in arguments for the folder of the case, and for the store of two finished runs in it.
HERE, STORE = "{here}", "{store}"

#: The command whose rows the store holds.
CELLS = (
    *("benchmark=seedling_vqa", "ratio=0.5", "limit=2", "engine.warmup=0", "engine.paired=0"),
    *("engine.batch_size=2", "json=true"),
)


@dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
        kind: which table it is of.
        command: `run`, a module with `main(argv)`, or a function of tests.fuzz.calls as `call:<name>`.
        arguments: of the command.
        refused: whether anything but an error is wrong.
        prepare: makes what lies in the folder of the case.
        served: whether exit code 0 is right only with the metrics of the store's own row.
        seconds: after which it hangs.
    """

    kind: str
    command: str
    arguments: tuple[str, ...]
    refused: bool = False
    prepare: Callable[[Path], None] | None = None
    served: bool = False
    seconds: float = 60.0

    @property
    def line(self) -> str:
        """The command as a person would type it."""
        return " ".join((self.command, *(repr(text) for text in self.arguments)))[:300]


def run(kind: str, *arguments: str, refused: bool = False, **more: object) -> Case:
    """Return a case of run.py with a store of its own."""
    return Case(kind, "run", (*arguments, f"store={HERE}/new"), refused, **more)  # type: ignore[arg-type]
