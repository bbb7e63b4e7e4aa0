"""Visual entries of the cache that a decoding step attends to, chosen anew where its attention has changed.

DyCoke (Tao et al., CVPR 2025, arXiv 2411.15024): layers from l on attend to floor((1 - P) N) of the N entries, those
that the newest token attends to most in layer l - 1, mean over heads. Let a be that attention at this step:

    paper     the first step attends to all, and the second one chooses; its entries stay as long as cos(a, a of the
              step that chose them) is at least `threshold`; then they are chosen anew among all
    official  they are chosen anew wherever cos(a, a of the step before) is below `threshold`; at all other steps every
              entry is attended to. The first step has no predecessor, and its cosine is 0

The released code never resets a, so that only the first sample of a process starts like this, and any other with the
attention of the previous sample. Here no answer depends on its neighbours: every sample starts like the first. Its
count of visual entries is one short, so that the last one is always attended to and P refers to the others; here the
last is chosen like any other.

Any entry may come back, so the cache keeps them all: this saves no memory, and arithmetic only in kernels that skip
masked entries. Text and generated tokens are always attended to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.plans import Attended
from espalier.methods.select.topk import ranking


def entries_of_step(
    now: Tensor, last: Attended | None, share: float, threshold: float, official: bool
) -> Attended:
    """Return the entries of a step. Cost: O(N log N), without a read of the device.

    Args:
        now: (B, N) attention of the newest token.
        last: the result of the step before; None at the first one.
        share: P, of the entries that are not attended to.
        threshold: cosine from which two steps' attention counts as the same.
        official: whether as in the released code.

    Raises:
        MethodError: an attention is NaN or infinite.
    """
    if last is None and not official:
        return Attended(None, now)
    # The small term keeps 0.1 * 10 from becoming 0.999...
    n_attended = math.floor((1 - share) * now.shape[1] + 1e-9)
    best = ranking(now)[:, :n_attended]
    chosen = torch.zeros_like(now, dtype=torch.bool).scatter_(1, best, True)
    cosine = now.new_zeros(now.shape[0]) if last is None else cosine_similarity(now, last.reference)
    alike = (cosine >= threshold).unsqueeze(1)
    if last is None or official:
        return Attended(chosen | alike, now)
    if last.entries is None:
        return Attended(chosen, now)
    entries = torch.where(alike, last.entries, chosen)
    return Attended(entries, torch.where(alike, last.reference, now))
