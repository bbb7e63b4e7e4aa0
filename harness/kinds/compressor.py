"""The kind of methods that evict entries of the KV cache after the prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.budget import BudgetMismatch
from espalier.harness.engine.engine_guards import check_proved
from espalier.harness.errors import Refused
from espalier.harness.kinds.checks.separator_check import check_separators, without_separators
from espalier.harness.kinds.checks.signal_check import partial_layers
from espalier.harness.kinds.identity import answering_settings, identity_of
from espalier.harness.kinds.kind import (
    Account,
    Identity,
    OpenMethod,
    PairedSessions,
    ResolvedMethod,
)
from espalier.harness.kinds.reducer import REDUCER, WHOLE
from espalier.harness.kinds.rescore import Rescored
from espalier.harness.kinds.sample_counts import account_of, first_token
from espalier.harness.specs.run_spec import AnswerRequest, RunSpec, Settled
from espalier.methods.base import TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.engine.eviction import CacheBudget
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class Compressor:
    """Implements Kind for espalier.methods.compressor.CacheCompressor: the prompt stays whole, the cache shrinks."""

    def normalise(self, spec: Settled, method: CacheCompressor) -> Settled:
        """Refuse settings that need a shorter prompt; a method that acts nowhere gets the ratio 0."""
        if not method.sites(spec.model.facts.text.layers):
            return without_separators(replace(spec, budget=WHOLE))
        check_separators(spec, method)
        check_proved(spec.model.facts, f"method={spec.method.name!r}", ["cache"])
        text = spec.model.facts.text
        if text.window_layers == text.layers:
            raise Refused(
                f"method={spec.method.name!r} evicts from layers that hold the whole prompt, and all {text.layers} of "
                f"model={spec.model.name!r} hold a window; valid: model.scale.layers=null"
            )
        if spec.budget.rule not in ("kept", "kv_bytes"):
            raise Refused(
                f"budget={spec.budget.rule!r}: method={spec.method.name!r} evicts cache entries after a whole "
                "prefill, and can only keep a share of them; valid: kept, kv_bytes"
            )
        if spec.budget.rule == "kv_bytes":
            check_bytes(spec, method)
        if spec.engine.backend != "drop":
            raise Refused(
                f"engine.backend={spec.engine.backend!r}: method={spec.method.name!r} evicts cache entries for real; "
                "valid: drop"
            )
        if spec.budget.count is not None and method.scope != "visual":
            raise Refused(
                f"keep={spec.budget.count} counts visual entries, and method={spec.method.name!r} evicts text as well; "
                "valid: ratio=<share of all entries>, method.params.scope=visual"
            )
        if method.repeats_heads:
            check_repeating(spec)
        return spec

    def resolve(
        self, spec: RunSpec, method: CacheCompressor, digests: Digests
    ) -> ResolvedMethod[CacheCompressor]:
        """Check the run like one without a method."""
        REDUCER.resolve(_without_reduction(spec), NoReduction(), digests)
        return ResolvedMethod(method)

    @contextmanager
    def open(
        self,
        spec: AnswerRequest,
        adapter: Adapter,
        method: CacheCompressor,
        prior: Prior | None = None,
    ) -> Iterator[OpenMethod]:
        """Open a session that evicts and one that does not."""
        # transformers takes seconds to import, and checks and readers of rows do not need it.
        from espalier.harness.engine.session import Session

        del prior
        evicting = _evicting(spec, method)
        engine = spec.engine
        run = partial(Session, adapter, NoReduction(), WHOLE, seed=spec.seed, decode=engine.decode)
        with run(evicting=evicting, separators=engine.separators) as session, run() as plain:
            generator = Rescored(adapter, session) if engine.rescore else session
            yield OpenMethod(
                generator, adapter, PairedSessions(session, plain), session.collect_scores
            )

    def prompt_reducer(self, method: CacheCompressor) -> TokenReducer | None:
        """Return a reducer that drops nothing."""
        del method
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
        evicting = _evicting(spec, method)
        for record in records:
            check_held(evicting, record)
        account = account_of(_without_reduction(spec), NoReduction(), records)
        blocks = cache_blocks(evicting, records)
        if spec.budget.rule == "kv_bytes":
            # The prefill was whole; what the cache holds is the budget.
            achieved = {**account.extra["achieved"], "kv_bytes": fmean(blocks["cache"]["entries"])}
            blocks["achieved"] = achieved
        return replace(account, extra={**account.extra, **blocks})

    def identity(self, spec: AnswerRequest, method: CacheCompressor) -> Identity:
        """Return the settings of one model without a policy for positions, since no token leaves the prompt."""
        return identity_of(spec, method, answering_settings(spec.engine, acts=False))


def check_repeating(spec: Settled) -> None:
    """Refuse other readers of the cache than the engine's loop, for caches of repeated heads.

    Raises:
        Refused: the library's loop, or an attention that does not fold heads.
    """
    reason = f"method={spec.method.name!r} keeps a copy of keys and values for every query head"
    if spec.engine.decode != "loop":
        raise Refused(f"engine.decode={spec.engine.decode!r}: {reason}; valid: loop")
    if spec.model.attention != "sdpa":
        raise Refused(f"model.attention={spec.model.attention!r}: {reason}; valid: sdpa")


def check_bytes(spec: Settled, method: CacheCompressor) -> None:
    """Refuse `budget=kv_bytes` where a share of entries is not a share of the visual cache's bytes.

    Raises:
        Refused: the method counts text entries as well, or its cache has a copy for every query head of a group.
    """
    text = spec.model.facts.text
    if text.window_layers or text.linear is not None:
        raise Refused(
            f"budget='kv_bytes': {partial_layers(spec.model)}, from which nothing is evicted; valid: kept"
        )
    if method.scope != "visual":
        raise Refused(
            f"budget='kv_bytes': method={spec.method.name!r} evicts text entries as well, and the budget is of visual "
            "ones; valid: method.params.scope=visual, budget=kept"
        )
    if method.repeats_heads and text.heads != text.kv_heads:
        times = text.heads // text.kv_heads
        raise Refused(
            f"budget='kv_bytes': method={spec.method.name!r} keeps a copy of keys and values for every query head, "
            f"{times} times the bytes; valid: budget=kept with a share of 1/{times} of the entries"
        )


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
    block = {
        "ratio": evicting.ratio if evicting.count is None else _requested_ratio(evicting, records),
        "entered": entered,
        "entries": entries,
        "share": sum(entries) / sum(entered) if sum(entered) else 1.0,
        "positions_share": (sum(entries) + special_left) / every if every else 1.0,
    }
    return {"cache": block, "discriminates": first_token(records) < 1}


def _requested_ratio(evicting: CacheBudget, records: Sequence[SampleRecord]) -> float:
    """Return the share of these samples' visual entries that a count of entries evicts."""
    candidates = [list(_candidates(record).values()) for record in records]
    return 1 - sum(map(evicting.total, candidates)) / max(sum(map(sum, candidates)), 1)


def _candidates(record: SampleRecord) -> dict[int, int]:
    """Return the visual entries of each layer that may be evicted from."""
    entering = enumerate(record.entering)
    return {layer: count for layer, count in entering if layer not in (record.sliding or ())}


def _evicting(spec: AnswerRequest, method: CacheCompressor) -> CacheBudget:
    # As in `open`.
    from espalier.harness.engine.eviction import CacheBudget

    return CacheBudget(method, spec.budget.ratio, spec.budget.count)


def _without_reduction(spec: Any) -> Any:
    """Return the run with every token of the prompt kept."""
    return replace(spec, budget=WHOLE)


COMPRESSOR = Compressor()
