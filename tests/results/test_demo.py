"""The tracked rows are of one clean commit, and none of their times is another program's on the same machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import pytest

from espalier.harness.paths import ROOT
from espalier.harness.store.parquet_tables import read_rows

STORES = ("demo", "demo_speculative")

#: How many times the median of its kind a time may be. On an idle machine the slowest is three times it.
MOST = 5.0

#: Times that depend on the model and the batch, hardly on method and benchmark: pictures and prompts are of one size.
OF_MODELS = ("vision_ms", "prefill_ms", "decode_ms_per_token")


def rows_of(store: str) -> list[Mapping[str, Any]]:
    return list(read_rows(ROOT / "results" / store))


def outliers(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield times over `MOST` medians of their kind: one model, draft and batch size; of choosing, one method."""
    kinds = defaultdict(list)
    for row in rows:
        kind = (row["model"], row["settings"]["engine"].get("batch_size"))
        # A decoder's steps are those of two models.
        kind = (*kind, (row["settings"]["draft"] or {}).get("name"))
        for name in OF_MODELS:
            kinds[*kind, name].append(row)
        kinds[*kind, "select_ms", row["method"], row["extra"]["label"]].append(row)
    for kind, members in kinds.items():
        name = next(one for one in kind if str(one).endswith(("_ms", "_per_token")))
        times = [row["time"][name] for row in members if row["time"][name]]
        usual = median(times) if times else 0.0
        for row in members:
            if (row["time"][name] or 0.0) > MOST * usual:
                cell = (row[key] for key in ("method", "benchmark", "ratio"))
                yield f"{' '.join(map(str, cell))}: {name}={row['time'][name]:.1f}, median {usual:.1f}"


@pytest.mark.parametrize("store", STORES)
def test_tracked_rows_are_of_one_commit_that_is_clean(store: str) -> None:
    commits = {row["extra"]["environment"]["commit"] for row in rows_of(store)}
    assert not {one for one in commits if one.endswith("-dirty")}
    assert len(commits) == 1


@pytest.mark.parametrize("store", STORES)
def test_no_time_of_the_tracked_rows_is_an_outlier(store: str) -> None:
    assert list(outliers(rows_of(store))) == []


@pytest.mark.parametrize("name", [*OF_MODELS, "select_ms"])
def test_a_time_of_another_program_is_an_outlier(name: str) -> None:
    usual = {"vision_ms": 3.0, "prefill_ms": 7.0, "decode_ms_per_token": 0.4, "select_ms": 0.3}
    rows = [
        {
            **{"model": "seedling", "method": "divprune", "benchmark": benchmark, "ratio": ratio},
            "settings": {"engine": {"batch_size": 50}, "draft": None},
            "extra": {"label": ""},
            "time": {key: value * (1 + 2 * ratio) for key, value in usual.items()},
        }
        for benchmark in ("seedling_rec", "seedling_ocr")
        for ratio in (0.5, 0.75, 0.9, 0.95)
    ]
    assert list(outliers(rows)) == []
    rows[3]["time"][name] *= 6
    (found,) = outliers(rows)
    assert found.startswith(f"divprune seedling_rec 0.95: {name}=")
