"""The kind of speculative decoders: a draft proposes tokens, the target verifies them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NoReturn

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.shared_vocabulary import (
    common_ids,
    tokenizer_file,
)
from espalier.harness.engine.engine_guards import check_recordable, closes_gaps
from espalier.harness.engine.priors import require_prior
from espalier.harness.errors import Refused
from espalier.harness.kinds.checkpoint_check import check_model
from espalier.harness.kinds.kind import (
    Account,
    Identity,
    Kind,
    OpenMethod,
    ResolvedMethod,
    identity_of,
    separators_of,
)
from espalier.harness.kinds.sample_counts import account_of
from espalier.harness.kinds.signal_check import (
    check_acts,
    check_frames,
    check_separators,
    check_signals,
    without_separators,
)
from espalier.harness.models.families import ADAPTERS
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import (
    AnswerRequest,
    RunSpec,
    Settled,
    in_words_of_the_draft,
)
from espalier.methods.base import Decoder, PlanError, TokenReducer
from espalier.methods.blame import Blame
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.priors import Prior
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class SpeculativeDecoder(Kind[Decoder]):
    """Implements Kind for espalier.methods.base.Decoder. The prompt of the target stays whole."""

    untimed = "decoders are timed by engine.compare: extra.speculative"

    def normalise(self, spec: Settled, method: Decoder) -> Settled:
        """Take batches of one sample, and the ratio that follows from what the draft sees."""
        refuse(
            "layers that hold a part of the prompt",
            spec,
            action="verifies several tokens at a step",
        )
        check_signals(spec.model, method, spec.method.name, Decoder)
        gaps, sees_all = leaves_gaps(method), not method.guided and method.reducer is None
        refuse("a decoder", spec, method, gaps=gaps)
        if gaps:
            # Only runs of such a draft import it.
            from espalier.harness.decoding.speculative.guidance import GuidedReducer

            closes_gaps(spec.engine.positions, GuidedReducer(_nothing), spec.model.facts)
        if sees_all:
            spec = without_separators(spec)
        check_separators(spec, method)
        # A draft that sees every visual token has the ratio 0, one that sees none has 1, whatever ratio is set.
        if method.text_only or sees_all:
            spec = replace(spec, budget=Budget("kept", int(method.text_only)))
        spec = replace(spec, engine=replace(spec.engine, batch_size=1))
        check_graphs(spec, method)
        return spec

    def resolve(self, spec: RunSpec, method: Decoder, digests: Digests) -> ResolvedMethod[Decoder]:
        """Check the draft like the target, and that the two are compatible."""
        refuse("answers of a decoder", spec)
        with Blame(method, "window"):
            is_count = type(method.window) is int and method.window >= 1
            if not is_count and method.window not in ("auto", "best"):
                raise PlanError(
                    f"`window` is {method.window!r}; valid: a number of 1 or more, 'auto' or 'best'"
                )
        return ResolvedMethod(method, check_draft(spec, method, digests))

    @contextmanager
    def open(
        self, spec: AnswerRequest, adapter: Adapter, method: Decoder, _prior: Prior | None = None
    ) -> Iterator[OpenMethod]:
        """Start the draft. With `engine.compare` each answer is also decoded plainly, so there are no paired sessions.

        No decoder reads a prior in the target, and the prior of the draft is loaded with the draft.
        """
        # transformers takes seconds to import, and checks and readers of rows do not need it.
        from espalier.harness.decoding.speculative.speculation import Speculation, with_chats

        with Speculation(spec, adapter, method) as speculation:
            yield OpenMethod(speculation, adapter, prepare=with_chats)

    def account(
        self, spec: AnswerRequest, method: Decoder, records: Sequence[SampleRecord]
    ) -> Account:
        """Count whole prompts, and summarise the decoding of both models."""
        # Imports scipy, half a second, and only finished runs have an account.
        from espalier.harness.decoding.speculative.speculative_summary import speculative_block

        account = account_of(spec, NoReduction(), records)
        decodings = [record.decoding for record in records if record.decoding is not None]
        block = speculative_block(decodings, method.overlap)
        positions, every = fmean(map(_draft_positions, records)), account.tokens["positions"]
        block["draft_positions"] = positions
        block["draft_positions_share"] = positions / every if every else 0.0
        return replace(account, extra={**account.extra, "speculative": block})

    def identity(self, spec: AnswerRequest, method: Decoder) -> Identity:
        """Return the settings of target and draft."""
        engine, transport = spec.engine, None
        if method.takes_draft:
            # Sides that never work at once alternate in one process under `auto` too.
            alternate = engine.transport == "sequential" and not method.overlap
            transport = "auto" if alternate else engine.transport
        concerning = {
            "positions": engine.positions if leaves_gaps(method) else None,
            "separators": separators_of(engine),
            "transport": transport,
            "compare": engine.compare,
            "graphs": engine.graphs,
        }
        return identity_of(spec, method, concerning, spec.method.draft)


def _draft_positions(record: SampleRecord) -> float:
    """Return the positions of images in the draft's prompt; newlines and separators count if any visual token stays."""
    positions = 0.0 if record.decoding is None else float(record.decoding["draft_visual"])
    return positions + record.special if positions else 0.0


def leaves_gaps(method: Decoder) -> bool:
    """Return whether a decoder's draft model sees only some visual tokens, from its first layer on."""
    return method.guided and method.takes_draft


def _nothing() -> NoReturn:
    raise AssertionError("a check runs no draft")


def check_graphs(spec: AnswerRequest, method: Decoder) -> None:
    """Check that both models support `engine.graphs=true`, as far as that is known before they are loaded.

    Raises:
        Refused: one of them does not.
    """
    if spec.engine.graphs is not True:
        return
    check_recordable(spec.model)
    draft, reducer = spec.method.draft, method.reducer
    if draft is None:
        return
    with in_words_of_the_draft():
        check_recordable(draft)
    # A guided draft drops its tokens before its first layer, whatever its reducer would do.
    sites = () if reducer is None else reducer.sites(draft.facts.text.layers)
    refuse("graphs of a draft", spec, method, ragged=any(site.shortens for site in sites))


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
        rewound = {"model": draft, "method": {"name": name}}
        refuse("layers that hold a part of the prompt", rewound, action="rewinds the draft's cache")
        check_model(draft, spec.offline, digests)
        if reducer is not None:
            check_signals(draft, reducer, name, TokenReducer)
            check_acts(spec.budget, reducer, name, draft.facts)
            check_frames(draft, reducer, name)
            spec.budget.check(reducer, draft.facts)
    other_family = not method.text_only and draft.adapter != spec.model.adapter
    if (
        other_family
        and ADAPTERS.load(spec.model.adapter).data.takes_video
        and not ADAPTERS.load(draft.adapter).data.takes_video
    ):
        raise Refused(
            f"method.draft={draft.name!r} takes images only, and model={spec.model.name!r} takes videos; valid: a "
            "draft that takes videos"
        )
    # Without both files here, the tokenizers are compared when the models are loaded.
    ours, theirs = tokenizer_file(spec.model), tokenizer_file(draft)
    if ours is not None and theirs is not None and digests.file(ours) != digests.file(theirs):
        common_ids(spec.model, draft)
    return () if reducer is None else require_prior(draft, reducer, name, digests, spec.store)


DECODER = SpeculativeDecoder()
