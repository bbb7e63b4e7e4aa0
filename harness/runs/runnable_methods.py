"""Which methods run on a model, by the checks of admission that read no file of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.catalogue import own_choices
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import Cell
from espalier.harness.config.overrides import override_of
from espalier.harness.errors import UserError
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.method_stack import method_of
from espalier.methods.base import MethodError


def refused_methods(model: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Return the methods, those of plug-ins included, that do not run on a model, each with the reason.

    Args:
        model: as after `model=`.
        folders: further folders of configs.

    Raises:
        UserError: there is no such model.

    Cost: imports torch and all methods, three seconds.
    """
    names = own_choices("method", folders).all_names
    line = ["-m", f"model={model}", f"method={','.join(names)}"]
    command = read_command([*line, *override_of(folders)])
    assert command is not None  # none of these requests information
    reasons = ((name, _reason(cell)) for name, cell in zip(names, command.cells, strict=True))
    return {name: reason for name, reason in reasons if reason is not None}


def _reason(cell: Cell) -> str | None:
    try:
        spec = build_spec(cell)
        method = method_of(spec.method)
        kind_of(method, spec).normalise(spec, method)
    except (UserError, MethodError) as error:
        return str(error)
    return None
