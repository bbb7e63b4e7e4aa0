"""The model that stays loaded between the cells of a sweep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from espalier.harness.specs.run_spec import ModelSpec

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter


@dataclass
class Pool:
    """Holds the model of the last run, so that a sweep loads each model once."""

    _spec: ModelSpec | None = None
    _adapter: Adapter | None = None

    def adapter(self, spec: ModelSpec) -> Adapter:
        """Return the loaded model of `spec`; a different model is dropped first, since two may not fit."""
        if self._adapter is None or self._spec != spec:
            self._adapter = None
            # transformers takes seconds to import, and a stored row does not need a model.
            from espalier.harness.models.build_adapter import load_adapter

            self._adapter, self._spec = load_adapter(spec), spec
        return self._adapter


@dataclass
class LentPool(Pool):
    """Holds a model that the caller has loaded, or has in memory.

    Args:
        open_spec: returns a context manager that yields the model's adapter with the settings of a spec.
        stack: closes it.
    """

    open_spec: Callable[[ModelSpec], AbstractContextManager[Adapter]] = field(kw_only=True)
    stack: contextlib.ExitStack = field(kw_only=True)

    def adapter(self, spec: ModelSpec) -> Adapter:
        """Return the caller's model with the settings of `spec`."""
        if self._adapter is None:
            self._adapter = self.stack.enter_context(self.open_spec(spec))
        return self._adapter


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use `count` threads inside the block; None leaves the setting alone."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
