"""The settings that change a run's numbers: the block `settings` of its row, and that part of its key."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from espalier.harness.kinds.lookup import kind_of
from espalier.harness.specs.row_settings import (
    benchmark_settings,
    engine_settings,
    judge_settings,
    model_settings,
    plain,
)
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method


@dataclass(frozen=True)
class Contents:
    """The contents of the files that a run reads, whatever their names.

    Attributes:
        model: revision of the model's directory, or hub id and commit.
        draft: the same of the draft model; None without a draft.
        tasks: digests of the files that make a benchmark's samples and scores.
        artifacts: digests of the calibration files that the method reads.
        data: digest of the benchmark's data set in a folder of the user; None: the data set of the hub.
        words: digest of a judge prompt that replaces the benchmark's; None: the benchmark's.
        engine: version of the program that answers in the harness's place; None: the harness answers.
        quantisation: of the model's weights; None: they are not quantised.
        draft_quantisation: the same of the draft model.
    """

    model: str
    draft: str | None = None
    tasks: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    data: str | None = None
    words: str | None = None
    engine: str | None = None
    quantisation: str | None = None
    draft_quantisation: str | None = None


def cell_of(spec: RunSpec) -> dict[str, Any]:
    """Return the cell that a run fills; these are keys of the row itself."""
    budget = spec.budget
    return {
        "model": spec.model.name,
        "method": spec.method.title,
        "variant": spec.method.variant,
        "benchmark": spec.benchmark.name,
        # The share that a count removes is known after the run.
        **(
            {"ratio": budget.ratio}
            if budget.count is None
            else {"ratio": None, "keep": budget.count}
        ),
        "budget_rule": spec.budget.rule,
        "seed": spec.seed,
    }


def settings_of(spec: RunSpec, method: Method, contents: Contents) -> dict[str, Any]:
    """Return all other settings that change the run's numbers, as JSON values.

    Keys are those of the config where it has them. An engine setting that does not change the numbers of the method is
    null.

    Args:
        spec: the run.
        method: the built method; its fields are the hyper-parameters with defaults filled in.
        contents: the contents of the files that the run reads.
    """
    identity = kind_of(method, spec).identity(spec, method)
    draft = identity.draft
    blocks: dict[str, Any] = {
        "model": model_settings(spec.model, contents.model, contents.quantisation),
        "method": {"params": identity.params},
        "draft": None
        if draft is None
        else {
            "name": draft.name,
            **model_settings(draft, contents.draft, contents.draft_quantisation),
        },
        "benchmark": benchmark_settings(spec.benchmark, spec.model, contents.tasks, contents.data),
        "engine": engine_settings(spec.engine, identity.engine),
        "artifacts": contents.artifacts,
    }
    if "judge" in spec.benchmark.needs:
        # Other settings of the judge do not change the numbers.
        blocks["judge"] = judge_settings(spec.judge, contents.words)
    if spec.backend.served:
        # Served runs have the scope beside the version.
        blocks["engine"].pop("scope", None)
        backend = asdict(spec.backend)
        blocks["backend"] = {
            # A server has settings that a run does not know.
            **({"server": True} if backend.pop("url") is not None else {}),
            # Rows of this package's methods have no key for it, as rows older than the setting.
            **{k: v for k, v in backend.items() if k != "pruning" or spec.backend.built_in},
            "python": None,  # where it is installed changes no number
            "version": contents.engine,
            "scope": "item",  # a choice in each picture by itself
        }
    return {key: plain(value) for key, value in blocks.items()}
