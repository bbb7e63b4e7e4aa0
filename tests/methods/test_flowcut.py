"""FlowCut: its flow against loops and on a model, its schedule by hand, and what its released code keeps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.engine.tower_images import block_flow
from espalier.methods.base import Need, Site
from espalier.methods.flowcut import FlowCut
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.released import numbers, released_view
from tests.methods.runs import kept_by, noted
from tests.methods.twins import check_method, slow_highest
from tests.tiny import Recorder


def slow_flow(query: Tensor, key: Tensor, value: Tensor, scaling: float, extra: int) -> list[float]:
    """One picture, (H, S, Dh) each, over lists."""
    heads, slots, width = query.shape
    patches = range(extra, slots)

    def softmax(h: int, row: Tensor, others: Tensor, factor: float) -> list[float]:
        powers = [math.exp(factor * float(row[h] @ others[h, j])) for j in range(slots)]
        return [power / sum(powers) for power in powers]

    def mean(rows: list[list[float]]) -> list[float]:
        sums = [sum(row[j] for row in rows) for j in patches]
        return [total / sum(sums) for total in sums] if extra else [x / len(rows) for x in sums]

    if extra:
        relation = mean([softmax(h, query[:, 0], key, scaling) for h in range(heads)])
        semantic = mean([softmax(h, value[:, 0], value, 1.0) for h in range(heads)])
        factor = [r + s for r, s in zip(relation, semantic, strict=True)]
    else:
        queries = [(h, i) for h in range(heads) for i in patches]
        factor = mean([softmax(h, query[:, i], key, scaling) for h, i in queries])
    size = [sum(abs(float(value[:, j, d].mean())) for d in range(width)) for j in patches]
    return [f * s for f, s in zip(factor, size, strict=True)]


@pytest.mark.parametrize("extra", [0, 1])
def test_equals_the_slow_one(extra: int):
    query, key, value = (numbers(seed, 2, 3, 7, 4) * 2 for seed in (1, 2, 3))
    flow = block_flow(query, key, value, 0.5, extra)
    for row in range(2):
        expected = slow_flow(query[row], key[row], value[row], 0.5, extra)
        torch.testing.assert_close(flow[row], torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_sites_and_counts_by_hand():
    """Of the 23 blocks that LLaVA needs, the 2nd, 4th, ... 22nd; with 2 to go, 0.5 / sqrt(2) of the excess goes."""
    assert [site.layer for site in FlowCut().tower_sites(23)] == list(range(1, 22, 2))
    assert [[site.layer for site in FlowCut().tower_sites(n)] for n in (1, 2, 3, 4)] == [
        [0],
        [0],
        [1],
        [0, 2],
    ]
    half = FlowCut(entropy=math.sqrt(0.5))
    assert half.fractions(0.2, 2) == pytest.approx((1 - 0.8 * 0.5 / math.sqrt(2), 0.2))
    assert FlowCut(entropy=1.0).fractions(0.2, 3) == (1, 1, 0.2)


def released_flowcut(case: dict[str, Any]) -> None:
    """Residual streams that no block changes hold queries, keys and values of all blocks; counts are the code's."""
    n_tokens, blocks = case["tokens"], case["blocks"]
    stream = 3 * numbers(case["seed"], 1, 1 + n_tokens, 3 * (blocks + 1) * 8)
    heads = stream.view(1, 1 + n_tokens, blocks + 1, 3, 2, 4).permute(2, 3, 0, 4, 1, 5)
    left, flow = torch.arange(n_tokens), None
    sites = {site.layer for site in FlowCut().tower_sites(blocks)}
    for block in range(max(sites) + 1):
        slots = torch.cat([torch.zeros(1, dtype=torch.long), 1 + left])
        query, key, value = heads[block][:, :, :, slots]
        layer_flow = block_flow(query, key, value, 0.5, 1)
        flow = layer_flow if flow is None else 0.5 * flow + 0.5 * layer_flow
        if block in sites:
            view = released_view(Site("tower", block), torch.zeros(1, len(left), 2), 4, flow=flow)
            kept = FlowCut().plan(view, case["left"][block]).kept[0]
            left, flow = left[kept], flow[:, kept]
        if block == 3:
            assert left.tolist() == case["after_block_3"]
    assert left.tolist() == case["kept"]


test_flowcut = check_method(
    "flowcut", partial(slow_highest, "flow"), keeps=(1, 20, 47), released=released_flowcut
)


def test_the_signal_is_the_flow_of_the_blocks_so_far():
    """On a model: queries, keys and values as the tower's own projections put them out."""
    adapter, recorder = adapter_of("llava"), InTower(Site("layer", 1))
    blocks = adapter.tower_blocks()[:2]
    parts = [
        (n, block.attention, f"{part}_proj") for n, block in enumerate(blocks) for part in "qkv"
    ]
    with noted(**{f"{n} {part}": getattr(module, part) for n, module, part in parts}) as seen:
        kept_by(adapter, recorder, FAMILIES["llava"].chats[:1], 0.5)
    flow = []
    for n in range(2):
        attention = blocks[n].attention
        states = [
            seen[f"{n} {part}_proj"][0].unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
            for part in "qkv"
        ]
        flow.append(block_flow(*states, attention.scale, 1))
    expected = 0.5 * flow[0] + 0.5 * flow[1]
    torch.testing.assert_close(recorder.views[0].signals["flow"], expected, atol=1e-6, rtol=1e-5)


class InTower(Recorder):
    """Looks at the flow in the second block."""

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        return (Site("tower", 1),)

    def sites(self, depth: int) -> tuple[Site, ...]:
        return ()

    def needs(self, site: Site) -> tuple[Need, ...]:
        return (Need("flow"),)
