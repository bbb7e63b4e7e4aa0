"""Checks of speculative decoding: the settings that a decoder determines, and its draft model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.shared_vocabulary import (
    check_tokenizers,
    read_vocabulary,
    tokenizer_file,
)
from espalier.harness.engine.artifacts import require_prior
from espalier.harness.engine.layer_inputs import closes_gaps
from espalier.harness.engine.text_stack import graphs_error, obstacle
from espalier.harness.errors import Refused
from espalier.harness.kinds.checks.checkpoint_check import check_model
from espalier.harness.kinds.checks.separator_check import check_separators, without_separators
from espalier.harness.kinds.checks.signal_check import (
    check_acts,
    check_frames,
    check_signals,
    refuse_partial,
)
from espalier.harness.models.families import ADAPTERS
from espalier.harness.specs.draft_errors import in_words_of_the_draft
from espalier.harness.specs.run_spec import AnswerRequest, ModelSpec, RunSpec, Settled
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, TokenReducer


def normalised(spec: Settled, method: Decoder) -> Settled:
    """Return the spec with the settings that a decoder determines: batches of one sample, and often the ratio.

    A draft that sees every visual token has the ratio 0, one that sees none has 1, whatever ratio is set.

    Raises:
        Refused: an engine setting is for methods that drop tokens of the target, or no visual token is left.
    """
    name, engine, budget = spec.method.name, spec.engine, spec.budget
    keeps = f"method={name!r} drops none of the model's tokens"
    if engine.backend != "drop":
        raise Refused(
            f"engine.backend={engine.backend!r} hides dropped tokens, and {keeps}; valid: drop"
        )
    if leaves_gaps(method):
        # Only runs of such a draft import it.
        from espalier.harness.decoding.speculative.guidance import GuidedReducer

        closes_gaps(engine.positions, GuidedReducer(_nothing), spec.model.facts)  # raises Refused
    elif engine.positions == "renumbered":
        raise Refused(
            f"engine.positions='renumbered' closes the gaps of dropped tokens, and {keeps}; valid: original, method"
        )
    if engine.rescore:
        raise Refused(
            f"engine.rescore=true judges answers of a reduced model, and {keeps}; valid: false (engine.compare=true "
            "finds tokens that differ)"
        )
    if budget.rule != "kept":
        raise Refused(
            f"budget={budget.rule!r} counts what enters each layer, and {keeps}; valid: kept, the share that the draft "
            "does without"
        )
    if budget.ratio == 1 and not method.text_only:
        raise Refused(
            "ratio=1 leaves the draft no visual token; valid: below 1, or method=onsd, or method.params.text_only=true"
        )
    if not method.guided and method.reducer is None:
        spec = without_separators(spec)
    check_separators(spec, method)
    if method.text_only:
        budget = Budget("kept", 1)
    elif not method.guided and method.reducer is None:
        budget = Budget("kept", 0)
    return replace(spec, budget=budget, engine=replace(spec.engine, batch_size=1))


def leaves_gaps(method: Decoder) -> bool:
    """Return whether a decoder's draft model sees only some visual tokens, from its first layer on."""
    return method.guided and method.takes_draft


def _nothing() -> NoReturn:
    raise AssertionError("a check runs no draft")


def check_one_beam(name: str, generation: Mapping[str, Any]) -> None:
    """Refuse beam search: a draft is verified against one answer."""
    beams = generation.get("num_beams") or 1
    if beams > 1:
        raise Refused(
            f"generation.num_beams={beams} is not supported: method={name!r} verifies one answer at a time; valid: 1"
        )


def check_graphs(spec: AnswerRequest, method: Decoder) -> None:
    """Check that both models support `engine.graphs=true`, as far as that is known before they are loaded.

    Raises:
        Refused: one of them does not.
    """
    if spec.engine.graphs is not True:
        return
    if why := obstacle(spec.model):
        raise graphs_error(why)
    draft, reducer = spec.method.draft, method.reducer
    if draft is None:
        return
    with in_words_of_the_draft():
        if why := obstacle(draft):
            raise graphs_error(why)
    # A guided draft drops its tokens before its first layer, whatever its reducer would do.
    sites = () if reducer is None else reducer.sites(draft.facts.text.layers)
    if any(site.shortens for site in sites):
        raise graphs_error(
            f"method={spec.method.name!r} leaves the layers of its draft caches of different lengths"
        )


def check_draft(spec: RunSpec, method: Decoder, digests: Digests) -> tuple[Path, ...]:
    """Check the draft model like the target, and that both are compatible; return its calibration files.

    Raises:
        UserError: its line names `method.draft` or `method.draft_options.<key>`.

    Cost: about a second where the tokenizers are two different files.
    """
    draft, reducer, name = spec.method.draft, method.reducer, spec.method.name
    if draft is None:
        return ()
    with in_words_of_the_draft():
        refuse_partial(draft, name, "rewinds the draft's cache")
        check_model(draft, spec.offline, digests)
        if reducer is not None:
            check_signals(draft, reducer, name, TokenReducer)
            check_acts(spec.budget, reducer, name, draft.facts)
            check_frames(draft, reducer, name)
            spec.budget.check(reducer, draft.facts)
    if not method.text_only:
        _check_video(spec.model, draft)
    _check_vocabularies(spec.model, draft, digests)
    return () if reducer is None else require_prior(draft, reducer, name, digests, spec.store)


def _check_video(target: ModelSpec, draft: ModelSpec) -> None:
    if draft.adapter == target.adapter:
        return
    if ADAPTERS.load(target.adapter).takes_video and not ADAPTERS.load(draft.adapter).takes_video:
        raise Refused(
            f"method.draft={draft.name!r} takes images only, and model={target.name!r} takes videos; valid: a draft "
            "that takes videos"
        )


def _check_vocabularies(target: ModelSpec, draft: ModelSpec, digests: Digests) -> None:
    """Compare the tokenizers if both files are present; they are compared again when the models are loaded."""
    files = [tokenizer_file(target), tokenizer_file(draft)]
    if None in files:
        return
    ours, theirs = (file for file in files if file is not None)
    if digests.file(ours) == digests.file(theirs):
        return
    (target_ids, target_added), (draft_ids, draft_added) = (
        read_vocabulary(ours),
        read_vocabulary(theirs),
    )
    check_tokenizers(target_ids, draft_ids, (target.name, draft.name), target_added | draft_added)
