"""What a method answers: which tokens stay, and how the others flow into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class PlanError(ValueError):
    """A method broke the contract of `Plan`."""


@dataclass(frozen=True)
class Assignment:
    """Merging in which every token goes to at most one kept slot: `new[k] = sum of weight[j] * token[j], slot[j] == k`.

    Attributes:
        slot: (B, N) index into the kept tokens, or -1 for a token that is only dropped.
        weight: (B, N) weight of each token in its slot; a kept token's own weight counts too.
    """

    slot: Tensor
    weight: Tensor

    def apply(self, tokens: Tensor, n_keep: int) -> Tensor:
        """Return the merged tokens (B, n_keep, D), accumulated in fp32. Cost: O(N D)."""
        merged = tokens.new_zeros(
            tokens.shape[0], n_keep + 1, tokens.shape[2], dtype=_accumulator(tokens)
        )
        slot = torch.where(
            self.slot < 0, n_keep, self.slot
        )  # the extra row swallows what is dropped
        weighted = tokens.to(merged.dtype) * self.weight.to(merged.dtype).unsqueeze(-1)
        merged.scatter_add_(1, slot.unsqueeze(-1).expand_as(weighted), weighted)
        return merged[:, :n_keep].to(tokens.dtype)


@dataclass(frozen=True)
class Mixture:
    """Merging in which a token may flow into several kept slots: `new = matrix @ tokens` with matrix (B, K, N)."""

    matrix: Tensor

    def apply(self, tokens: Tensor, n_keep: int) -> Tensor:
        """Return the merged tokens (B, n_keep, D), accumulated in fp32. Cost: O(n_keep N D)."""
        accumulator = _accumulator(tokens)
        return (self.matrix.to(accumulator) @ tokens.to(accumulator)).to(tokens.dtype)


@dataclass(frozen=True)
class Plan:
    """What a token reducer decided. Plans are data; harness/engine applies them in one place.

    Attributes:
        kept: (B, K) indices of the kept tokens, ascending, relative to `View.tokens`.
        merge: how dropped tokens flow into kept ones, or None for pure pruning. At `tower` sites the sizes of an
            `Assignment` add up by slot, those of a `Mixture` are mixed by its matrix.
        spare: (B,) kept tokens that only fill up the count, because the method's own rule had none left to choose;
            None for methods whose rule always has.
        order: (B, K) at `tower` sites, places in `kept` in the order in which the next site's `sequence` has them; the
            tokens themselves stay ascending. None: ascending there, too.
        entering: at `block` sites, whether what merges are the states that entered the layer, to which each kept token
            then adds what its own attention put out; otherwise the states behind the attention merge.
    """

    kept: Tensor
    merge: Assignment | Mixture | None = None
    spare: Tensor | None = None
    order: Tensor | None = None
    entering: bool = False

    def check(self, n_tokens: int, keep: int | None) -> None:
        """Raise PlanError unless `kept` is strictly ascending, inside [0, n_tokens) and exactly `keep` wide.

        An `order`, if there is one, must hold each place of `kept` once.

        `keep=None` accepts any width of at least one (adaptive methods).
        """
        width = self.kept.shape[1]
        if width == 0 or (keep is not None and width != keep):
            raise PlanError(f"plan keeps {width} tokens, the budget asks for {keep}")
        steps = torch.diff(self.kept, dim=1) > 0
        inside = (self.kept[:, 0] >= 0) & (self.kept[:, -1] < n_tokens)
        if not bool(steps.all() & inside.all()):
            raise PlanError(f"kept indices must ascend strictly within [0, {n_tokens})")
        places = torch.arange(width, device=self.kept.device).expand_as(self.kept)
        if self.order is not None and not torch.equal(self.order.sort(dim=1).values, places):
            raise PlanError(f"an order must hold each of the {width} kept tokens once")


@dataclass(frozen=True)
class Attended:
    """Which visual entries of the cache one decoding step attends to.

    Attributes:
        entries: (B, N) booleans, or None for all entries.
        reference: (B, N) whatever the method wants to see again at the next step, such as the attention it chose by.
    """

    entries: Tensor | None
    reference: Tensor


def _accumulator(tokens: Tensor) -> torch.dtype:
    """Accumulate half precision in fp32 and leave wider types as they are."""
    return torch.promote_types(tokens.dtype, torch.float32)
