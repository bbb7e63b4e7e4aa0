"""Values of a calibration at each token's position: `prior`. Nothing is captured."""

from __future__ import annotations

from torch import Tensor

from espalier.harness.engine.artifacts.priors import Prior, resize_prior
from espalier.harness.engine.layout import take
from espalier.harness.engine.signals.producer import Context, Producer, ViewRequest
from espalier.methods.base import MethodError, Need, Site


class CalibratedPrior(Producer):
    """The session's prior, resized to each row's grid.

    Raises:
        MethodError: the session has none.
    """

    def __init__(self, context: Context, site: Site, need: Need) -> None:
        super().__init__(context, site, need)
        if context.prior is None:
            raise MethodError("signal 'prior' needs a calibration (python -m espalier calibrate)")
        self._prior: Prior = context.prior

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        grid = request.layout.grid[request.rows]
        prior = tuple(values.to(grid.device) for values in self._prior)
        return take(resize_prior(prior, grid), request.origin, -1)
