"""Counts of samples for a row, for kinds with one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from statistics import fmean

from espalier.harness.cost.facts import ModelFacts, Work
from espalier.harness.cost.flops import SampleFlops, flops_block, sample_flops
from espalier.harness.engine.record import SampleRecord
from espalier.harness.kinds.kind import Account
from espalier.harness.kinds.rescore import acceptance
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import TokenReducer


def account_of(
    spec: AnswerRequest, reducer: TokenReducer, records: Sequence[SampleRecord]
) -> Account:
    """Return the account of prompts that a reducer shortened, each verified against the budget.

    Raises:
        BudgetMismatch: a sample kept another number of tokens than its budget requests.
    """
    facts, budget = spec.model.facts, spec.budget
    # A model that is known from its decoder on has no counts of what comes before.
    unknown = ("tower", "projector", "share_with_tower") if facts.unproved else ()
    sites = reducer.all_sites(facts.tower.layers, facts.text.layers)
    loops = {record.loop for record in records if record.loop is not None}
    verified = [budget.verify(reducer, facts, record) for record in records]
    # `kv_bytes`, which repeats `average`, is there where it is the rule.
    rules = [*asdict(verified[0]), *(["kv_bytes"] if budget.rule == "kv_bytes" else [])]
    return Account(
        tokens={**token_means(records), **position_means(records)},
        flops={**flops_block(flops_of(facts, records)), **dict.fromkeys(unknown)},
        kv_bytes=sum(record.kv_bytes for record in records) / len(records),
        extra={
            "sites": [
                {
                    "where": site.where,
                    "layer": site.layer,
                    "requested": fmean(record.requested[place] for record in records),
                    "kept": fmean(record.kept[place] for record in records),
                }
                for place, site in enumerate(sites)
            ],
            "adaptive": reducer.adaptive,  # then `kept` is the method's own, sample by sample
            "decode_attended": _mean_of(records, "attended"),  # by decoding steps, where selected
            "decode_loop": ", ".join(sorted(loops)) or None,  # null for decoders
            "spare": _mean_of(records, "spare"),  # tokens that only fill up the count
            "acceptance": acceptance(records),
            "first_token": first_token(records),
            "discriminates": None,  # of compressors, which evict after the first token
            "speculative": None,
            "diffusion": None,
            "achieved": {
                rule: fmean(getattr(tokens, rule) for tokens in verified) for rule in rules
            },
        },
    )


def token_means(records: Sequence[SampleRecord]) -> dict[str, float]:
    """Return the means of visual tokens, kept tokens, layer average and KV entries.

    Kept tokens, requested and actual, are counted after the last site; a method without sites keeps all.
    """
    return {
        "visual": fmean(record.visual for record in records),
        "requested_keep": fmean((record.requested or (record.visual,))[-1] for record in records),
        "kept_final": fmean((record.kept or (record.visual,))[-1] for record in records),
        "layer_average": fmean(fmean(record.entering) for record in records),
        "kv_entries": fmean(record.kv_entries for record in records),
    }


def first_token(records: Sequence[SampleRecord]) -> float:
    """Return the share of answers of one token, the end not counted: the prefill alone has chosen it."""
    return fmean(record.new_tokens - bool(record.ended) <= 1 for record in records)


def flops_of(facts: ModelFacts, records: Sequence[SampleRecord]) -> list[SampleFlops]:
    """Return the exact FLOPs of each sample's prefill, reduced and full; equal prefills are computed once."""
    count = cache(partial(sample_flops, facts))
    return [
        count(
            tuple(record.entering),
            record.visual,
            record.text,
            Work(*record.work),
            record.pairs or (),
            record.full_pairs or (),
        )
        for record in records
    ]


def _mean_of(records: Sequence[SampleRecord], name: str) -> float | None:
    """Return the mean of a count over the records that have it; None if none has."""
    counts = [count for record in records if (count := getattr(record, name)) is not None]
    return fmean(counts) if counts else None


def position_means(
    records: Sequence[SampleRecord], kept: Sequence[float] | None = None
) -> dict[str, float]:
    """Return mean prompt positions of images, newlines and separators included: all, kept, and the share of kept ones.

    Args:
        records: of the samples.
        kept: visual tokens after the last site of each sample; None: those of the records.
    """
    if kept is None:
        kept = [(record.kept or (record.visual,))[-1] for record in records]
    every = fmean(record.visual + record.special for record in records)
    positions_left = fmean(
        visual_left + record.special for visual_left, record in zip(kept, records, strict=True)
    )
    share = positions_left / every if every else 1.0
    return {"positions": every, "positions_kept": positions_left, "positions_share": share}
