"""Words that masked places may get at a step, and how confident each is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.harness.decoding.diffusion.denoising_settings import Denoising

#: Added to a probability before its logarithm, as in LaViDa's code.
_EPSILON = 1e-10


def candidates(
    logits: Tensor,
    silent: Sequence[int],
    settings: Denoising,
    generators: Sequence[torch.Generator],
    counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the word (B, M) of each place and its confidence (B, M), in double precision.

    At a temperature above 0 the word is drawn from the softmax of logits / temperature over the words that top_k and
    top_p leave: the first at which its cumulative sum exceeds a uniform number, one of each place. The releases' rule
    (Gumbel-max) has the same distribution and draws a number for every word. Confidences are of temperature 1, over all
    words that may be said. At an `alg_temp` above 0, places are drawn one after another in proportion to the softmax of
    confidence / alg_temp (Dream): the highest of confidence / alg_temp plus Gumbel noise have that distribution.

    Args:
        logits: (B, M, V).
        silent: ids that are never said.
        settings: temperature, top_k, top_p, remasking and alg_temp.
        generators: of each row, on the device of the logits.
        counts: places of each row that need a word, its first ones: a row draws for these, whatever its batch.

    Cost: O(B M V), several passes over the scores in double precision.
    """
    # Padding may have given the head more rows than there are tokens; a copy, since callers may keep the logits.
    scores = logits.to(torch.double, copy=True)
    scores[..., list(silent)] = float("-inf")
    top, words = scores.max(-1)
    if settings.temperature > 0:
        relative = (scores - top.unsqueeze(-1)).div_(settings.temperature)
        sums = _cut(relative, settings.top_k, settings.top_p).exp_().cumsum(-1)
        # Just below 1, so that the product is below the whole sum.
        uniform = _uniform(top, generators, counts).mul_(1 - 2.0**-52).unsqueeze(-1)
        words = torch.searchsorted(sums, uniform * sums[..., -1:], right=True).squeeze(-1)
    if settings.remasking == "random":
        return words, _uniform(top, generators, counts)
    confidence = _confidence(scores, top, words, settings.remasking)
    if settings.alg_temp > 0:
        noise = _uniform(top, generators, counts).log_().neg_().log_()
        confidence = confidence / settings.alg_temp - noise
    return words, confidence


def _confidence(scores: Tensor, top: Tensor, words: Tensor, remasking: str) -> Tensor:
    """Return how confident each place (B, M) is, of scores (B, M, V) that are written over, and their maxima."""
    if remasking == "low_confidence":
        relative = scores.sub_(top.unsqueeze(-1))
        word_scores = relative.gather(-1, words.unsqueeze(-1)).squeeze(-1)
        return word_scores.exp_() / relative.exp_().sum(-1)
    probabilities = scores.softmax(-1)
    if remasking == "entropy":
        return (probabilities * (probabilities + _EPSILON).log()).sum(-1)
    first, second = probabilities.topk(2, -1).values.unbind(-1)
    return first - second


def _uniform(like: Tensor, generators: Sequence[torch.Generator], counts: Sequence[int]) -> Tensor:
    """Return numbers from 0 to 1 for the first places of each row, and zeros for the others."""
    numbers = torch.zeros_like(like)
    for row, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        numbers[row, :count].uniform_(generator=generator)
    return numbers


def _cut(scores: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return scores (..., V) without the words after the `top_k` likeliest and after a share `top_p`."""
    if top_k is not None:
        lowest = scores.topk(min(top_k, scores.shape[-1]), -1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    if top_p is not None:
        ordered, words = scores.sort(dim=-1, descending=True, stable=True)
        shares = ordered.softmax(-1)
        is_cut = shares.cumsum(-1) - shares >= top_p
        is_cut[..., 0] = False
        scores = scores.masked_fill(is_cut.scatter(-1, words, is_cut), float("-inf"))
    return scores
