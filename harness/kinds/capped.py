"""The kind of reducers that choose their counts, below the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from espalier.harness.cost.budget import BudgetMismatch
from espalier.harness.kinds.kind import Account
from espalier.harness.kinds.reducer import Reducer
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.record import SampleRecord


class Capped(Reducer):
    """Implements Kind for espalier.methods.capped.CappedReducer."""

    def account(
        self, spec: AnswerRequest, method: TokenReducer, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens that the method keeps, at most the budget's count of each sample."""
        for record in records:
            over = [
                pair
                for pair in zip(record.kept, record.requested, strict=True)
                if pair[0] > pair[1]
            ]
            if over:
                raise BudgetMismatch(
                    f"sample {record.sample}: kept {over[0][0]} tokens, at most {over[0][1]} are allowed"
                )
        return super().account(spec, method, records)


CAPPED = Capped()
