"""Functions in place of modules' forwards, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forwards(
    pairs: Iterable[tuple[nn.Module, Callable[..., Any]]],
) -> Iterator[None]:
    """Let functions run in place of the forwards of their modules inside the block.

    Where a model is spread over several cards, the functions get their arguments on the module's card.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    for module, forward in pairs:
        attributes = vars(module)
        # accelerate's forward moves the arguments, and then calls the module's own by this name.
        name = "_old_forward" if "_hf_hook" in attributes else "forward"
        saved.append((attributes, name, attributes.get(name)))
        attributes[name] = forward
    try:
        yield
    finally:
        for attributes, name, former in saved:
            del attributes[name]
            if former is not None:
                attributes[name] = former
