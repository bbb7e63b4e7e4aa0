"""Check of `engine.scope`: a choice in each picture by itself is one before the decoder."""

from __future__ import annotations

from espalier.harness.errors import Refused
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method, TokenReducer


def check_scope(spec: RunSpec, method: Method) -> None:
    """Refuse the scope of one picture for methods that see the whole prompt.

    Raises:
        Refused: the method acts in the decoder, the tower, the cache or the generation loop.
    """
    if spec.engine.scope == "prompt":
        return
    facts, name = spec.model.facts, spec.method.title
    if isinstance(method, TokenReducer) and method.in_one_prefill and facts.diffusion is None:
        places = {site.where for site in method.all_sites(facts.tower.layers, facts.text.layers)}
        if places <= {"vision", "prefix"} and method.decode_site(facts.text.layers) is None:
            return
    raise Refused(
        f"engine.scope='item': method={name!r} does not act just before the decoder; valid: prompt"
    )
