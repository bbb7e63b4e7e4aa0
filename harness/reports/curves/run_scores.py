"""Scores, costs and identity of one stored run, as curves need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import Key
from espalier.harness.reports.curves.stored_rows import (
    StoredResult,
)
from espalier.harness.specs.comparable import name as name_of
from espalier.harness.specs.comparable import policy
from espalier.harness.store.unparsed_mark import is_marked


@dataclass(frozen=True)
class RunScores:
    """The per-sample scores of one run's headline metric, and what its point needs.

    Attributes:
        name: of its curve: the method, its non-default parameters, and the engine's `policy` if it differs.
        layer: decoder layer before which tokens are first removed, 0 for any site before the decoder; None without a
            site, or if cache entries are evicted as well.
        evicts: whether only cache entries are removed and no tokens.
        flops: share of the unreduced prefill's FLOPs.
        units: the unit of statistics of each sample: task and first document.
        discriminates: for runs that evict cache entries, whether any answer is longer than one token.
        single_token: whether every answer is one token.
        unread: whether too many answers could not be read.
        keep: tokens that stay of each sample, where that was set; the ratio is then what it removes of these samples.
    """

    name: str
    method: str
    policy: str
    ratio: float
    layer: int | None
    evicts: bool
    metric: str
    flops: float
    scores: Mapping[Key, float]
    units: Mapping[Key, Key]
    discriminates: bool | None = None
    single_token: bool = False
    unread: bool = False
    keep: int | None = None


def read_run_scores(result: StoredResult) -> RunScores:
    """Return the per-sample scores of a result.

    Raises:
        UserError: some samples have no score.
    """
    row, extra = result.row, result.row["extra"]
    metric = extra["headline"]
    scorings = {
        key: scoring for key, scoring in result.scorings().items() if metric in scoring.scores
    }
    # Missing in rows of older versions: how the metric is aggregated, and over how many samples.
    aggregation = extra.get("aggregation", {}).get(metric, {})
    expected = aggregation.get("samples") or row["n_samples"]
    if len(scorings) != expected:
        reason = aggregation.get("note")
        raise UserError(
            f"run {row['run_key']} ({row['benchmark']}) has {metric} for {len(scorings)} of {expected} samples; "
            + (f"{metric}: {reason}" if reason else "run it again with force=true")
        )
    sites = extra.get("sites") or []
    return RunScores(
        name=name_of(row),
        method=row["method"],
        policy=policy(row),
        ratio=row["ratio"],
        # A run that also evicts cache entries is not comparable with random tokens alone.
        layer=_layer(sites[0]) if sites and "cache" not in extra else None,
        evicts="cache" in extra and not sites,
        metric=metric,
        flops=row["flops"]["share_of_full"],
        scores={key: scoring.scores[metric] for key, scoring in scorings.items()},
        units={
            key: (key[0], scoring.units.get(metric, key[1])) for key, scoring in scorings.items()
        },
        # Missing in rows of older versions.
        discriminates=extra.get("discriminates"),
        single_token=extra.get("first_token") == 1,
        unread=is_marked(row),
        keep=row.get("keep"),
    )


def _layer(site: Mapping[str, Any]) -> int:
    """Return the decoder layer of a site; the tower, the projector and the prefix all come before layer 0."""
    return int(site["layer"]) if site["where"] == "layer" else 0
