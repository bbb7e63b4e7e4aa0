"""Methods of kinds that the registry has none of yet: some ask for nothing, some for what is not carried out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Method, Plan, Site, TokenReducer, View
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.denoiser import DenoisingReducer


@dataclass(frozen=True)
class KeepCache(CacheCompressor):
    """Evicts nothing, and has a hyper-parameter to be told apart by."""

    tau: float = 0.5

    def sites(self, depth: int) -> tuple[Site, ...]:
        return ()

    def score(self, view: CacheView) -> Tensor:
        return view.keys[:, view.candidates].norm(dim=-1).mean(0, keepdim=True)


@dataclass(frozen=True)
class Evict(KeepCache):
    """Asks for the cache of every layer."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        return tuple(Site("cache", layer) for layer in range(depth))


@dataclass(frozen=True)
class KeepDenoising(DenoisingReducer):
    """Drops nothing at any step."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        return ()

    def plan(self, view: View, keep: int) -> Plan:
        return Plan(torch.arange(keep).expand(view.tokens.shape[0], -1))


@dataclass(frozen=True)
class DropDenoising(KeepDenoising):
    """Drops before layer 2 at each step."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("layer", 2),)


@dataclass(frozen=True)
class CacheReducer(TokenReducer):
    """A token reducer that asks for a site where no token can be dropped."""

    where: str = "cache"

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site(self.where, 1),)  # type: ignore[arg-type]

    plan = KeepDenoising.plan


@dataclass(frozen=True)
class Kindless(Method):
    """Derived from no base of a kind."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        return ()
