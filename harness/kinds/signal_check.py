"""Checks of a method on a model: the signals and sites that it needs, and the tokens that it chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from typing import get_args

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.engine.engine_guards import check_full, check_proved, decode_site
from espalier.harness.errors import Refused
from espalier.harness.models.families import ADAPTERS
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.harness.specs.run_spec import ModelSpec, Settled
from espalier.methods.base import Method, MethodError, Need, PlanError, Site, TokenReducer, Where
from espalier.methods.blame import Blame
from espalier.methods.none import NoReduction


def signals_of(method: Method, facts: ModelFacts) -> set[str]:
    """Return the names of all signals that a method reads in a model; a decoder reads them in the target.

    Raises:
        MethodError: the method does not declare tuples of sites and needs, or fails.
    """
    with Blame(method, "sites"):
        _check_items("sites", method.sites(facts.text.layers), Site)
        sites = method.read_sites(facts.tower.layers, facts.text.layers)
        _check_items("read_sites", sites, Site)
        # A decoder may read the target after its last layer.
        _check_sites(sites, facts, facts.text.layers + method.drafts)
    signals = set()
    for site in sites:
        with Blame(method, "needs", site):
            needs = method.needs(site)
            _check_items("needs", needs, Need)
        signals |= {need.signal for need in needs}
    return signals


def _check_items(call: str, items: object, kind: type[object]) -> None:
    if not isinstance(items, tuple) or not all(isinstance(item, kind) for item in items):
        raise PlanError(
            f"`{call}` returns {items!r}; valid: a tuple of espalier.methods.base.{kind.__name__}"
        )


def _check_sites(sites: Sequence[Site], facts: ModelFacts, depth: int) -> None:
    """Raise PlanError for kinds of site that do not exist, layers outside the model, and layers out of order."""
    for site in sites:
        if site.where not in get_args(Where):
            raise PlanError(
                f"`sites` returns {site}; valid for where: {', '.join(get_args(Where))}"
            )
        first, layers = (-1, facts.tower.layers) if site.where == "tower" else (0, depth)
        is_integer = isinstance(site.layer, int) and not isinstance(site.layer, bool)
        if not is_integer or not first <= site.layer < max(layers, 1):
            raise PlanError(f"`sites` returns {site}; valid for layer: {first} to {layers - 1}")
    for site, following in pairwise(sites):
        if following.where == site.where and following.layer < site.layer:
            raise PlanError(f"`sites` returns {site} before {following}; valid: first to last")
        if following == site:
            raise PlanError(f"`sites` returns {site} twice; valid: once, or stages of their own")


def check_acts(budget: Budget, method: TokenReducer, name: str, facts: ModelFacts) -> None:
    """Raise Refused for a budget that would remove nothing, because the method has no site; `none` is meant so."""
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    acts = sites or decode_site(method, facts.text.layers) or isinstance(method, NoReduction)
    if budget.acts and not acts:
        request = f"ratio={budget.ratio:g}" if budget.count is None else f"keep={budget.count}"
        raise Refused(
            f"{request}: method={name!r} removes nothing, since `sites` returns (); valid: a site, or ratio=0"
        )


def check_signals(model: ModelSpec, method: Method, name: str, base: type[object]) -> None:
    """Raise Refused unless the model has the signals of a method, and patches as visual tokens if it acts in the tower.

    Args:
        model: the model that the method reads.
        method: the built method.
        name: its name in error lines.
        base: base class of the methods that an error line offers instead.
    """
    facts = model.facts
    needed = signals_of(method, facts)
    sites = method.read_sites(facts.tower.layers, facts.text.layers)
    check_proved(facts, f"method={name!r}", [site.where for site in sites])
    if _acts_inside(method, facts) and not facts.patch_tokens:
        raise Refused(
            f"method={name!r} acts inside the vision tower, and the visual tokens of "
            f"model={model.name!r} are not its patches one to one (model.facts.patch_tokens=false)"
        )
    missing = sorted(needed - facts.signals)
    if not missing:
        _check_attended(facts, method, sites)
        return
    valid_names = [candidate for candidate in names_of(base) if _carries(candidate, facts)]
    # Names of signals differ more than by a letter or two.
    near = get_close_matches(missing[0], facts.signals, 1, cutoff=0.9)
    hint = f"did you mean {near[0]}? " if near else ""
    raise Refused(
        f"method={name!r} needs {', '.join(missing)}, which model={model.name!r} does not have; {hint}"
        f"valid: {', '.join(valid_names)}"
    )


def _check_attended(facts: ModelFacts, method: Method, sites: Sequence[Site]) -> None:
    """Raise MethodError if a method reads the attention of a layer that has linear attention."""
    if facts.text.linear is None:
        return
    # Imports torch, and transformers.
    from espalier.harness.engine.signals.table import DECLARED, PRODUCERS

    for site in sites:
        for need in method.needs(site):
            if DECLARED[need.signal].inside_tower:
                continue
            for layer in PRODUCERS.load(need.signal).attended(need, site, sites):
                check_full(facts.text, layer)


def check_frames(model: ModelSpec, method: TokenReducer, name: str) -> None:
    """Raise Refused if the method compares frames and the model takes images only."""
    # Imports the family's code only for methods that compare frames.
    if method.needs_frames() and not ADAPTERS.load(model.adapter).data.takes_video:
        raise Refused(
            f"method={name!r} compares the frames of videos, and model={model.name!r} takes images only"
        )


def _carries(name: str, facts: ModelFacts) -> bool:
    """Return whether the model has the layers and signals of a method with default hyper-parameters."""
    try:
        method = build_method(name, {})
        return signals_of(method, facts) <= facts.signals and (
            facts.patch_tokens or not _acts_inside(method, facts)
        )
    except MethodError:
        return False


def _acts_inside(method: Method, facts: ModelFacts) -> bool:
    sites = method.read_sites(facts.tower.layers, facts.text.layers)
    return any(site.in_tower for site in sites)


#: Signals of the tower, of its patches, or of positions in its grid.
OF_PATCHES = frozenset(
    (
        *("cls_attention", "cls_logits", "tower_keys", "wide_cls_attention", "wide_tower_keys"),
        *("tower_states", "block_keys", "sizes", "sequence", "rollout", "luma", "tile", "prior"),
    )
)


def check_separators(spec: Settled, method: Method) -> None:
    """Refuse separators as candidates of a method that reads signals which they lack.

    Raises:
        Refused: it reads the vision tower, or positions in the patch grid.
    """
    if spec.engine.separators == "keep" or method.takes_separators:
        return
    facts, name = spec.model.facts, spec.method.name
    sites = method.read_sites(facts.tower.layers, facts.text.layers)
    read = sorted(signals_of(method, facts) & OF_PATCHES)
    if any(site.where in ("tower", "vision") for site in sites):
        why = "acts on the vision tower, which never sees newline and separator tokens"
    elif read:
        why = f"reads {', '.join(read)}, which newline and separator tokens do not have"
    else:
        why = "goes by places in the patch grid, and newline and separator tokens are no patches"
    raise Refused(
        f"engine.separators='candidates': method={name!r} {why} (its takes_separators is false); valid: keep, or a "
        "method that reads the decoder alone, such as fastv or aircache"
    )


def without_separators(spec: Settled) -> Settled:
    """Return the spec of a method that drops nothing, which has no candidates."""
    return replace(spec, engine=replace(spec.engine, separators="keep"))
