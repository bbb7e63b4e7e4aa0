"""Settings that the engine cannot honour are refused in one line; nothing here imports transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch

from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.errors import Refused, UserError
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import ModelSpec, PositionPolicy
from espalier.methods.base import Need, PlanError, Positions, Site, TokenReducer
from espalier.methods.blame import Blame
from espalier.methods.views import MethodError, Where


def check_text_config(config: Any, where: str) -> None:
    """Refuse unlisted stacks with sliding-window or linear layers: their caches are not plain lists of keys.

    `where` is the start of the error line.

    Raises:
        UserError: names the first such layer.
    """
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if not kinds and window is not None and window < config.max_position_embeddings:
        kinds = ["sliding_attention"]  # of all layers, as in Mistral 7B v0.1
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            raise UserError(
                f"{where}: decoder layer {layer} is {kind!r}; such layers need a description of what they see or hold, "
                "as families with a file in harness/models have it; valid: full_attention"
            )


def check_full(text: StackFacts, layer: int) -> None:
    """Refuse to read the attention of a layer that has linear attention.

    Raises:
        MethodError: names the nearest layers that have scores.
    """
    if not text.is_linear(layer):
        return
    nearest = sorted(sorted(text.full_layers, key=lambda full: abs(full - layer))[:2])
    raise MethodError(
        f"decoder layer {layer} has linear attention, which gives tokens no scores, queries or keys; valid: a method "
        f"that reads other layers, the nearest {', '.join(map(str, nearest))} (one that reads the layer before its "
        f"site acts before {', '.join(str(full + 1) for full in nearest)})"
    )


def check_proved(facts: ModelFacts, who: str, places: Iterable[str]) -> None:
    """Refuse a method at kinds of site that a class without a file here was not proved for.

    Args:
        facts: of the model.
        who: the method, at the start of the error line.
        places: kinds of site where it acts.

    Raises:
        Refused: names the first such kind, why it was not proved, and the others.
    """
    for where in places:
        if where in facts.unproved:
            proved = [kind for kind in get_args(Where) if kind not in facts.unproved]
            raise Refused(
                f"{who} acts at {where}, and the model's class, which has no file here, was not proved there: "
                f"{facts.unproved[where]}; valid: a method that acts at {', '.join(proved)}"
            )


def require_one_beam(beams: int) -> None:
    """Refuse beam search: beams swap rows between steps, and the attended entries of a row would not follow.

    Raises:
        UserError: there are several beams.
    """
    if beams > 1:
        raise UserError(
            f"generation.num_beams={beams} is not supported: this method chooses again at each step what is attended "
            "to, and beams swap rows between steps; valid: 1"
        )


#: Signals that a method may read at a decoding step.
STEP_NEEDS = frozenset({Need("last_attention")})


def decode_site(method: TokenReducer, depth: int) -> Site | None:
    """Return a method's decode site in a decoder of `depth` layers.

    Raises:
        MethodError: it needs signals that a decoding step does not have.
    """
    site = method.decode_site(depth)
    for need in () if site is None else method.needs(site):
        if need not in STEP_NEEDS:
            raise MethodError(
                f"signal {need.key!r} is not available while tokens are generated; valid: last_attention"
            )
    return site


def closes_gaps(policy: PositionPolicy, method: TokenReducer, facts: ModelFacts) -> bool:
    """Return whether a PositionPolicy renumbers the remaining tokens after every site.

    Released codes that close gaps on other models keep time, height and width of each token, so `method` also does on a
    model with several axes.

    Raises:
        UserError: positions have several axes, where gaps cannot be closed.
    """
    if facts.rotary_axes > 1:
        if policy == "renumbered":
            raise UserError(
                f"engine.positions='renumbered' needs positions on one axis, this model has {facts.rotary_axes}; "
                "valid: original, method"
            )
        return False
    depth = facts.text.layers
    if not method.all_sites(facts.tower.layers, depth):
        return False
    if policy != "method":
        return policy == "renumbered"
    with Blame(method, "positions"):
        wanted = method.positions(depth)
        if wanted not in get_args(Positions):
            raise PlanError(
                f"`positions` returns {wanted!r}; valid: {', '.join(get_args(Positions))}"
            )
    return wanted == "renumbered"


def check_recordable(model: ModelSpec) -> None:
    """Refuse `engine.graphs=true` where settings of a model keep its steps from being recorded."""
    settings = {"engine": {"graphs": True}, "model": model}
    refuse("graphs", settings, n_cards=torch.cuda.device_count())
