"""What a method returns: which tokens stay, and how the others merge into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.methods.checks import Condition, PlanError, are_finite, require_all
from espalier.methods.views import View


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
    """The decision of a token reducer at one site. Plans are data; harness/engine applies them in one place.

    Attributes:
        kept: (B, K) indices of the kept tokens, ascending, relative to `View.tokens`.
        merge: how dropped tokens flow into kept ones, or None for pure pruning. At `tower` sites the sizes of an
            `Assignment` add up by slot, those of a `Mixture` are mixed by its matrix.
        spare: (B,) kept tokens that only fill up the count, because the method's own rule had none left to choose;
            None for methods with a rule that always has enough.
        order: (B, K) at `tower` sites, places in `kept` in the order in which the next site's `sequence` has them; the
            tokens themselves stay ascending. None: ascending there, too.
        scores: (B, N) what the tokens were ranked by, for `answer.scores`; None for methods that rank none.
        entering: at `block` sites, whether what merges are the states that entered the layer, to which each kept token
            then adds what its own attention put out; otherwise the states after the attention merge.
    """

    kept: Tensor
    merge: Assignment | Mixture | None = None
    spare: Tensor | None = None
    order: Tensor | None = None
    entering: bool = False
    scores: Tensor | None = None

    def check(self, n_tokens: int, keep: int | None) -> None:
        """Raise PlanError unless `kept` is strictly ascending, inside [0, n_tokens) and exactly `keep` wide.

        An `order`, if there is one, must hold each place of `kept` once.

        `keep=None` accepts any width of at least one (adaptive methods). Values as in `require_all`.
        """
        require_all([*self._conditions(n_tokens, keep)])

    def _conditions(self, n_tokens: int, keep: int | None) -> Iterator[Condition]:
        width = self.kept.shape[1]
        if width == 0 or (keep is not None and width != keep):
            raise PlanError(f"plan keeps {width} tokens, the budget asks for {keep}")
        between = pad(pad(self.kept, (1, 0), value=-1), (0, 1), value=n_tokens)
        yield _holds(
            (between.diff(dim=1) > 0).all(),
            lambda: (
                f"kept indices must ascend strictly within [0, {n_tokens}), and {_fault(self.kept, n_tokens)}; valid: "
                "espalier.methods.select.topk.top(scores, keep), which sorts what torch.topk leaves unsorted"
            ),
        )
        if self.order is not None:
            line = f"an order must hold each of the {width} kept tokens once"
            if self.order.shape != self.kept.shape:
                raise PlanError(line)
            places = torch.arange(width, device=self.kept.device)
            yield _holds((self.order.sort(dim=1).values == places).all(), lambda: line)

    def inside(self, n_tokens: int) -> Plan:
        """Return the plan with all indices where they may be: a wrong one must not crash a device before it is read."""
        last = self.kept.shape[1] - 1
        merge = self.merge
        if isinstance(merge, Assignment):
            merge = replace(merge, slot=merge.slot.clamp(-1, last))
        order = None if self.order is None else self.order.clamp(0, last)
        return replace(self, kept=self.kept.clamp(0, n_tokens - 1), merge=merge, order=order)


def _holds(flag: Tensor, line: Callable[[], str]) -> Condition:
    return Condition(flag, lambda: PlanError(line()))


def checked_plan(plan: object, view: View, keep: int | None) -> Plan:
    """Return a Plan for the tokens of a view, its values to be read as in `require_all`; `keep` as in `Plan.check`.

    Raises:
        PlanError: it is none.
    """
    require_all([*_conditions_of(plan, view, keep)])
    assert isinstance(plan, Plan)  # as checked
    return plan.inside(view.tokens.shape[1])


def _conditions_of(plan: object, view: View, keep: int | None) -> Iterator[Condition]:
    """Yield what must hold of the values of a plan; raise PlanError for a wrong kind, shape or place."""
    if not isinstance(plan, Plan):
        returned = "nothing" if plan is None else f"a {type(plan).__name__}"
        raise PlanError(
            f"plan returns {returned}; valid: espalier.methods.base.Plan(kept) with ascending "
            "indices (B, K) of the tokens that stay, such as Plan(espalier.methods.select.topk.top(scores, keep))"
        )
    rows, n_tokens, _ = view.tokens.shape
    place = view.tokens.device
    require_tensor("Plan.kept", plan.kept, (rows, None), place)
    width = plan.kept.shape[1]
    if plan.order is not None:
        _require_site("order", "tower", view)
        require_tensor("Plan.order", plan.order, (rows, width), place)
    yield from plan._conditions(n_tokens, keep)
    if plan.entering:
        _require_site("entering", "block", view)
    if plan.spare is not None:
        require_tensor("Plan.spare", plan.spare, (rows,), place)
        yield _holds(
            ((plan.spare >= 0) & (plan.spare <= width)).all(),
            lambda: f"Plan.spare must lie in [0, {width}]: how many of the kept tokens",
        )
    if plan.scores is not None:
        require_tensor("Plan.scores", plan.scores, (rows, n_tokens), place, True)
        yield _holds(
            (plan.scores == plan.scores).all(),
            lambda: "Plan.scores holds NaN; valid: numbers, infinity among them, or None",
        )
    if isinstance(plan.merge, Assignment):
        require_tensor("Assignment.slot", plan.merge.slot, (rows, n_tokens), place)
        require_tensor("Assignment.weight", plan.merge.weight, (rows, n_tokens), place, True)
        yield _numbers("Assignment.weight", plan.merge.weight)
        yield _holds(
            ((plan.merge.slot >= -1) & (plan.merge.slot < width)).all(),
            lambda: (
                f"Assignment.slot must lie in [-1, {width}): a place in `kept`, or -1 for a token that is dropped"
            ),
        )
    elif isinstance(plan.merge, Mixture):
        require_tensor("Mixture.matrix", plan.merge.matrix, (rows, width, n_tokens), place, True)
        yield _numbers("Mixture.matrix", plan.merge.matrix)
    elif plan.merge is not None:
        raise PlanError(
            f"Plan.merge is a {type(plan.merge).__name__}; valid: an Assignment, a Mixture, None"
        )


def check_choice(chosen: object, view: View, keep: int, by_layer: bool) -> None:
    """Raise PlanError unless a decoder's choice is (B, keep) ascending indices, or (B, layers, keep) `by_layer`."""
    rows, n_tokens, _ = view.tokens.shape
    shape = (rows, None, None) if by_layer else (rows, None)
    require_tensor("what `choose` returns", chosen, shape, view.tokens.device)
    assert isinstance(chosen, Tensor)
    Plan(chosen.flatten(0, -2)).check(n_tokens, keep)


