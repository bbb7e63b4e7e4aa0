"""What all kinds of method have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from methods.views import Need, Site


@dataclass(frozen=True)
class Method(ABC):
    """Common to all bases: a frozen dataclass whose fields are the hyper-parameters under the paper's names."""

    @abstractmethod
    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return where the method acts in a model of `depth` decoder layers, first to last.

        Raises:
            MethodError: a layer hyper-parameter lies outside the model.
        """

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals that `View.signals` must hold at `site`."""
        del site
        return ()
