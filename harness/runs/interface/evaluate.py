"""Evaluate a method on a model and a benchmark from Python, as `python run.py` does: same key, row and store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from espalier.harness.api.applied import user_errors
from espalier.harness.api.argument_errors import read_path
from espalier.harness.api.loaded_models import Model
from espalier.harness.api.open_method import require_amount
from espalier.harness.ranks import Ranks
from espalier.harness.runs.admission import admit_here
from espalier.harness.runs.interface.evaluated_run import EvaluatedRun
from espalier.harness.runs.interface.run_request import read_request
from espalier.harness.runs.model_pool import LentPool, Pool
from espalier.harness.runs.network import restored_network
from espalier.harness.runs.single_run import CellRunner
from espalier.harness.store import Store
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EvaluatedRun", "evaluate"]


def evaluate(
    model: str | PathLike[str] | Model,
    method: str | Method,
    benchmark: str | PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]],
    ratio: float | None = None,
    *,
    keep: int | str | None = None,
    limit: int | Literal["all"] | None = None,
    store: str | PathLike[str] | None = None,
    **settings: Any,
) -> EvaluatedRun:
    """Evaluate a method: `espalier.evaluate("seedling", "fastv", "seedling_vqa", ratio=0.9, limit=100).metrics`.

    A run by names is that of the command line: it has the same key and row, and is served from the store if it is
    finished. After an interruption the same call continues. A model in memory counts by a digest of its weights, a
    method of a notebook by its code.

    Args:
        model: a name of conf/model, or the result of `load` or `wrap`.
        method: a name of conf/method, or an instance of your own class.
        benchmark: a name of conf/benchmark, or your own data: the path of a file or folder, a pandas frame or a list of
            dictionaries, with the columns of docs/own_data.md (image, question, answer, ...); `score`: how answers are
            scored.
        ratio: share of visual tokens removed, 0 <= ratio < 1; needed for every method that removes tokens.
        keep: number of visual tokens kept, or a share such as "10%", in place of `ratio`.
        limit: number of samples; None: the benchmark's own limit; "all": all.
        store: folder of results; None: as for commands.
        **settings: hyper-parameters of the method, and keys of the config by name (`seed`, `batch_size`, `compressor`,
            `judge`) or in full (`**{"model.dtype": "bfloat16"}`).

    Raises:
        UserError: one line with the argument, its value and what is valid.
        SampleErrors: samples failed; the others are kept.
    """
    values: dict[str, Any] = {**settings, "ratio": ratio, "keep": keep}
    if limit is not None and limit != "all":
        values["limit"] = limit
    if store is not None:
        values["store"] = str(read_path("store", store))
    with ExitStack() as stack, user_errors():
        stack.enter_context(restored_network())
        request = read_request(model, method, benchmark, values, limit == "all")
        job = admit_here(request.spec, Ranks(), Digests(), method=request.method)
        require_amount(job.spec, ratio, keep)
        pool = (
            LentPool(open_spec=model.open_spec, stack=stack) if isinstance(model, Model) else Pool()
        )
        row, _ = CellRunner(argv=request.argv, pool=pool).run(job, [job])
    records = job.spec.benchmark.own_data()
    ids = () if records is None else [record.id for record in records.records]
    return EvaluatedRun(row, Store(job.spec.store).run(job.key).path, ids)
