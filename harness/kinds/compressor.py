"""The kinds of methods that evict entries of the KV cache after the prefill, alone or after a reducer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.budget import BudgetMismatch
from espalier.harness.engine.engine_guards import check_proved
from espalier.harness.kinds.kind import (
    Account,
    Identity,
    Kind,
    OpenMethod,
    ResolvedMethod,
    answering_settings,
    identity_of,
)
from espalier.harness.kinds.reducer import COMBINED, REDUCER, WHOLE, Reducer, sessions
from espalier.harness.kinds.sample_counts import account_of, first_token
from espalier.harness.kinds.signal_check import check_separators, without_separators
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import AnswerRequest, MethodSpec, RunSpec, Settled
from espalier.methods.base import TokenReducer
from espalier.methods.composed import Combined, Composed
from espalier.methods.compressor import CacheCompressor
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.eviction import CacheBudget
    from espalier.harness.engine.priors import Prior
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class Compressor(Kind[CacheCompressor]):
    """Implements Kind for espalier.methods.compressor.CacheCompressor: the prompt stays whole, the cache shrinks."""

    def normalise(self, spec: Settled, method: CacheCompressor) -> Settled:
        """Refuse settings that need a shorter prompt; a method that acts nowhere gets the ratio 0."""
        if not method.sites(spec.model.facts.text.layers):
            return without_separators(replace(spec, budget=WHOLE))
        check_separators(spec, method)
        check_proved(spec.model.facts, f"method={spec.method.name!r}", ["cache"])
        refuse("a compressor", spec, method)
        return spec

    def resolve(
        self, spec: RunSpec, method: CacheCompressor, digests: Digests
    ) -> ResolvedMethod[CacheCompressor]:
        """Check the run like one without a method."""
        REDUCER.resolve(replace(spec, budget=WHOLE), NoReduction(), digests)
        return ResolvedMethod(method)

    def open(
        self,
        spec: AnswerRequest,
        adapter: Adapter,
        method: CacheCompressor,
        _prior: Prior | None = None,
    ) -> AbstractContextManager[OpenMethod]:
        """Open a session that evicts and one that does not."""
        # No token leaves the prompt, so no policy for positions applies.
        engine = replace(spec.engine, backend="drop", positions="original", scope="prompt")
        plain = replace(spec, budget=WHOLE, engine=engine)
        return sessions(plain, adapter, NoReduction(), evicting=_evicting(spec, method))

    def prompt_reducer(self, _method: CacheCompressor) -> TokenReducer | None:
        """Return a reducer that drops nothing."""
        return NoReduction()

    def why_no_paired_timing(self, spec: AnswerRequest, method: CacheCompressor) -> str | None:
        """Return a reason where nothing is evicted."""
        if not spec.budget.acts or not method.sites(spec.model.facts.text.layers):
            return f"method={spec.method.name} evicts nothing"
        return None

    def account(
        self, spec: AnswerRequest, method: CacheCompressor, records: Sequence[SampleRecord]
    ) -> Account:
        """Count whole prompts and the entries that stay in each cache, verified against the budget."""
        blocks = cache_blocks(_evicting(spec, method), records)
        account = account_of(replace(spec, budget=WHOLE), NoReduction(), records)
        if spec.budget.rule == "kv_bytes":
            # The prefill was whole; what the cache holds is the budget.
            achieved = {**account.extra["achieved"], "kv_bytes": fmean(blocks["cache"]["entries"])}
            blocks["achieved"] = achieved
        return replace(account, extra={**account.extra, **blocks})

    def identity(self, spec: AnswerRequest, method: CacheCompressor) -> Identity:
        """Return the settings of one model without a policy for positions, since no token leaves the prompt."""
        return identity_of(spec, method, answering_settings(spec.engine, acts=False))


class Composition(Kind[Composed]):
    """Implements Kind for espalier.methods.composed.Composed. The budget of the run is that of the reducer."""

    def normalise(self, spec: Settled, method: Composed) -> Settled:
        """Apply the checks of both; the ratio is that of the reducer."""
        refuse("a reducer and a compressor", spec, method)
        # Error lines name the compressor; a count of tokens is the reducer's.
        named, budget = spec.method.compressor, replace(spec.budget, count=None)
        part = spec.method if named is None else MethodSpec(named.name)
        evicting = COMPRESSOR.normalise(
            replace(spec, method=part, budget=budget), method.compressor
        )
        reducing = _reducing(method).normalise(spec, method.reducer)
        # A reducer that drops nothing has no candidates, but the compressor may have some.
        return (
            reducing
            if evicting.engine.separators == "keep"
            else replace(reducing, engine=spec.engine)
        )

    def resolve(
        self, spec: RunSpec, method: Composed, digests: Digests
    ) -> ResolvedMethod[Composed]:
        """Check the reducer and fill in its calibrations; a compressor reads no file."""
        reducer = _reducing(method).resolve(spec, method.reducer, digests)
        return ResolvedMethod(replace(method, reducer=reducer.method), reducer.artifacts)

    def open(
        self, spec: AnswerRequest, adapter: Adapter, method: Composed, prior: Prior | None = None
    ) -> AbstractContextManager[OpenMethod]:
        """Open a session that reduces and then evicts, and one that does neither."""
        return sessions(spec, adapter, method.reducer, prior, _evicting(spec, method))

    def prompt_reducer(self, method: Composed) -> TokenReducer | None:
        """Return its reducer."""
        return method.reducer

    def why_no_paired_timing(self, spec: AnswerRequest, method: Composed) -> str | None:
        """Return a reason if neither of them saves anything."""
        reducer = REDUCER.why_no_paired_timing(spec, method.reducer)
        return reducer and COMPRESSOR.why_no_paired_timing(spec, method.compressor)

    def account(
        self, spec: AnswerRequest, method: Composed, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens that the reducer keeps, and the entries that the compressor keeps."""
        blocks = cache_blocks(_evicting(spec, method), records)
        account = _reducing(method).account(spec, method.reducer, records)
        return replace(account, extra={**account.extra, **blocks})

    def identity(self, spec: AnswerRequest, method: Composed) -> Identity:
        """Return the parameters of both, and the settings of the reducer."""
        return identity_of(spec, method, REDUCER.identity(spec, method.reducer).engine)


