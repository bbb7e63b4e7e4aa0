"""Hyper-parameters that a method refuses, each in one line with its key: a new one is a line in these tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from espalier.harness.specs.catalogue import METHODS
from espalier.methods.base import MethodError

#: A window holds a token; where two sides overlap it may follow from their speeds.
WINDOWS, MEASURED_WINDOWS = (
    tuple(({"gamma": n}, f"gamma={n} is out of range; valid: 1 or more{also}$") for n in (0, -3))
    for also in ("", ", auto or best")
)

#: Of each method, values out of range with a pattern of what is said behind `method.params.`.
REFUSED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "aim": (({"first": 21}, "first=21"),),
    "autoprune": (
        ({"k0": -0.1}, r"k0=-0\.1 .*0 or more"),
        ({"slope": -1.0}, r"slope=-1\.0 .*0 or more"),
        ({"first": 0.5}, r"first=0\.5 .*1 or more"),
        ({"theta": 0}, r"theta=0 .*1 or more"),
        ({"tau": 1.0}, r"tau=1\.0 .*0 to 0\.9"),
    ),
    "btp": (
        ({"layers": (6, 3, 14)}, r"layers=\(6, 3, 14\)"),
        ({"layers": (3, 6)}, r"schedule=.*2 positive numbers"),
        ({"schedule": (1, 3, 6)}, r"schedule=\(1, 3, 6\)"),
        ({"attention": (0.3, 0.9, 1.1)}, r"attention=\(0\.3, 0\.9, 1\.1\)"),
    ),
    "d3tom_t": (
        ({"merging": "max"}, "merging"),
        ({"state": "none"}, "state"),
        ({"similarity": "keys"}, "similarity"),
        ({"direction": "up"}, "direction"),
    ),
    "dart": (({"pivot_image_token": 0}, "pivot_image_token=0 .*1 or more"),),
    "dycoke": (
        ({"l": 0}, r"l=0 .*; valid: 1 or more"),
        ({"P": 1.0}, r"P=1\.0 .*; valid: 0 <= P < 1"),
        ({"P": math.nan}, "P=nan"),
        ({"P": 0.0, "temporal": False}, r"P=0\.0 .*; valid: above 0"),
        ({"threshold": 1.5}, r"threshold=1\.5 .*; valid: a cosine, -1 to 1"),
    ),
    "fastv_denoising": (({"K": 0}, "K=0"), ({"queries": "all"}, "queries='all'")),
    "fastv_first_step": (({"K": 0}, "K=0"), ({"queries": "deciders"}, "queries='deciders'")),
    "fastvid": (
        ({"c": 0}, "c=0 .*valid: 1 or more"),
        ({"tau": 1.5}, r"tau=1\.5 .*a cosine"),
        ({"d": -0.1}, r"d=-0\.1 .*0 to 1"),
        ({"p": 0}, "p=0 .*1 or more"),
        ({"beta": 2.0}, r"beta=2\.0 .*0 to 1"),
    ),
    "feather": (({"layers": (15, 7)}, r"layers=\(15, 7\)"), ({"stride": 0}, "stride=0")),
    "flowcut": (({"entropy": 1.5}, r"entropy=1\.5"),),
    "framefusion": (({"S": 1.5}, r"S=1\.5 .*or -2"), ({"K": 0}, "K=0 .*1 or more")),
    "globalcom2": (
        ({"tau": 0}, "tau=0"),
        ({"alpha": -1}, "alpha=-1"),
        ({"scores": "keys"}, "scores='keys'.*logits, attention"),
    ),
    "hiprune": (
        ({"alpha": 1.5}, r"alpha=1\.5 .*from 0 to 1"),
        ({"object_layer": 25}, "object_layer=25 .*1 to 24"),
        ({"border": "wrap"}, "border='wrap' .*drop, clamp"),
    ),
    "hired": (
        ({"alpha": 1.5}, r"alpha=1\.5"),
        ({"budget": "area"}, "budget='area'.*mass, stripes"),
    ),
    "holitom": (
        ({"tau": 1.5}, r"tau=1\.5 .*a cosine"),
        ({"beta": 2.0}, r"beta=2\.0 .*0 to 1"),
        ({"K": 0}, "K=0 .*1 or more"),
        ({"k": 0}, "k=0 .*1 or more, or null"),
        ({"r": 1.0}, r"r=1\.0 .*0 <= r < 1"),
    ),
    "holov": (({"crops": 0}, "crops=0"),),
    "idpruner": (({"mmr_lambda": 1.5}, r"mmr_lambda=1\.5"),),
    "ivtp": (({"group": 0}, "group="), ({"layers": 2}, "layers="), ({"depth": 12}, "depth=")),
    "lookm": (({"recent": 0}, "recent=0 .*1 or more"),),
    "onsd": WINDOWS,
    "nuwa": (
        ({"layer": 0}, "layer="),
        ({"second": 0.0}, "second="),
        ({"side": 0}, "side="),
        ({"quantile": 1.5}, "quantile="),
        ({"reach": 0.0}, "reach="),
        ({"salience": "both"}, "salience="),
        ({"pillars": "none"}, "pillars="),
        ({"guide": "last"}, "guide="),
    ),
    "pact": (
        ({"L": 0}, "L=0 .*1 or more"),
        ({"keep": 1.5}, r"keep=1\.5 .*0 to 1"),
        ({"cutoff": 3.0}, r"cutoff=3\.0 .*or null"),
        ({"coef_pruned": -1.0}, r"coef_pruned=-1\.0 .*0 or more"),
    ),
    "parallelvlm": (
        ({"text_only": True}, "guidance='similarity_variation' .*none, where text_only=true"),
        ({"text_only": True, "guidance": "self"}, "guidance='self' .*none, where text_only=true"),
        ({"guidance": "luck"}, "guidance='luck' .*valid: similarity_variation, .*self"),
        ({"L": 0}, "L=0 .*1 or more"),
        ({"L": 0, "guidance": "none"}, "L=0 .*1 or more"),
        ({"L": 1, "guidance": "attention_variation"}, "L=1 .*2 or more"),
        *MEASURED_WINDOWS,
    ),
    "pearl": MEASURED_WINDOWS,
    "prumerge": (({"k": -1}, "k=-1"),),
    "prunevid": (
        ({"tau": 1.5}, r"tau=1\.5 .*a cosine"),
        ({"gamma": 0.0}, r"gamma=0\.0 .*\(0, 1\]"),
        ({"alpha": 0.0}, r"alpha=0\.0 .*\(0, 1\]"),
        ({"M": -1}, "M=-1 .*0 or more, or null"),
    ),
    "pyramiddrop": (
        ({"S": 1}, "S=1 "),
        ({"ratio": 1.0}, r"ratio=1\.0 "),
        ({"ranking": "next"}, "ranking='next' .*stage_end, next_layer"),
        *(({"layers": layers}, r"layers=\[.*ascending") for layers in ((4, 2), (2, 2), (0, 3))),
    ),
    "pyramiddrop_denoising": (({"S": 1}, "S=1"), ({"excess": 0.0}, r"excess=0\.0")),
    "rtprune": (
        ({"alpha": -0.1}, r"alpha=-0\.1 .*from 0 to 1"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"z": 11.0}, r"z=11\.0 .*from -10 to 10"),
        ({"iters": 0}, "iters=0 .*1 or more"),
        ({"typical": 0.0}, r"typical=0\.0 .*above 0, at most 1"),
        ({"tau": -1.0}, r"tau=-1\.0 .*0 or more"),
        ({"similarity_power": 3}, "similarity_power=3 .*1, 2"),
        ({"merging": "mean"}, "merging='mean' .*none, ot, visionzip"),
        ({"ratio": "own"}, "ratio='own' .*fixed, dynamic"),
        ({"border": "none"}, "border='none' .*patch, image"),
    ),
    "scissor": (({"tau": 1.5}, r"tau=1\.5 .*a cosine, -1 to 1, or null"),),
    "scope": (({"alpha": -1.0}, "alpha=-1"),),
    "sd_tree": (
        ({"paths": ()}, r"paths=\[\] .*one path or more"),
        ({"paths": ("0", "0.1")}, r"paths='0\.1' needs '0\.0'"),
        ({"paths": ("1",)}, "paths='1' needs '0'"),
        ({"paths": ("0", "1.0")}, r"paths='1\.0' needs '1'"),
        ({"paths": ("0", "0.0", "0")}, "paths='0' .*each path once"),
        ({"paths": ("0", "00")}, "paths='00' .*each path once"),
        ({"paths": ("0", "0.")}, r"paths='0\.' .*ranks with dots"),
        ({"paths": ("0", "a")}, "paths='a' .*ranks with dots"),
        ({"paths": ("-1",)}, "paths='-1' .*ranks with dots"),
        ({"paths": ("",)}, "paths='' .*ranks with dots"),
    ),
    "sparsevlm": (
        ({"layers": (2, 2), "schedule": (2, 1)}, r"layers=\(2, 2\)"),
        ({"layers": (2, 4), "schedule": (3, 4)}, r"schedule=\(3, 4\).*2 positive numbers"),
        ({"cluster": "max"}, "cluster='max'.*sum, mean"),
    ),
    "specvlm": (
        ({"layer": 0}, "layer="),
        ({"mass": 1.1}, "mass="),
        ({"mass": math.nan}, "mass="),
        ({"guidance": "first"}, "guidance="),
    ),
    "specvlm_sd": (
        ({"shape": "tree", "gamma": 4}, "gamma=4 .*valid: 5, the levels of the tree"),
        ({"shape": "bush"}, "shape='bush' .*valid: chain, tree"),
        ({"mass": 1.5}, r"mass=1\.5 .*from 0 to 1"),
        *WINDOWS,
    ),
    "std": WINDOWS,
    "sttm": (
        ({"tau_space": 1.5}, r"tau_space=1\.5 .*a cosine, -1 to 1"),
        ({"tau_time": -2.0}, r"tau_time=-2\.0 .*a cosine, -1 to 1, or null"),
        ({"root": -1}, "root=-1 .*0 or more"),
    ),
    "tome": (({"order": "random"}, "order='random' .*raster, released"),),
    "uvprune": (
        ({"L": 1, "criterion": "attention_variation"}, "L=1 .*valid: 2 or more"),
        ({"criterion": "cosine"}, "criterion='cosine' .*attention"),
        ({"L": 0}, "L=0 "),
    ),
    "vanilla_sd": WINDOWS,
    "vidcom2": (
        ({"channels": 0.0}, r"channels=0\.0 .*\(0, 1\]"),
        ({"temperature": 0.0}, ".*above 0"),
    ),
    "visiontrim": (
        ({"dominant": 1.5}, r"dominant=1\.5 .*0 to 1"),
        ({"rounds": -1}, "rounds=-1 .*0 or more"),
    ),
    "vispruner": (({"important_ratio": 1.5}, r"important_ratio=1\.5"),),
    "vlcache": (({"p": 1.5}, r"p=1\.5 .*0 to 1"),),
    "vlmpruner": (
        ({"threshold": 1.5}, r"threshold=1\.5"),
        ({"token_batch": 0}, "token_batch=0"),
        ({"K": 0}, "K=0"),
    ),
    "vscan": (
        ({"second": 0.0}, r"second=0\.0 .*\(0, 1\]"),
        ({"local_layer": 0}, "local_layer=0 .*1 to 24"),
        ({"window": 0}, "window=0 .*1 or more"),
    ),
}
#: Methods with layers that a decoder of so many does not have.
TOO_SHALLOW: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    *((name, {"K": 6}, 6, "K=6 .*to 5 .the model has 6 ") for name in ("fastv", "d2pruner")),
    *(
        (name, {"layer": 6}, 6, "layer=6 .*to 5 .the model has 6 ")
        for name in ("random", "uniform", "divprune")
    ),
    ("random", {"layer": -1}, 6, r"layer=-1 .*0 \(before the decoder\)"),
    ("btp", {}, 3, ".*4 layers or more, not 3"),
    ("d3tom", {"K": 5}, 6, "K=5 is out of range; valid: 0 to 4"),
    ("dart", {"K": 6}, 6, "K=6 .*1 to 5"),
    ("fastv_denoising", {"K": 6}, 6, "K=6 is out of range; valid: 1 to 5"),
    ("fastv_first_step", {"K": 6}, 6, "K=6 is out of range; valid: 1 to 5"),
    ("feather", {}, 2, ".*3 layers or more, not 2"),
    ("ivtp", {}, 1, "layers=12 .*one decoder layer"),
    ("nuwa", {"layer": 6}, 6, "layer=6 .*1 to 5"),
    ("parallelvlm", {"L": 28}, 28, "L=28 .*1 to 27 .the model has 28 "),
    ("pyramiddrop", {"S": 9}, 6, "S=9 .*2 to 6 .the model has 6 "),
    ("pyramiddrop", {"layers": (2, 6)}, 6, "layers=6 .*1 to 5"),
    ("pyramiddrop_denoising", {"S": 7}, 6, "S=7 is out of range"),
    ("sparsevlm", {}, 3, "layers=.*4 layers or more, not 3"),
    ("specvlm", {"layer": 6}, 6, "layer=6 .*1 to 5"),
    ("uvprune", {"L": 6}, 6, "L=6 .*to 5 .the model has 6 "),
)


@pytest.mark.parametrize(
    ("name", "params", "line"),
    [(name, params, line) for name, lines in REFUSED.items() for params, line in lines],
)
def test_a_value_out_of_range_is_one_line_with_its_key(
    name: str, params: dict[str, Any], line: str
) -> None:
    with pytest.raises(MethodError, match=rf"^method\.params\.{line}") as caught:
        METHODS.load(name)(**params)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "params", "depth", "line"), TOO_SHALLOW)
def test_a_layer_outside_the_model_names_the_key_and_the_range(
    name: str, params: dict[str, Any], depth: int, line: str
) -> None:
    with pytest.raises(MethodError, match=rf"^method\.params\.{line}"):
        METHODS.load(name)(**params).sites(depth)
