"""The kinds of reducers: methods that drop or merge visual tokens in one prefill, by the budget or below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.budget import Budget, BudgetMismatch, shortened_layer
from espalier.harness.engine.artifacts import with_scheme
from espalier.harness.engine.engine_guards import closes_gaps, require_one_beam
from espalier.harness.errors import Refused
from espalier.harness.kinds.kind import (
    Account,
    Identity,
    Kind,
    OpenMethod,
    PairedSessions,
    ResolvedMethod,
    answering_settings,
    identity_of,
)
from espalier.harness.kinds.rescore import Rescored
from espalier.harness.kinds.sample_counts import account_of
from espalier.harness.kinds.signal_check import (
    check_acts,
    check_frames,
    check_separators,
    check_signals,
    signals_of,
    without_separators,
)
from espalier.harness.settings import PLUS
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import AnswerRequest, RunSpec, Settled
from espalier.methods.base import MethodError, TokenReducer
from espalier.methods.composed import Combined, part_of
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.cost.facts import ModelFacts
    from espalier.harness.engine.eviction import CacheBudget
    from espalier.harness.engine.priors import Prior
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests

#: The budget of a method that acts nowhere: every token stays.
WHOLE = Budget(rule="kept", ratio=0.0)


@contextmanager
def sessions(
    spec: AnswerRequest,
    adapter: Adapter,
    reducer: TokenReducer,
    prior: Prior | None = None,
    evicting: CacheBudget | None = None,
) -> Iterator[OpenMethod]:
    """Open a session with a reducer and one without; with `engine.rescore` the full model scores the answers.

    Args:
        spec: the run.
        adapter: the model.
        reducer: the method that drops tokens.
        prior: its calibrated prior.
        evicting: what leaves the cache after the prefill.
    """
    # transformers takes seconds to import, and checks and readers of rows do not need it.
    from espalier.harness.engine.session import Session

    engine = spec.engine
    session = Session(
        adapter,
        reducer,
        spec.budget,
        seed=spec.seed,
        backend=engine.backend,
        positions=engine.positions,
        prior=prior,
        evicting=evicting,
        decode=engine.decode,
        separators=engine.separators,
        scope=engine.scope,
    )
    plainly = Session(adapter, NoReduction(), WHOLE, seed=spec.seed, decode=engine.decode)
    with session, plainly as plain:
        generator = Rescored(adapter, session) if engine.rescore else session
        yield OpenMethod(generator, adapter, PairedSessions(session, plain), session.collect_scores)


class Reducer(Kind[TokenReducer]):
    """Implements Kind for espalier.methods.base.TokenReducer."""

    def normalise(self, spec: Settled, method: TokenReducer) -> Settled:
        """Give a method that acts nowhere the ratio 0: all its cells in a sweep are one run."""
        facts = spec.model.facts
        check_signals(spec.model, method, spec.method.name, TokenReducer)
        if method.decode_site(facts.text.layers) is not None:
            refuse(
                "layers that hold a part of the prompt", spec, action="chooses entries at each step"
            )
        refuse("layers of linear attention", spec, method)
        sites = method.all_sites(facts.tower.layers, facts.text.layers)
        for site in sites:
            shortened_layer(site)  # raises Refused
        closes_gaps(spec.engine.positions, method, facts)  # raises Refused
        if not method.read_sites(facts.tower.layers, facts.text.layers):
            spec = without_separators(spec)
        check_separators(spec, method)
        check_acts(spec.budget, method, spec.method.name, facts)
        if not sites:
            return replace(spec, budget=WHOLE, engine=replace(spec.engine, scope="prompt"))
        return spec

    def resolve(
        self, spec: RunSpec, method: TokenReducer, digests: Digests
    ) -> ResolvedMethod[TokenReducer]:
        """Fill in a fitted schedule; check beams, the ratio and the media of the model."""
        model, name = spec.model, spec.method.name
        if method.decode_site(model.facts.text.layers) is not None:
            require_one_beam(spec.generation.get("num_beams") or 1)
        method = with_scheme(model, method, name, digests, spec.store)
        spec.budget.check(method, model.facts)
        check_frames(model, method, name)
        return ResolvedMethod(method)

    def open(
        self,
        spec: AnswerRequest,
        adapter: Adapter,
        method: TokenReducer,
        prior: Prior | None = None,
    ) -> AbstractContextManager[OpenMethod]:
        """Open a session with the method and one without."""
        return sessions(spec, adapter, method, prior)

    def prompt_reducer(self, method: TokenReducer) -> TokenReducer | None:
        """Return the method."""
        return method

    def why_no_paired_timing(self, spec: AnswerRequest, method: TokenReducer) -> str | None:
        """Return a reason where nothing is saved."""
        facts = spec.model.facts
        if self.untimed is not None:
            return self.untimed
        if not method.read_sites(facts.tower.layers, facts.text.layers):
            return f"method={spec.method.name} reduces nothing"
        return "engine.backend=emulate saves nothing" if spec.engine.backend == "emulate" else None

    def account(
        self, spec: AnswerRequest, method: TokenReducer, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens that the method keeps of each prompt."""
        return account_of(spec, method, records)

    def identity(self, spec: AnswerRequest, method: TokenReducer) -> Identity:
        """Return the settings of one model."""
        facts = spec.model.facts
        acts = bool(method.all_sites(facts.tower.layers, facts.text.layers))
        return identity_of(spec, method, answering_settings(spec.engine, acts))