def _reducing(method: Composed) -> Reducer:
    """Return the kind of its reducer, which may be a combination of two."""
    return COMBINED if isinstance(method.reducer, Combined) else REDUCER


def check_held(evicting: CacheBudget, record: SampleRecord) -> None:
    """Raise BudgetMismatch if a sample's cache holds another number of visual entries than its budget requests.

    A method that may evict text entries too chooses how many visual entries stay: then the only check is that no layer
    holds more entries than entered it.
    """
    entries = record.entering if record.held is None else record.held
    entered = sum(record.entering)
    if evicting.compressor.scope == "visual":
        acts = evicting.acts and record.held is not None and entered > 0
        candidates = _candidates(record)
        windows = sum(entries) - sum(entries[layer] for layer in candidates)
        requested = evicting.total(list(candidates.values())) if acts else entered - windows
        slack = evicting.compressor.slack(len(candidates)) if acts else 0
        right = requested <= sum(entries) - windows <= requested + slack
    else:
        right = all(
            count <= entered_count
            for count, entered_count in zip(entries, record.entering, strict=True)
        )
    if not right or record.kv_entries != sum(entries):
        kept = evicting.count
        amount = f"ratio {evicting.ratio}" if kept is None else f"{kept} entries a layer"
        raise BudgetMismatch(
            f"sample {record.sample}: {amount}: the cache holds {record.kv_entries} visual entries "
            f"({', '.join(map(str, entries))} by layer), {entered} entered its layers"
        )


def cache_blocks(evicting: CacheBudget, records: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return the block `cache` of a row, and whether its answers can discriminate between ways to evict.

    `entered` and `entries` are the visual entries of each layer before and after eviction, `share` is their ratio,
    `positions_share` the ratio where entries of newlines and separators count as well.
    The first token is chosen with the whole cache, so an answer of one token depends on eviction only in its end.
    """
    for record in records:
        check_held(evicting, record)
    entered = [fmean(layer) for layer in zip(*(record.entering for record in records), strict=True)]
    entries_by_record = (
        record.entering if record.held is None else record.held for record in records
    )
    entries = [fmean(layer) for layer in zip(*entries_by_record, strict=True)]
    depth = len(entered)
    special = depth * fmean(record.special for record in records)
    special_left = fmean(
        depth * record.special if record.held_special is None else sum(record.held_special)
        for record in records
    )
    every = sum(entered) + special
    ratio = evicting.ratio
    if evicting.count is not None:
        candidates = [list(_candidates(record).values()) for record in records]
        ratio = 1 - sum(map(evicting.total, candidates)) / max(sum(map(sum, candidates)), 1)
    block = {
        "ratio": ratio,
        "entered": entered,
        "entries": entries,
        "share": sum(entries) / sum(entered) if sum(entered) else 1.0,
        "positions_share": (sum(entries) + special_left) / every if every else 1.0,
    }
    return {"cache": block, "discriminates": first_token(records) < 1}


def _candidates(record: SampleRecord) -> dict[int, int]:
    """Return the visual entries of each layer that may be evicted from."""
    entering = enumerate(record.entering)
    return {layer: count for layer, count in entering if layer not in (record.sliding or ())}


def _evicting(spec: AnswerRequest, method: CacheCompressor | Composed) -> CacheBudget:
    """Return the budget of the cache; a compressor that acts nowhere after a reducer evicts nothing."""
    # transformers takes seconds to import, and checks and readers of rows do not need it.
    from espalier.harness.engine.eviction import CacheBudget

    if isinstance(method, CacheCompressor):
        return CacheBudget(method, spec.budget.ratio, spec.budget.count)
    acts = method.compressor.sites(spec.model.facts.text.layers)
    return CacheBudget(method.compressor, method.cache_ratio if acts else 0.0)


COMPRESSOR = Compressor()
COMPOSITION = Composition()
