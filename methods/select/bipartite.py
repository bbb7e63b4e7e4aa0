"""Bipartite matching: tokens at even places find partners among those at odd places, and the best pairs merge.

Places follow the raster, or a sequence (B, E + N) of the tokens in any order. E = 1 if a class token comes first, as
-1: it takes an even place, is never merged, and nothing merges into it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize, pad

from espalier.methods.plans import Assignment
from espalier.methods.select.topk import indices_of, ranking, rows_of

#: Similarities held at a time, in bytes; the full matrix of a long video would take gigabytes.
BLOCK_BYTES = 64 * 2**20


def match(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best partner of each token at an even place, as two (B, ceil(N/2)) tensors.

    The first is the highest cosine with a token at an odd place, in fp32, the second the index of that token (0 for
    place 1, 1 for place 3); of equal cosines the first wins. A zero vector has cosine 0 to everything.

    Args:
        features: (B, N, D), N at least 2.

    Cost: O(N^2 D / 4), in blocks of rows, and about 4 N D + `BLOCK_BYTES` bytes on top of the result.
    """
    # One half stays normalised; the other is only converted block by block.
    odd = normalize(features[:, 1::2].float(), dim=-1).transpose(1, 2)
    rows = max(1, BLOCK_BYTES // (4 * odd.shape[0] * odd.shape[2]))
    best = [
        (normalize(even.float(), dim=-1) @ odd).max(dim=2)
        for even in features[:, ::2].split(rows, dim=1)
    ]
    return torch.cat([maximum.values for maximum in best], 1), torch.cat(
        [maximum.indices for maximum in best], 1
    )


def merge_pairs(features: Tensor, n_pairs: int) -> tuple[Tensor, Tensor]:
    """Return (B, N - n_pairs) ascending indices of the remaining tokens and (B, N) the slot of each token.

    The `n_pairs` tokens at even places with the highest cosines go to their partners, equal ones by lower index; a
    partner may absorb several, and the group takes its place.

    Args:
        features: (B, N, D).
        n_pairs: 0 to floor(N/2).

    Raises:
        MethodError: a cosine is NaN or infinite.

    Cost: that of `match` and O(N log N).
    """
    cosine, partner = match(features)
    leaving = ranking(cosine)[:, :n_pairs]
    stays = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    stays.scatter_(1, 2 * leaving, False)
    slot = stays.cumsum(dim=1) - 1
    joined = slot.gather(1, 2 * partner.gather(1, leaving) + 1)
    return indices_of(stays, stays.shape[1] - n_pairs), slot.scatter(1, 2 * leaving, joined)


def merge_in_sequence(
    features: Tensor, sequence: Tensor, n_pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `merge_pairs` for places in a sequence, and the remaining sequence (B, E + N - n_pairs).

    In it the remaining tokens of even places come before all odd ones: in their order with a class token, by descending
    cosine without one. That is the order of the output of ToMe's released code.

    Args:
        features: (B, N, D).
        sequence: (B, E + N) the tokens in order, -1 for a class token.
        n_pairs: 1 to floor(N/2).

    Raises:
        MethodError: a cosine is NaN or infinite.

    Cost: that of `match` and O(N log N).
    """
    extra = sequence.shape[1] - features.shape[1]
    # Here a class token becomes token 0, a zero vector.
    walk, features = sequence + extra, pad(features, (0, 0, extra, 0))
    rows = rows_of(walk)
    cosine, partner = match(features[rows, walk])
    even, odd = walk[:, ::2], walk[:, 1::2]
    best_first = ranking(cosine[:, extra:]) + extra
    leaving, staying = best_first[:, :n_pairs], best_first[:, n_pairs:]
    if extra:
        staying = staying.sort(dim=1).values
    following = torch.cat([even[:, :extra], even.gather(1, staying), odd], dim=1)
    leaving_tokens = even.gather(1, leaving)
    stays = torch.ones_like(walk, dtype=torch.bool).scatter(1, leaving_tokens, False)
    rank = stays.cumsum(dim=1) - 1 - extra
    joined = rank.gather(1, odd.gather(1, partner.gather(1, leaving)))
    slot = rank.scatter(1, leaving_tokens, joined)[:, extra:]
    kept = indices_of(stays[:, extra:], slot.shape[1] - n_pairs)
    return kept, slot, rank.gather(1, following)


def merge_to(
    features: Tensor, sizes: Tensor, keep: int, sequence: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge in rounds: half of the tokens at most in each, so one is enough for `keep >= N / 2`.

    In the next round a group's features are the mean of its tokens', weighted by sizes.

    Args:
        features: (B, N, D).
        sizes: (B, N) weight of each token in the mean, positive.
        keep: 1 to N.
        sequence: (B, E + N) the order in which places are counted; None: that of the raster.

    Returns:
        (B, keep) ascending indices of the remaining tokens, (B, N) the slot of each token, and (B, E + keep) the
        remaining sequence, None if there was none.

    Raises:
        MethodError: a cosine is NaN or infinite.

    Cost: that of `merge_pairs`, in all rounds together less than 4/3 of the first.
    """
    n_rows, n_tokens = features.shape[:2]
    kept = torch.arange(n_tokens, device=features.device).expand(n_rows, -1).contiguous()
    slot = kept
    while (n_left := kept.shape[1]) > keep:
        n_pairs = min(n_left - keep, n_left // 2)
        if sequence is None:
            staying, into = merge_pairs(features, n_pairs)
        else:
            staying, into, sequence = merge_in_sequence(features, sequence, n_pairs)
        kept, slot = kept.gather(1, staying), into.gather(1, slot)
        if n_left - n_pairs > keep:
            mean = Assignment(into, shares(into, sizes))
            features = mean.apply(features.float(), n_left - n_pairs)
            sizes = totals(into, sizes)[:, : n_left - n_pairs]
    return kept, slot, sequence


def shares(slot: Tensor, sizes: Tensor) -> Tensor:
    """Return (B, N) each token's share of its slot: its size over that of all in the slot. Cost: O(N)."""
    return sizes / totals(slot, sizes).gather(1, slot)


def means(features: Tensor, slot: Tensor, n_slots: int) -> Tensor:
    """Return (B, K, D) the mean of the features (B, N, D) in each slot (B, N), 0 to K - 1, none of them empty.

    Cost: O(N (D + log N)); unlike `Assignment.apply`, one pass over the features.
    """
    order = slot.argsort(dim=1, stable=True)
    numbers = torch.arange(n_slots, device=slot.device).expand(len(slot), -1).contiguous()
    starts = torch.searchsorted(slot.gather(1, order), numbers)
    offset = rows_of(slot) * slot.shape[1]
    index, starts = (order + offset).flatten(), (starts + offset).flatten()
    mean: Tensor = embedding_bag(index, features.flatten(0, 1), starts, mode="mean")
    return mean.view(len(slot), n_slots, -1)


def totals(slot: Tensor, sizes: Tensor) -> Tensor:
    """Return (B, N) the sizes (B, N) summed by slot (B, N, each at least 0), 0 for an empty slot."""
    return torch.zeros_like(sizes).scatter_add(1, slot, sizes)
