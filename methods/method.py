"""The common base of all kinds of method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from espalier.methods.views import Need, Site


@dataclass(frozen=True)
class Method(ABC):
    """A frozen dataclass: its fields are the hyper-parameters, under the paper's names."""

    #: Whether the method acts by `Plan`s in one prefill alone, as an engine session carries out.
    in_one_prefill: ClassVar[bool] = False
    #: Whether a draft proposes tokens: then the budget's ratio is the share that the draft does without, and may be 1.
    drafts: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers: only then its views have generators, and runs of several seeds differ."""
        return False

    @property
    def takes_draft(self) -> bool:
        """Whether a second model drafts."""
        return False

    @property
    def takes_separators(self) -> bool:
        """Whether newline and separator tokens of pictures may be candidates (`engine.separators`).

        False if the method reads the vision tower or places in the patch grid (`View.grid`), which they lack.
        """
        return False

    @property
    def parts(self) -> tuple[Method, ...]:
        """Return the methods of a composition; of any other method, itself."""
        return (self,)

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

    def read_sites(self, blocks: int, depth: int) -> tuple[Site, ...]:
        """Return where the method reads, acting there or not, in a tower of `blocks` blocks and `depth` layers."""
        del blocks
        return self.sites(depth)
