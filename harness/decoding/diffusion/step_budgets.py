"""Budgets of single denoising steps, derived from the budget of a run."""

from __future__ import annotations

from dataclasses import replace

from espalier.harness.cost.budget import Budget, BudgetError, shortened_layer
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.errors import brief
from espalier.methods.base import PlanError, TokenReducer
from espalier.methods.blame import Blame
from espalier.methods.denoiser import as_denoiser

#: A share of 1, with which a schedule may end, keeps one token: a sequence cannot become empty.
_NEARLY_ALL = 1 - 2.0**-30

#: Error of a share that a schedule sums up.
_ROUNDING = 1e-9


def step_budgets(
    method: TokenReducer,
    budget: Budget,
    facts: ModelFacts,
    steps: int,
    cached: bool = False,
    blocks: int = 1,
) -> tuple[Budget, ...]:
    """Return the budget of each of `steps` steps, the same number in each of `blocks` blocks.

    A method that acts on every prefill uses the run's budget in each step. A method of denoising steps has its own
    shares, with the rule applied to their mean over the steps after the first: `kept` counts tokens after its site,
    `average` those entering a layer, mean over the layers. A method with several sites defines its own meaning of a
    ratio (`ratios`). A count of tokens stays at each step after the first, if these steps remove equal shares. `cached`
    states that the prompt is run once and cached.

    Raises:
        BudgetError: the rule or a count cannot be applied step by step, or the ratio cannot be reached.
        MethodError: the method has no such ratio.
    """
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    if not sites or _checked_ratios(method, "ratios", 0.0, steps) is None:
        return (budget,) * steps
    denoiser = as_denoiser(method)
    later_sites = 0 if denoiser is None else denoiser.later_sites
    if budget.count is not None:
        even = _even_budget(method, budget)
        first = replace(even, whole_sites=later_sites) if later_sites else Budget("kept", 0)
        return (first, *(even,) * (steps - 1))
    base = base_ratio(method, budget, facts)
    call, further = "ratios", tuple[int, ...]()
    if denoiser is not None:
        call, further = ("cached_ratios", ()) if cached else ("block_ratios", (blocks,))
    ratios = _checked_ratios(method, call, base, steps, *further)
    down = denoiser is not None and denoiser.rounds_down
    first, *later_budgets = (
        Budget("kept", min(ratio, _NEARLY_ALL), down=down) for ratio in ratios or ()
    )
    return (replace(first, whole_sites=later_sites), *later_budgets)


def _checked_ratios(
    method: TokenReducer, call: str, ratio: float, steps: int, *blocks: int
) -> tuple[float, ...] | None:
    """Return the shares of the steps, or None.

    Raises:
        PlanError: they are not `steps` numbers in [0, 1], or the method fails.
    """
    with Blame(method, call):
        ratios: tuple[float, ...] | None = getattr(method, call)(ratio, steps, *blocks)
        if ratios is not None and not (
            isinstance(ratios, tuple)
            and len(ratios) == steps
            and all(
                isinstance(ratio, float | int) and 0 <= ratio <= 1 + _ROUNDING for ratio in ratios
            )
        ):
            raise PlanError(
                f"`{call}` returns {brief(repr(ratios))}; valid: a tuple of {steps} numbers in [0, 1], "
                "a share for each step"
            )
        return ratios


def _even_budget(method: TokenReducer, budget: Budget) -> Budget:
    """Return a budget that counts tokens, for each step after the first."""
    denoiser, request = as_denoiser(method), f"keep={budget.count}"
    if denoiser is None or not denoiser.even:
        raise BudgetError(
            f"{request} cannot be followed by {type(method).__name__}: its steps or stages keep different shares; "
            "valid: ratio=<share removed>"
        )
    if budget.rule != "kept":
        raise BudgetError(
            f"{request} with budget={budget.rule!r}: {type(method).__name__} keeps a count of tokens after its site; "
            "valid: kept"
        )
    return budget


def base_ratio(method: TokenReducer, budget: Budget, facts: ModelFacts) -> float:
    """Return the mean share that a method of denoising steps removes after its site, at the steps that remove any.

    Raises:
        BudgetError: as `step_budgets`.
    """
    name, depth = type(method).__name__, facts.text.layers
    site, *further = method.sites(depth)
    valid = ("kept",) if further else ("kept", "average")
    if budget.rule not in valid:
        raise BudgetError(
            f"budget={budget.rule!r} cannot be followed by {name}: its ratio sets the shares of its steps or stages; "
            f"valid: {', '.join(valid)}"
        )
    full_share = shortened_layer(site) / depth
    ratio = budget.ratio if budget.rule == "kept" else budget.ratio / (1 - full_share)
    if ratio >= 1:
        high = 1.0 if budget.rule == "kept" else 1 - full_share
        raise BudgetError(
            f"ratio={budget.ratio:g} leaves no token under budget={budget.rule}: {name} acting inside layer "
            f"{site.layer} of {depth} reaches 0 <= ratio < {high:g}"
        )
    return ratio
