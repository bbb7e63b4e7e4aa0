"""Check of `engine.separators`: whether newline and separator tokens of images may be candidates of a method."""

from __future__ import annotations

from dataclasses import replace

from espalier.harness.errors import Refused
from espalier.harness.kinds.signal_check import signals_of
from espalier.harness.specs.run_spec import Settled
from espalier.methods.base import Method

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
