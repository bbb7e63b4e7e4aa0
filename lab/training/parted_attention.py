"""Attention of packed dialogues in parts, because a masked kernel computes all pairs of words.

Each word sees the whole prefix and the earlier words of its dialogue. Each part runs in a kernel without a
mask; the two results are merged by the logarithms of their sums of exponentials (LSE), and a part's gradient is that of
attention with the merged result and LSE.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


Pair = tuple[torch.Tensor, torch.Tensor]


class DialogueGroup(NamedTuple):
    """S dialogues of similar length, at most T words; shorter ones are padded at the end.

    Attributes:
        words: Indices of their words among the B L of the batch ``(S, T)``, zero for padding.
        filled: Padding mask ``(S, T)``.
    """

    words: torch.Tensor
    filled: torch.Tensor

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows ``(B, heads, L, ...)`` as ``(S, heads, T, ...)``, zeros for padding."""
        taken = rows.transpose(1, 2).flatten(0, 1)[self.words]
        taken[self.filled] = 0
        return taken.transpose(1, 2)

    def put(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows ``(S, heads, T, ...)`` into ``(B, L, heads, ...)``, which is contiguous."""
        kept = ~self.filled
        into.flatten(0, 1)[self.words[kept]] = rows.transpose(1, 2)[kept]


def groups_of(segments: torch.Tensor) -> list[DialogueGroup]:
    """Groups the dialogues of a batch by length; each is contiguous with one number in ``(B, L)``, -1 is none."""
    by_size: dict[int, list[range]] = {}
    for span in _spans(segments):
        by_size.setdefault(len(span).bit_length(), []).append(span)
    groups = []
    for spans in by_size.values():
        shape = (len(spans), max(map(len, spans)))
        words, filled = torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)
        for row, span in enumerate(spans):
            words[row, : len(span)] = torch.arange(span.start, span.stop)
            filled[row, : len(span)] = False
        groups.append(DialogueGroup(words, filled))
    return groups


def _spans(segments: torch.Tensor) -> Iterator[range]:
    length = segments.shape[1]
    for line, numbers in enumerate(segments):
        values, counts = torch.unique_consecutive(numbers, return_counts=True)
        start = line * length
        for number, count in zip(values.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                yield range(start, start + count)
            start += count


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: list[DialogueGroup],
        scale: float,
    ) -> torch.Tensor:
        prefix, dialogue = _split(query, key, value)
        result: torch.Tensor
        result, prefix_lse = _forward(query, *prefix, scale=scale)
        own_result = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        own_lse = own_result.new_full(own_result.shape[:-1], float("-inf"))
        for group in groups:
            rows, lse = _forward(*map(group.take, (query, *dialogue)), is_causal=True, scale=scale)
            group.put(own_result, rows)
            group.put(own_lse, lse)
        own_lse = own_lse.transpose(1, 2)
        lse = torch.logaddexp(prefix_lse, own_lse)
        result = result * (prefix_lse - lse).exp()[..., None]
        result += own_result.transpose(1, 2) * (own_lse - lse).exp()[..., None]
        context.save_for_backward(query, key, value, result, lse)
        context.groups, context.scale = groups, scale
        return result

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, lse = context.saved_tensors
        prefix, dialogue = _split(query, key, value)
        grad = grad.contiguous()
        grad_query, *prefix_grads = _backward(
            grad, query, *prefix, result, lse, 0.0, False, scale=context.scale
        )
        shape = query.transpose(1, 2).shape
        own_grads = [query.new_zeros(shape) for _ in range(3)]
        for group in context.groups:
            parts = map(group.take, (grad, query, *dialogue, result, lse))
            group_grads = _backward(*parts, 0.0, True, scale=context.scale)
            for into, rows in zip(own_grads, group_grads, strict=True):
                group.put(into, rows)
        own_query, *own_rest = (grads.transpose(1, 2) for grads in own_grads)
        key_value_grads = (
            torch.cat(pair, dim=2) for pair in zip(prefix_grads, own_rest, strict=True)
        )
        return (grad_query + own_query, *key_value_grads, None, None)


def _split(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Pair, Pair]:
    """Returns keys and values of the prefix, and those of the words."""
    size = key.shape[2] - query.shape[2]
    return (key[:, :, :size], value[:, :, :size]), (key[:, :, size:], value[:, :, size:])


def attend_in_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: list[DialogueGroup],
    scale: float,
) -> torch.Tensor:
    """Softmax attention of words over a prefix and the earlier words of their dialogues, on a CPU.

    Words outside any dialogue see only the prefix.

    Args:
        query: Queries of the words ``(B, heads, L, D)``.
        key: Keys of the prefix (at least one token), then of the words ``(B, heads, P + L, D)``.
        value: Values, likewise.
        groups: The dialogues, as :func:`groups_of` returns them.
        scale: Factor of the scores.

    Returns:
        Mixed values ``(B, heads, L, D)``.

    Cost: ``B heads L P D`` products, plus those inside each dialogue.
    """
    mixed: torch.Tensor = _Parted.apply(query, key, value, groups, scale)
    return mixed
