"""Methods that evict entries of the key-value cache after the prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.budget import BudgetMismatch
from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.errors import Refused
from espalier.harness.kinds.chat_answerer import Joined
from espalier.harness.kinds.checks.separator_check import check_separators, without_separators
from espalier.harness.kinds.identity import answering_settings, identity_of
from espalier.harness.kinds.kind import (
    Account,
    Identity,
    OpenMethod,
    PairedSessions,
    ResolvedMethod,
)
from espalier.harness.kinds.reducer import REDUCER, WHOLE
from espalier.harness.kinds.sample_counts import account_of, first_token
from espalier.harness.specs.run_spec import Asked, RunSpec, Settled
from espalier.methods.base import TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.engine.record import Record
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class Compressor:
    """Implements Kind for espalier.methods.compressor.CacheCompressor: the prompt stays whole, the cache does not."""

    def normalise(self, spec: Settled, method: CacheCompressor) -> Settled:
        """Refuse settings of prompts that get shorter; what acts nowhere has the ratio 0."""
        if not method.sites(spec.model.facts.text.layers):
            return without_separators(replace(spec, budget=WHOLE))
        check_separators(spec, method)
        if spec.budget.rule != "kept":
            raise Refused(
                f"budget={spec.budget.rule!r}: method={spec.method.name!r} evicts cache entries behind a whole "
                "prefill, of which only a share can be kept; valid: kept"
            )
        if spec.engine.backend != "drop":
            raise Refused(
                f"engine.backend={spec.engine.backend!r}: method={spec.method.name!r} evicts cache entries for real; "
                "valid: drop"
            )
        if method.repeats_heads:
            check_repeating(spec)
        return spec

    def resolve(
        self, spec: RunSpec, method: CacheCompressor, digests: Digests
    ) -> ResolvedMethod[CacheCompressor]:
        """Check the run as one of the whole model."""
        REDUCER.resolve(_whole(spec), NoReduction(), digests)
        return ResolvedMethod(method)

    @contextmanager
    def open(
        self, asked: Asked, adapter: Adapter, method: CacheCompressor, prior: Prior | None = None
    ) -> Iterator[OpenMethod]:
        """Open a session that evicts and one that does not."""
        # transformers takes seconds to import, and whoever only checks or reads rows need not pay for it.
        from espalier.harness.engine.session import Session

        del prior
        evicting = CacheBudget(method, asked.budget.ratio)
        engine = asked.engine
        run = partial(Session, adapter, NoReduction(), WHOLE, seed=asked.seed, decode=engine.decode)
        with run(evicting=evicting, separators=engine.separators) as session, run() as plain:
            yield OpenMethod(
                Joined.of(adapter, session, engine.rescore), PairedSessions(session, plain)
            )

    def prompt_reducer(self, method: CacheCompressor) -> TokenReducer | None:
        """Return a reducer that drops nothing."""
        del method
        return NoReduction()

    def why_no_paired_timing(self, asked: Asked, method: CacheCompressor) -> str | None:
        """Time nothing where nothing is evicted."""
        if asked.budget.ratio == 0 or not method.sites(asked.model.facts.text.layers):
            return f"method={asked.method.name} evicts nothing"
        return None

    def account(self, asked: Asked, method: CacheCompressor, records: Sequence[Record]) -> Account:
        """Count whole prompts, and what was left of each cache, verified against the budget."""
        evicting = CacheBudget(method, asked.budget.ratio)
        for record in records:
            check_held(evicting, record)
        found = account_of(_whole(asked), NoReduction(), records)
        return replace(found, extra={**found.extra, **cache_blocks(evicting, records)})

    def identity(self, asked: Asked, method: CacheCompressor) -> Identity:
        """Name the settings of answers of one model; positions stay, for no token leaves the prompt."""
        return identity_of(asked, method, answering_settings(asked.engine, acts=False))


def check_repeating(spec: Settled) -> None:
    """Refuse whatever reads caches in another way than the engine's loop, for caches of repeated heads.

    Raises:
        Refused: the loop is the library's, or attention does not fold heads.
    """
    said = f"method={spec.method.name!r} keeps a copy of keys and values for every query head"
    if spec.engine.decode != "loop":
        raise Refused(f"engine.decode={spec.engine.decode!r}: {said}; valid: loop")
    if spec.model.attention != "sdpa":
        raise Refused(f"model.attention={spec.model.attention!r}: {said}; valid: sdpa")


def check_held(evicting: CacheBudget, record: Record) -> None:
    """Raise BudgetMismatch if a sample's cache holds another number of visual entries than its budget asks for.

    Where words may go too, how many of the entries left are visual is the method's choice: then only that no layer
    holds more than entered it is checked.
    """
    held = record.entering if record.held is None else record.held
    entered = sum(record.entering)
    if evicting.compressor.scope == "visual":
        acts = evicting.ratio > 0 and record.held is not None and entered > 0
        asked = evicting.total(record.entering) if acts else entered
        slack = evicting.compressor.slack(len(record.entering)) if acts else 0
        right = asked <= sum(held) <= asked + slack
    else:
        right = all(one <= other for one, other in zip(held, record.entering, strict=True))
    if not right or record.kv_entries != sum(held):
        raise BudgetMismatch(
            f"sample {record.sample}: ratio {evicting.ratio}: the cache holds {record.kv_entries} visual entries "
            f"({', '.join(map(str, held))} by layer), {entered} entered its layers"
        )


def cache_blocks(evicting: CacheBudget, records: Sequence[Record]) -> dict[str, Any]:
    """Return what a row says of its caches, and whether its answers can tell one way of evicting from another.

    `entered` and `entries` are the visual entries of each layer before and after, `share` what is left of all of them,
    `positions_share` what is left where entries of newlines and separators count as well.
    An answer of one token was chosen behind the whole cache; what is left decides nothing but that it ends there.
    """
    entered = [fmean(layer) for layer in zip(*(one.entering for one in records), strict=True)]
    held = (one.entering if one.held is None else one.held for one in records)
    entries = [fmean(layer) for layer in zip(*held, strict=True)]
    depth = len(entered)
    special = depth * fmean(one.special for one in records)
    beside = fmean(
        depth * one.special if one.held_special is None else sum(one.held_special)
        for one in records
    )
    whole = sum(entered) + special
    block = {
        "ratio": evicting.ratio,
        "entered": entered,
        "entries": entries,
        "share": sum(entries) / sum(entered) if sum(entered) else 1.0,
        "positions_share": (sum(entries) + beside) / whole if whole else 1.0,
    }
    return {"cache": block, "discriminates": first_token(records) < 1}


def _whole(asked: Any) -> Any:
    """Return a run in which every token of the prompt stays."""
    return replace(asked, budget=WHOLE)


COMPRESSOR = Compressor()
