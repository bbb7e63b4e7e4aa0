"""All signals that a method may need, read from the declarations of their producers: no producer is imported.

A producer declares its signals by the decorator `signal`: a class of a file here, and for signals inside the tower the
planner of harness/engine/tower_sites.py, which makes them as it runs the blocks.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from espalier.harness.specs.registry import Registry

Producing = TypeVar("Producing", bound=type[Any])

HERE = Path(__file__).parent
FILES = (*sorted(HERE.glob("*.py")), HERE.parent / "tower_sites.py")


@dataclass(frozen=True)
class Declaration:
    """A signal, as its producer declares it.

    Attributes:
        name: by which methods request it.
        text: shape in `View.signals`, and meaning.
        units: whether it is read before the decoder, for each unit of the projector, so that a prompt can store it.
        inside_tower: whether it is made at a site inside the tower, by the engine's run of the blocks.
    """

    name: str
    text: str
    units: bool = False
    inside_tower: bool = False


def signal(
    name: str, text: str, *, units: bool = False, inside_tower: bool = False
) -> Callable[[Producing], Producing]:
    """Declare that a class makes a signal. Arguments are those of `Declaration`: constants, read from the source."""
    return lambda producer: producer


def declarations(file: Path) -> dict[str, list[Declaration]]:
    """Return the signals that each class of a file declares."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {
        node.name: [
            Declaration(
                *map(ast.literal_eval, call.args),
                **{str(word.arg): ast.literal_eval(word.value) for word in call.keywords},
            )
            for call in node.decorator_list
            if isinstance(call, ast.Call) and ast.unparse(call.func) == signal.__name__
        ]
        for node in body
        if isinstance(node, ast.ClassDef)
    }


def _read() -> tuple[dict[str, Declaration], Registry]:
    declared: dict[str, Declaration] = {}
    producers = Registry("signal")
    for file in FILES:
        parts = file.with_suffix("").relative_to(HERE.parents[2]).parts
        for class_name, signals in declarations(file).items():
            for declaration in signals:
                producers.add(declaration.name, f"{'.'.join(('espalier', *parts))}:{class_name}")
                declared[declaration.name] = declaration
    return declared, producers


#: Declarations by name, and the classes that make the signals.
DECLARED, PRODUCERS = _read()

#: Shape and meaning of every signal.
SIGNALS: Mapping[str, str] = {name: DECLARED[name].text for name in sorted(DECLARED)}
