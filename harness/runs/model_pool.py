"""The model that stays loaded between the cells of a sweep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from espalier.harness.specs.run_spec import ModelSpec

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter


def load(spec: ModelSpec) -> Adapter:
    """Return a model loaded from its checkpoint."""
    # transformers takes seconds to import, and a stored row does not need a model.
    from espalier.harness.models.build_adapter import load_adapter

    return load_adapter(spec)


@dataclass
class Pool:
    """Holds the model of the last run, so that a sweep loads each model once.

    Args:
        load: returns a model with the settings of a spec; another one where the caller has it in memory.
    """

    load: Callable[[ModelSpec], Adapter] = load
    _spec: ModelSpec | None = None
    _adapter: Adapter | None = None

    def adapter(self, spec: ModelSpec) -> Adapter:
        """Return the loaded model of `spec`; a different model is dropped first, since two may not fit."""
        if self._adapter is None or self._spec != spec:
            self._adapter = None
            self._adapter, self._spec = self.load(spec), spec
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