def require_tensor(
    name: str, value: object, shape: tuple[int | None, ...], place: torch.device, real: bool = False
) -> None:
    """Raise PlanError unless a value is a tensor of this shape (None: any size) and kind of number on a device."""
    sizes = ", ".join("K" if size is None else str(size) for size in shape)
    wanted = (
        f"({sizes}{',' * (len(shape) == 1)}) of {'a floating type' if real else 'int64'} on {place}"
    )
    if not isinstance(value, Tensor):
        raise PlanError(f"{name} is a {type(value).__name__}; valid: a tensor {wanted}")
    fits = value.dim() == len(shape) and all(
        size in (None, actual) for size, actual in zip(shape, value.shape, strict=True)
    )
    suits = value.is_floating_point() if real else value.dtype == torch.int64
    if not (fits and suits and value.device == place):
        kind = str(value.dtype).removeprefix("torch.")
        mask = value.dtype == torch.bool and not real
        raise PlanError(
            f"{name} is {tuple(value.shape)} of {kind} on {value.device}; valid: {wanted}"
            + (", of a mask espalier.methods.select.topk.indices_of(mask, keep)" if mask else "")
        )


def _numbers(name: str, values: Tensor) -> Condition:
    return _holds(are_finite(values), lambda: f"{name} holds NaN or infinity; valid: numbers")


def _require_site(field: str, where: str, view: View) -> None:
    if view.site.where != where:
        raise PlanError(
            f"Plan.{field} is for sites of the kind {where!r}, and this one is {view.site.where!r}"
        )


def _fault(kept: Tensor, n_tokens: int) -> str:
    """Return what is wrong with the first invalid row of indices."""
    for number, row in enumerate(kept.tolist()):
        outside = [index for index in row if not 0 <= index < n_tokens]
        twice = [index for place, index in enumerate(row) if index in row[:place]]
        if outside:
            return f"row {number} holds {outside[0]}"
        if twice:
            return f"row {number} holds {twice[0]} more than once"
        if row != sorted(row):
            return f"row {number} is unsorted"
    return "they are not"


@dataclass(frozen=True)
class Attended:
    """Which visual entries of the cache one decoding step attends to.

    Attributes:
        entries: (B, N) booleans, or None for all entries.
        reference: (B, N) whatever the method wants to see again at the next step, such as the attention it chose by.
    """

    entries: Tensor | None
    reference: Tensor


def check_attended(answer: object, view: View) -> None:
    """Raise PlanError unless what `attend` returns fits the entries of a view."""
    if not isinstance(answer, Attended):
        raise PlanError(
            f"`attend` returns a {type(answer).__name__}; valid: espalier.methods.base.Attended(entries, reference)"
        )
    entries, shape = answer.entries, view.tokens.shape[:2]
    if entries is not None and (entries.shape != shape or entries.dtype != torch.bool):
        raise PlanError(
            f"Attended.entries is {tuple(entries.shape)} of {entries.dtype}; valid: {tuple(shape)} of torch.bool, None"
        )


def _accumulator(tokens: Tensor) -> torch.dtype:
    """Accumulate half precision in fp32 and leave wider types as they are."""
    return torch.promote_types(tokens.dtype, torch.float32)
