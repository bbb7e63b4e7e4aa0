"""Own data as a data set of lmms-eval: the file that tasks load, and the metrics of categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from lmms_eval.api.task import Task

from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.records.record import category_metric
from espalier.harness.store.files.dataset_copies import cache_folder
from espalier.harness.store.files.folder_checks import check_folder


def record_file(benchmark: BenchmarkSpec) -> Path | None:
    """Write the records of a benchmark on own data as JSON lines into the cache; None for other benchmarks.

    Pictures in files stay where they are; others are written next to the lines.

    Raises:
        UserError: the data are wrong, or the cache cannot be written.
    """
    table = benchmark.own_data()
    if table is None:
        return None
    check_folder("HF_DATASETS_CACHE, HF_HOME or HOME", Path(datasets.config.HF_DATASETS_CACHE))
    return table.save(cache_folder() / "espalier" / "own" / table.listing_digest()[:16])


def with_records(config: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Return a task's settings with the records' file as its data; unchanged without one."""
    if file is None:
        return dict(config)
    data_files = {"data_files": {config["test_split"]: str(file)}}
    return {**config, "dataset_kwargs": {**(config.get("dataset_kwargs") or {}), **data_files}}


def add_categories(tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
    """Add the metrics of each category of own data to their task."""
    table = benchmark.own_data()
    if table is None:
        return
    for task in tasks:
        aggregations, better = task.aggregation(), task.higher_is_better()
        name = benchmark.headline
        for category in table.categories:
            aggregations |= {category_metric(name, category): aggregations[name]}
            better |= {category_metric(name, category): better[name]}
        task._aggregation_list, task._higher_is_better = aggregations, better