class Capped(Reducer):
    """Implements Kind for espalier.methods.capped.CappedReducer."""

    def account(
        self, spec: AnswerRequest, method: TokenReducer, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens that the method keeps, at most the budget's count of each sample."""
        for record in records:
            for kept, allowed in zip(record.kept, record.requested, strict=True):
                if kept > allowed:
                    raise BudgetMismatch(
                        f"sample {record.sample}: kept {kept} tokens, at most {allowed} are allowed"
                    )
        return super().account(spec, method, records)


class CombinedReducer(Reducer):
    """Implements Kind for espalier.methods.composed.Combined: two reducers, the budget is that of both."""

    def normalise(self, spec: Settled, method: TokenReducer) -> Settled:
        """Refuse two methods that cannot act one after the other on this model."""
        assert isinstance(method, Combined)  # by the table of kinds
        reason = _clash(method, spec.model.facts)
        if reason is not None:
            valid = _valid(method, _names(spec, method), spec.model.facts) or "one method"
            raise Refused(f"method={spec.method.name!r}: {reason}; valid: {valid}")
        return super().normalise(spec, method)

    def resolve(
        self, spec: RunSpec, method: TokenReducer, digests: Digests
    ) -> ResolvedMethod[TokenReducer]:
        """Fill in the calibrations of both."""
        assert isinstance(method, Combined)  # by the table of kinds
        first, second = (
            with_scheme(spec.model, part, name, digests, spec.store)
            for part, name in zip(method.parts, _names(spec, method), strict=True)
        )
        return super().resolve(spec, replace(method, first=first, second=second), digests)

    def account(
        self, spec: AnswerRequest, method: TokenReducer, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens that both keep, and the share that each removes of what it gets."""
        account = super().account(spec, method, records)
        facts = spec.model.facts
        sites = method.all_sites(facts.tower.layers, facts.text.layers)
        requested, kept = zip(*((record.requested, record.kept) for record in records), strict=True)
        parts = []
        for number, name in enumerate(_names(spec, method)):
            places = [place for place, site in enumerate(sites) if part_of(site) == number]
            ratio, achieved = (_removed(places, counts, records) for counts in (requested, kept))
            parts.append({"method": name, "ratio": ratio, "achieved": achieved})
        return replace(account, extra={**account.extra, "parts": parts})


def _names(spec: AnswerRequest, method: TokenReducer) -> Sequence[str]:
    """Return the names of two methods: those of the run, or of the classes of objects that it was given."""
    names = spec.method.name.split(PLUS)
    return names if len(names) > 1 else [type(part).__name__ for part in method.parts]


def _removed(
    places: Sequence[int], counts: Sequence[Sequence[int]], records: Sequence[SampleRecord]
) -> float:
    """Return the share of the tokens before the first of some sites that the counts lack after the last of them."""
    if not places:
        return 0.0
    pairs = zip(records, counts, strict=True)
    before = sum((record.visual, *kept)[places[0]] for record, kept in pairs)
    return 1 - sum(kept[places[-1]] for kept in counts) / before if before else 0.0


def _clash(method: Combined, facts: ModelFacts) -> str | None:
    """Return why two methods cannot act one after the other on a model; None: they can."""
    blocks, depth = facts.tower.layers, facts.text.layers
    reason = method.clash(blocks, depth)
    if reason is not None or not method.first.tower_sites(blocks):
        return reason
    # Only methods in the tower need it.
    from espalier.harness.engine.signals.table import DECLARED

    read = sorted(name for name in signals_of(method.second, facts) if DECLARED[name].units)
    names = [type(part).__name__ for part in method.parts]
    text = f"{names[1]} reads {', '.join(read)} of every patch, and {names[0]} drops patches before"
    return text if read else None


def _valid(method: Combined, names: Sequence[str], facts: ModelFacts) -> str:
    """Return the other order of two methods, and the methods that can act after the first one."""
    swapped = Combined(method.second, method.first)
    followers = [name for name in names_of(TokenReducer) if _follows(method.first, name, facts)]
    return ", ".join(
        [
            *([PLUS.join(reversed(names))] if _clash(swapped, facts) is None else []),
            *(f"{names[0]}{PLUS}{name}" for name in followers),
        ]
    )


def _follows(first: TokenReducer, name: str, facts: ModelFacts) -> bool:
    """Return whether a method with default hyper-parameters can act after the first one on a model."""
    try:
        second: Any = build_method(name, {})
        pair = Combined(first, second)
        return _clash(pair, facts) is None and signals_of(pair.second, facts) <= facts.signals
    except MethodError:
        return False


REDUCER = Reducer()
CAPPED = Capped()
COMBINED = CombinedReducer()
