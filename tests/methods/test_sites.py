"""Where methods act, what they read there, and the shares of tokens that their sites keep: a new one is a line."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from espalier.methods.aim import AIM
from espalier.methods.base import Decoder, Need, Site, TokenReducer
from espalier.methods.btp import BTP
from espalier.methods.d2pruner import D2Pruner
from espalier.methods.fastv_denoising import FastVDenoising
from espalier.methods.fastv_first_step import FastVFirstStep
from espalier.methods.feather import Feather
from espalier.methods.fitprune import FitPrune
from espalier.methods.framefusion import FrameFusion
from espalier.methods.globalcom2 import GlobalCom2
from espalier.methods.holitom import HoliTom
from espalier.methods.ivtp import IVTP
from espalier.methods.nuwa import Nuwa
from espalier.methods.parallelvlm import ParallelVLM
from espalier.methods.prunevid import PruneVid
from espalier.methods.pyramiddrop import PyramidDrop
from espalier.methods.pyramiddrop_denoising import PyramidDropDenoising
from espalier.methods.sparsevlm import SparseVLM
from espalier.methods.specvlm import SpecVLM
from espalier.methods.specvlm_sd import SpecVLMSD
from espalier.methods.std import STD
from espalier.methods.tome import ToMe
from espalier.methods.uvprune import UVPrune
from espalier.methods.vscan import VScan

#: The layers of a decoder of some depth before which a method acts.
LAYERS: tuple[tuple[TokenReducer | Decoder, int, list[int]], ...] = (
    (AIM(), 28, [15, 16, 17, 18, 19, 20, 21]),
    (BTP(), 32, [3, 6, 14]),
    (D2Pruner(K=5), 6, [5]),
    (FastVDenoising(K=4), 32, [4]),
    (FastVFirstStep(), 32, [16]),
    (FastVFirstStep(K=3), 32, [3]),
    (Feather(), 32, [7, 15]),
    (FitPrune(), 4, [1, 2, 3]),
    (FrameFusion(), 28, [1, 2]),
    (HoliTom(), 28, [18]),
    (HoliTom(r=0.0), 28, []),
    (IVTP(), 32, [3, 6, 9, 12]),
    (IVTP(), 40, [3, 6, 9, 12]),
    (IVTP(), 28, [3, 5, 8, 11]),
    (IVTP(), 12, [1, 2, 3, 5]),
    (IVTP(), 6, [1, 2, 3, 4]),
    (IVTP(), 3, [1, 2]),
    (IVTP(), 2, [1]),
    (IVTP(group=2, layers=7, depth=24), 24, [2, 4, 6]),
    (Nuwa(), 2, [1]),
    (Nuwa(), 5, [2]),
    (Nuwa(), 28, [14]),
    (ParallelVLM(), 80, [20]),
    (ParallelVLM(), 28, [20]),
    (PruneVid(), 32, [11]),
    (PruneVid(M=0), 2, [1]),
    (PyramidDrop(), 32, [8, 16, 24]),
    (PyramidDrop(), 28, [7, 14, 21]),
    (PyramidDrop(), 6, [1, 3, 4]),
    (PyramidDrop(), 4, [1, 2, 3]),
    (PyramidDrop(S=2), 32, [16]),
    (PyramidDrop(layers=(2, 4, 6)), 32, [2, 4, 6]),
    (PyramidDropDenoising(), 32, [8, 16, 24]),
    (PyramidDropDenoising(), 6, [1, 3, 4]),
    (PyramidDropDenoising(S=2), 32, [16]),
    (SparseVLM(), 32, [3, 7, 16]),
    (SparseVLM(), 28, [3, 6, 14]),
    (SparseVLM(), 12, [1, 3, 6]),
    (SparseVLM(), 6, [1, 2, 3]),
    (SparseVLM(), 4, [1, 2, 3]),
    (SpecVLM(layer=3), 6, [3]),
    (SpecVLMSD(), 3, [3]),
    (STD(), 80, [80]),
    (ToMe(), 32, []),
    (UVPrune(), 80, [20]),
    (UVPrune(), 28, [20]),
    (UVPrune(), 21, [20]),
    (UVPrune(), 20, [5]),
    (UVPrune(), 6, [1]),
    (UVPrune(), 3, [1]),
    (UVPrune(L=3), 6, [3]),
    (UVPrune(criterion="attention_variation"), 80, [20]),
    (UVPrune(criterion="attention_variation"), 20, [5]),
    (UVPrune(criterion="attention_variation"), 6, [2]),
    (UVPrune(criterion="attention_variation"), 3, [2]),
    (VScan(), 32, [16]),
)

#: The blocks of a tower of some depth after which a method acts.
TOWERS: tuple[tuple[TokenReducer, int, list[int]], ...] = (
    (IVTP(), 23, [2, 5, 8, 11, 14, 17, 20]),
    (IVTP(), 24, [2, 5, 8, 11, 14, 17, 20, 23]),
    (IVTP(), 3, [2]),
    (IVTP(), 2, [1]),
    (IVTP(group=2, layers=7, depth=24), 5, [1, 3]),
    (ToMe(), 3, [0, 1, 2]),
)

#: Three tenths of the tokens and a ninth of the others.
GRID = 0.3 + 0.7 / 9

#: The shares of tokens that sites keep, for the share that the last one keeps.
SHARES: tuple[tuple[TokenReducer, float, Sequence[float]], ...] = (
    (AIM(), 1 / 32, [n / 32 for n in range(8, 0, -1)]),
    (AIM(), 0.3, [1 - 0.1 * n for n in range(8)]),
    (BTP(), 1 / 12, (1 / 2, 1 / 4, 1 / 12)),
    (BTP(), 0.5, (1, 1, 0.5)),
    (Feather(), 0.09 * GRID, (GRID, 0.09 * GRID)),
    (Feather(), 1.0, (1, 1)),
    (HoliTom(), 0.1, (0.2, 0.1)),
    (HoliTom(), 0.8, (1, 0.8)),
    (HoliTom(r=0.0), 0.1, (0.1,)),
    (IVTP(), 1 / 16, (1 / 4, 1 / 8, 1 / 16)),
    (IVTP(), 1 / 16, (1 / 16,)),
    (PruneVid(), 0.2, (0.5, 0.2)),
    (PruneVid(), 0.8, (1, 0.8)),
    (PyramidDrop(), 0.125, (0.5, 0.25, 0.125)),
    (ToMe(), 0.2, (1 - 0.8 / 3, 0.4, 0.2)),
    (ToMe(), 0.125, (0.5, 0.25, 0.125)),
    (VScan(), 32 / 576, (96 / 576, 32 / 576)),
    (VScan(), 0.5, (1, 0.5)),
)

PLACES = (Need("text_positions"), Need("visual_positions"))
RECEIVED = (Need("text_received_max"), Need("visual_received_max"))

#: What a method reads at a site.
NEEDS: tuple[tuple[TokenReducer | Decoder, Site, tuple[Need, ...]], ...] = (
    (D2Pruner(K=5), Site("layer", 5), (Need("last_attention"), Need("prior"))),
    (FastVDenoising(K=4), Site("layer", 4), (Need("decider_attention", 3),)),
    (FastVDenoising(K=4, queries="last"), Site("layer", 4), (Need("last_attention", 3),)),
    (FastVDenoising(K=4, queries="mean"), Site("layer", 4), (Need("mean_attention", 3),)),
    (FastVFirstStep(queries="mean"), Site("prefix"), (Need("first_kept"),)),
    (FastVFirstStep(queries="mean"), Site("layer", 16), (Need("mean_attention"),)),
    (FitPrune(), Site("layer", 1), (*RECEIVED, *PLACES)),
    (FitPrune(), Site("layer", 2), RECEIVED),
    (GlobalCom2(), Site("prefix"), (Need("cls_logits", -1), Need("tile"))),
    (GlobalCom2(scores="attention"), Site("prefix"), (Need("cls_attention"), Need("tile"))),
    (
        Nuwa(salience="attention", pillars="attention"),
        Site("vision"),
        (Need("cls_attention"), Need("tower_states")),
    ),
    (PyramidDropDenoising(), Site("layer", 8), (Need("last_attention"),)),
    (
        SpecVLM(layer=3),
        Site("layer", 3),
        (*(Need("text_attention", layer) for layer in range(3)), *PLACES),
    ),
    (
        SpecVLM(guidance="last", layer=3),
        Site("layer", 3),
        (Need("text_attention", 2), *PLACES),
    ),
    (
        SpecVLMSD(),
        Site("layer", 3),
        (*(Need("text_attention", layer) for layer in range(3)), *PLACES),
    ),
    (STD(), Site("layer", 2), (Need("text_attention", 0), Need("text_attention", 1))),
    (ToMe(weighted=False), Site("tower"), (Need("block_keys"),)),
    (UVPrune(criterion="similarity"), Site("layer", 5), (Need("text_states"),)),
    (UVPrune(criterion="attention"), Site("layer", 5), (Need("text_attention"),)),
    (
        UVPrune(criterion="attention_variation"),
        Site("layer", 5),
        (Need("text_attention", 0), Need("text_attention")),
    ),
    (
        UVPrune(),
        Site("layer", 5),
        (Need("projected"), Need("text_embeddings"), Need("text_states")),
    ),
)


@pytest.mark.parametrize(("method", "depth", "layers"), LAYERS, ids=str)
def test_a_method_acts_before_these_layers(
    method: TokenReducer | Decoder, depth: int, layers: list[int]
) -> None:
    assert [site.layer for site in method.sites(depth) if site.where == "layer"] == layers


@pytest.mark.parametrize(("method", "blocks", "ends"), TOWERS, ids=str)
def test_a_method_acts_after_these_blocks(
    method: TokenReducer, blocks: int, ends: list[int]
) -> None:
    assert method.tower_sites(blocks) == tuple(Site("tower", end) for end in ends)


@pytest.mark.parametrize(("method", "share", "shares"), SHARES, ids=str)
def test_sites_keep_these_shares(
    method: TokenReducer, share: float, shares: Sequence[float]
) -> None:
    assert method.fractions(share, len(shares)) == pytest.approx(shares)


@pytest.mark.parametrize(("method", "site", "needs"), NEEDS, ids=str)
def test_a_method_reads_no_more_than_this(
    method: TokenReducer | Decoder, site: Site, needs: tuple[Need, ...]
) -> None:
    assert set(method.needs(site)) == set(needs)
