"""What a method is: small base classes, and the plain data exchanged between a method and the engine.

A method never sees a model. It declares where it acts (`Site`) and what it must read (`Need`), receives a frozen
`View` of tensors, and returns a `Plan`. Only the engine touches the model: it gathers the views, applies the plans and
restores everything afterwards. All kinds of method use the same terms:

| kind                       | base            | where                          | returns               |
| -------------------------- | --------------- | ------------------------------ | --------------------- |
| prune, merge (image, video)| TokenReducer    | `vision`, `prefix`, `layer`    | `Plan`                |
| a count for each sample    | CappedReducer   | as TokenReducer                | `Plan`, at most `keep`|
| inside the vision tower    | TokenReducer    | `tower`, picture by picture    | `Plan`                |
| part of the cache, by step | TokenReducer    | `decode`, from one layer on    | `Attended`            |
| diffusion-step reduction   | DenoisingReducer| `block`, `layer`, in each step | `Plan` (`view.step`)  |
| KV-cache compression       | CacheCompressor | `cache`, once for each layer   | scores and allocation |
| speculative decoding       | Decoder         | reads the target at one site   | tokens for the draft  |

They are defined in methods/views.py and methods/plans.py, the bases in methods/reducers.py and
methods/decoders.py; decoders by the kind of their window are in methods/windows.py, cache compressors in
methods/compressor.py, denoising reducers in methods/denoiser.py, two methods on one prompt in methods/composed.py,
reducers with counts below the budget in methods/capped.py.
docs/methods.md lists what a method may read. A method's file imports from this module.
"""

from __future__ import annotations

from espalier.methods.checks import PlanError
from espalier.methods.decoders import Decoder, Source, Window
from espalier.methods.method import Method
from espalier.methods.plans import Assignment, Attended, Mixture, Plan
from espalier.methods.reducers import Positions, TokenReducer
from espalier.methods.views import MethodError, Need, Site, View, Where

__all__ = [
    "Assignment",
    "Attended",
    "Decoder",
    "Method",
    "MethodError",
    "Mixture",
    "Need",
    "Plan",
    "PlanError",
    "Positions",
    "Site",
    "Source",
    "TokenReducer",
    "View",
    "Where",
    "Window",
]
