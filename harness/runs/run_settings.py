"""The settings that change a run's numbers: the block `settings` of its row, and that part of its key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from espalier.harness.evaluation.judging.judge_prompt import read_prompt
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.models.quantisation import quantisation_of
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.plugins.installed import Plugin
from espalier.harness.specs.revisions import model_revision
from espalier.harness.specs.row_settings import (
    benchmark_settings,
    engine_settings,
    judge_settings,
    model_settings,
    plain,
)
from espalier.harness.specs.run_spec import BackendSpec, RunSpec
from espalier.harness.store.files.dataset_copies import Copies
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method

#: Ends of the names of files in a benchmark's folder that shape its samples or its scores.
TASK_FILES = (
    *(".py", ".yaml", "_yaml", ".json", ".jsonl", ".csv", ".parquet"),
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pdf"),
    *(".mp4", ".mkv", ".webm", ".avi", ".mov"),
)


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


def contents_of(
    spec: RunSpec, method: Method, digests: Digests, artifacts: Iterable[Path] = ()
) -> Contents:
    """Return the contents of the files that a run reads; `artifacts` are calibration files of the method."""
    draft = kind_of(method, spec).identity(spec, method).draft
    prompt = spec.judge.prompt if "judge" in spec.benchmark.needs else None
    return Contents(
        model=model_revision(spec.model, digests),
        draft=None if draft is None else model_revision(draft, digests),
        tasks=tuple(
            digests.files(files, source.parent)
            for source, files in task_files(spec.benchmark).items()
        ),
        artifacts=tuple(sorted(map(digests.file, artifacts))),
        data=_data(spec.benchmark, digests),
        words=None if prompt is None else read_prompt(prompt).digest,
        engine=_engine(spec.backend),
        quantisation=quantisation_of(spec.model),
        draft_quantisation=None if draft is None else quantisation_of(draft),
    )


def _engine(backend: BackendSpec) -> str | None:
    """Return the version of the program that answers in the harness's place."""
    if not backend.served:
        return None
    # Most runs do not need them.
    from espalier.harness.runs.served.engine_process import engine_version
    from espalier.harness.runs.served.engine_server import server_version

    if backend.url is not None:
        return server_version(backend.url)
    return None if backend.python is None else engine_version(backend.python)


def task_files(benchmark: BenchmarkSpec) -> dict[Path, list[Path]]:
    """Return the files of each source of a benchmark; without sources, of the folder of its task."""
    folder = () if benchmark.include_path is None else (benchmark.include_path,)
    return {source: files_inside(source) for source in benchmark.sources or folder}


def files_inside(source: Path) -> list[Path]:
    """Return a file, or the files of a folder that shape samples, scores or answers."""
    if source.is_file():
        return [source]
    return [path for path in source.rglob("*") if path.name.endswith(TASK_FILES)]


def plugin_digest(plugin: Plugin, digests: Digests) -> str:
    """Return the digest of a user's code, as rows have it; nothing is imported."""
    return digests.files(plugin_files(plugin), plugin.root.parent) if plugin.root else ""


def plugin_files(plugin: Plugin) -> list[Path]:
    """Return the files of a user's code; what its configs set is in the settings."""
    root = plugin.root
    files = [] if root is None else files_inside(root)
    return [path for path in files if root and not path.is_relative_to(root / "conf")]


def _data(benchmark: BenchmarkSpec, digests: Digests) -> str | None:
    table = benchmark.own_data()
    if table is not None:
        return table.digest(digests)
    if benchmark.path is None:
        return None
    return Copies(benchmark.path, benchmark.dataset.path).revision(digests)


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
