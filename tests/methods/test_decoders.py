"""The decoders: what each is made of, and the trees that they draft."""

from __future__ import annotations

from typing import Any

import pytest

from espalier.harness.specs.catalogue import build_method, names_of
from espalier.methods.autoregressive import Autoregressive
from espalier.methods.base import Decoder
from espalier.methods.onsd import OnSD
from espalier.methods.parallelvlm import ParallelVLM
from espalier.methods.pearl import PEARL
from espalier.methods.sd_tree import EAGLE, SDTree, parents_of
from espalier.methods.specvlm_sd import SpecVLMSD
from espalier.methods.std import STD
from espalier.methods.vanilla_sd import VanillaSD
from tests.methods.cases import make_view

# ---------------------------------------------------------------- what each is made of

#: What the papers say. Name: class, source, overlap, window, text_only, guided.
KINDS: dict[str, tuple[type[Decoder], str, bool, int | str, bool, bool]] = {
    "autoregressive": (Autoregressive, "nobody", False, 1, False, False),
    "vanilla_sd": (VanillaSD, "model", False, 5, False, False),
    "onsd": (OnSD, "model", False, 5, True, False),
    "sd_tree": (SDTree, "model", False, 5, False, False),
    "specvlm_sd": (SpecVLMSD, "model", False, 5, False, True),
    "std": (STD, "cache", False, 9, False, True),
    "pearl": (PEARL, "model", True, "auto", False, False),
    "parallelvlm": (ParallelVLM, "model", True, "auto", False, True),
}


def test_these_are_decoders():
    assert set(names_of(Decoder)) >= set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_defaults_are_the_papers(name: str):
    built = build_method(name, {})
    kind, *wanted = KINDS[name]
    assert type(built) is kind
    assert [built.source, built.overlap, built.window, built.text_only, built.guided] == wanted
    assert (built.reducer, bool(built.tree)) == (None, name == "sd_tree")


@pytest.mark.parametrize("name", names_of(Decoder))
def test_the_target_is_read_inside_itself_once_or_not_at_all(name: str):
    decoder = build_method(name, {})
    for depth in (2, 6, 28, 80):
        sites = decoder.sites(depth)
        assert len(sites) == int(decoder.guided)
        for site in sites:
            assert site.where == "layer"
            assert 1 <= site.layer <= depth
            layers = [need.layer for need in decoder.needs(site) if need.layer is not None]
            assert all(0 <= layer < site.layer for layer in layers)


def test_who_is_not_guided_chooses_nothing():
    view = make_view(STD())
    with pytest.raises(NotImplementedError, match="VanillaSD"):
        VanillaSD().choose(view, 3)


@pytest.mark.parametrize("kind", [VanillaSD, OnSD, SpecVLMSD, STD, PEARL, ParallelVLM])
def test_a_window_holds_a_token(kind: Any):
    assert (kind(gamma=1).window, kind(gamma=7).window) == (1, 7)


# ---------------------------------------------------------------- trees


def names_by_parents(parents: tuple[int, ...]) -> list[str]:
    """The path of each node: its parent's, then its place among the siblings."""
    names: list[str] = []
    for node, parent in enumerate(parents):
        rank = sum(other == parent for other in parents[:node])
        names.append(f"{names[parent]}.{rank}" if parent >= 0 else str(rank))
    return names


def test_the_static_tree_by_hand():
    tree = SDTree().tree
    assert tree == (
        *(-1, -1, -1, -1),
        *(0, 0, 0, 1, 1, 2, 2, 3),
        *(4, 4, 4, 5, 5, 6, 6, 7),
        *(12, 12, 12),
        *(20, 20),
    )
    assert names_by_parents(tree) == list(EAGLE)
    levels = [len(name.split(".")) for name in names_by_parents(tree)]
    assert [levels.count(level) for level in range(1, 6)] == [4, 8, 8, 3, 2]


def test_paths_in_any_order_are_the_same_tree():
    assert SDTree(paths=EAGLE[::-1]).tree == SDTree().tree
    assert SDTree(paths=("0", "0.0", "0.0.0")).tree == (-1, 0, 1)
    assert SDTree(paths=("0", "0.0", "0.0.0")).window == 3
    # Ranks are numbers: the tenth sibling comes behind the third.
    wide = tuple(str(rank) for rank in range(11))
    assert parents_of((*wide, "10.0", "2.0")) == (*[-1] * 11, 2, 10)


def test_specvlm_drafts_the_same_tree():
    assert SpecVLMSD(shape="tree").tree == SDTree().tree
    assert SpecVLMSD(shape="tree").window == 5
