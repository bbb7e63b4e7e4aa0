"""Reducers that choose each sample's count, with the run's budget as a ceiling."""

from __future__ import annotations

from espalier.methods.base import Plan, PlanError, TokenReducer, View


class CappedReducer(TokenReducer):
    """Keeps as many tokens of a sample as the method finds it worth, and never more than the budget.

    The run's ratio is the least share that is removed from any sample; results have the achieved share. Ratio 0 removes
    nothing, as for every method. The engine plans one sample at a time.
    """

    @property
    def adaptive(self) -> bool:
        """Counts are the method's own."""
        return True

    def answer(self, view: View, keep: int) -> Plan:
        """Return the plan; see the base class.

        Raises:
            PlanError: it keeps more than `keep`.
        """
        plan = super().answer(view, keep)
        if plan.kept.shape[1] > keep:
            raise PlanError(
                f"{type(self).__name__} kept {plan.kept.shape[1]} tokens; the budget allows {keep}"
            )
        return plan
