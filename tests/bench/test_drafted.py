"""Subsets for a draft that are chosen on purpose: what each holds, and that all are drafted on and judged."""

from __future__ import annotations

import pytest
import torch

from lab.bench import draft_needs as drafted
from lab.bench.draft_needs import SceneTokens, make_up, subsets

SIDE = 6


def scene(seed: int) -> SceneTokens:
    """A raster whose first two rows show objects, which the target's layer moved away from the words."""
    generator = torch.Generator().manual_seed(seed)
    objects = torch.arange(SIDE * SIDE) < 2 * SIDE
    features = torch.randn(SIDE * SIDE, 8, generator=generator)
    features[~objects] = features[-1] + 0.1 * features[~objects]
    closer = torch.rand(SIDE * SIDE, generator=generator) - 2 * objects.float()
    return SceneTokens(features, closer, objects)


def chosen(keep: int = 18) -> dict[str, torch.Tensor]:
    return subsets(scene(0), scene(1), keep, torch.Generator().manual_seed(2))


def test_every_subset_has_as_many_tokens_each_once_and_in_order() -> None:
    for name, kept in chosen().items():
        assert len(kept) == 18, name
        assert (kept[1:] > kept[:-1]).all(), name
        assert kept[0] >= 0, name
        assert kept[-1] < SIDE * SIDE, name


def test_subsets_are_what_they_are_called() -> None:
    seen, found = scene(0), chosen()
    made = {name: make_up(kept, seen) for name, kept in found.items()}
    for name in ("objects, then random", "objects, then uvprune", "objects, then sign turned"):
        assert made[name]["objects"] == 1
    assert made["uvprune, sign turned"]["objects"] == 1
    assert made["uvprune"]["objects"] == made["no object, random"]["objects"] == 0
    assert 0 < made["random"]["objects"] < 1
    assert made["next to one place"]["neighbours"] > made["random"]["neighbours"] + 0.2
    assert made["alike one token"]["alike"] > made["random"]["alike"]
    best = set(seen.closer.topk(9).indices.tolist())
    assert best < set(found["half uvprune, half random"].tolist())
    ground = found["objects, then uvprune"][12:].tolist()
    assert set(ground) == set(seen.closer.topk(6).indices.tolist())
    other = set(scene(1).closer.topk(18).indices.tolist())
    assert set(found["uvprune of another scene"].tolist()) == other


def test_the_make_up_of_a_subset_by_hand() -> None:
    seen = SceneTokens(torch.eye(9), torch.arange(9.0), torch.arange(9) < 2)
    corner = make_up(torch.tensor([0, 1, 3]), seen)
    # Of 2 + 3 + 3 neighbours in a raster of three by three, 0 has two that are kept and 1 and 3 have one each.
    assert corner == {"objects": 1.0, "neighbours": 4 / 8, "alike": 0.0}


@pytest.mark.slow
def test_the_whole_prompt_is_drafted_on_best(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafted, "LIMIT", 12)  # the first objects of a caption
    monkeypatch.setattr(drafted, "PLACES", ("renumbered",))
    assert drafted.main(["--scenes", "2", "--ratio", "0.9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shares = {line[:26].strip(): float(line[26:].split()[0]) for line in lines}
    assert set(shares) == {"everything", *chosen()}
    assert shares["everything"] == max(shares.values()) > 90
    assert min(shares.values()) < 70
