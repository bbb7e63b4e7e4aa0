"""No compressor ever holds an attention map: the largest tensor that a score makes, recorded operation by operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from espalier.harness.specs.catalogue import build_method, names_of
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.select import attention

HEADS, KV_HEADS, WIDTH, LENGTH, WORDS = 8, 2, 8, 2048, 200
CELLS = 2**17


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that owns its storage's size."""

    elements = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            # A view of keys that are expanded over heads has many elements and stores none of them.
            if isinstance(leaf, Tensor):
                held = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.elements = max(self.elements, min(leaf.numel(), held))
        return outputs


def long_view() -> CacheView:
    noise = torch.Generator().manual_seed(0)
    visual = torch.arange(4, LENGTH - WORDS)
    return CacheView(
        layer=0,
        queries=torch.randn(HEADS, LENGTH, WIDTH, generator=noise),
        keys=torch.randn(KV_HEADS, LENGTH, WIDTH, generator=noise),
        scaling=WIDTH**-0.5,
        candidates=visual,
        visual=visual,
        words=torch.arange(LENGTH - WORDS, LENGTH),
        chance=[noise],
    )


def scored(method: CacheCompressor, view: CacheView) -> tuple[Tensor, int]:
    with Largest() as largest:
        scores = method.score(view)
        kept = method.keep(scores, 200)
        method.merge(scores, kept)
    return scores, largest.elements


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, {}) for name in names_of(CacheCompressor)),
        ("aircache", {"window": "all"}),
        ("aircache", {"alpha": 0.0, "per_head": True}),
        ("snapkv", {"window": 200}),
    ],
)
def test_no_score_holds_a_map_nor_a_large_part_of_one(
    name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = build_method(name, params)
    view = long_view()
    plain, _ = scored(method, view)
    monkeypatch.setattr(attention, "CELLS", CELLS)
    scores, elements = scored(method, long_view())
    # The products of a block of rows, or the queries and keys that were there before.
    assert elements <= max(CELLS, view.queries.numel())
    assert elements < HEADS * LENGTH * LENGTH / 200
    if name not in ("random_kv",):
        torch.testing.assert_close(scores, plain)


def test_a_map_would_be_noticed() -> None:
    view = long_view()
    with Largest() as largest:
        attention.logits(view.queries, view.keys, view.scaling)
    assert largest.elements == HEADS * LENGTH * LENGTH


def test_at_a_real_length_a_window_is_one_block_and_all_rows_are_small_ones() -> None:
    # 28 heads and 16k tokens: a window of 32 words at once, 36 rows of the prompt at a time.
    assert 28 * 32 * 16384 <= attention.CELLS < 28 * 256 * 16384
