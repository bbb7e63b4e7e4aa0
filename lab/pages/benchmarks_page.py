"""docs/benchmarks.md from conf/: `python -m lab.pages.benchmarks_page` prints it, `--write <file>` replaces it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.group_lists import choices, comment, read_choice
from espalier.harness.config.lmms_task_files import Index, Leaf, index_of, library
from espalier.harness.paths import CONF, ROOT
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.commands import command
from lab.pages.page_writer import print_or_write, table

#: Benchmarks whose samples the harness draws itself.
EMBEDDED = "seedling_"

#: `benchmark.kind` -> what its section is called.
SECTIONS = {
    "understanding": "Questions about pictures and videos",
    "localization": "Boxes",
    "ocr": "Documents",
    "description": "Descriptions and captions",
}

PAPERS = {
    "d2pruner": "D2Pruner",
    "d3tom": "D3ToM",
    "rtprune": "RTPrune",
    "aircache": "AirCache",
    "parallelvlm": "ParallelVLM",
}

NEEDS = {"java": "a Java runtime", "judge": "a judge", "server": "a submission server: refused"}

HEAD = """\
# Benchmarks

Generated from `conf/benchmark` and its task files with `python -m lab.pages.benchmarks_page --write
docs/benchmarks.md`; a test checks that it is up to date. `python run.py benchmark=?` prints the list in a terminal.

`python run.py benchmark=pope` runs one benchmark. By default, data sets are read from the hub's cache; `offline=false`
allows downloads. `benchmark.path=<folder>` reads the data from a folder that contains the data set's repository, or
several as `<owner>/<name>`. Images and videos that a data set refers to must be inside it: URLs, links and `..` are
refused. Only your own table, given by its path in a task file, may refer to any file. The data sets belong to third
parties. The licence is the one stated by the owner or by a public copy; - means that none was found.

[The GPU quick start](first_gpu_run.md) goes from a fresh machine to a first published number. `python -m
espalier.harness.tools.benchmarks prefetch pope` downloads everything that a machine without network needs; `check pope`
checks step by step that the benchmark can run.

Columns:

- *task*: the name in lmms-eval {version} with the task's version, or a file below `tasks/`.
- *limit*: maximum number of new tokens per answer, if the task or benchmark sets one.
- *headline*: the metric used in tables and curves. *printed*: its name and scale in papers. Results also contain the
  other metrics.
- *prompts*: changes to the task's own question: prompt settings, or a text for a prompt set (`model.prompt`).
- *needs*: requirements for scoring other than Python packages; if one is missing, the run is refused before the model
  is loaded.

## Any other task of lmms-eval

`benchmark=task:<name>` runs any lmms-eval task with generated answers, alone or in a sweep, without a config file:
`benchmark=task:vstar_bench`, `-m benchmark=pope,task:ai2d`. It uses the task's own metrics; the first is the headline.
A group or tag (`benchmark=task:mvbench`) runs all its tasks. Its result contains the metrics of each task and, before
them, the mean over tasks of every metric that all of them share. Write a config file if a paper's scale, prompt or
headline differs.
"""

TAIL = """\
## A file of your own

A config file contains only what differs from these defaults (`conf/base/benchmark.yaml`). `name`, `task`, `metrics` and
`headline` have no default. All errors in the file are reported at once. [A benchmark](recipes/benchmark.md) shows how
to add one that lmms-eval lacks.

"""

FACTS = ("benchmark", "task", "limit", "data set", "split", "samples", "licence", "needs")
SCORES = ("benchmark", "headline", "printed", "other metrics", "prompts", "papers")


def page() -> str:
    """Return the page: for each kind of task what its benchmarks are made of, how they are scored, and notes."""
    specs = [_spec(name) for name in choices("benchmark")]
    ours = [spec for spec in specs if spec.name.startswith(EMBEDDED)]
    parts = [HEAD.format(version=version("lmms-eval"))]
    for kind, title in SECTIONS.items():
        of_kind = [spec for spec in specs if spec.kind == kind and spec not in ours]
        if of_kind:
            parts.append(_section(title, of_kind))
    parts.append(_section("Embedded", ours, "Scenes of shapes and digits, drawn by the harness."))
    keys = table(("key", "default", "what"), _keys())
    return "\n".join([*parts, TAIL + keys])


def _spec(name: str) -> BenchmarkSpec:
    return benchmark_spec(read_choice("benchmark", name), None)


def _section(title: str, specs: Sequence[BenchmarkSpec], intro: str = "") -> str:
    parts = [f"## {title}\n", f"{intro}\n"] if intro else [f"## {title}\n"]
    parts += [
        table(FACTS, map(_facts, specs)),
        table(SCORES, map(_scores, specs)),
        "".join(chain.from_iterable(map(_notes, specs))),
    ]
    return "\n".join(parts)


def _facts(spec: BenchmarkSpec) -> tuple[str, ...]:
    data = spec.dataset
    index = _index(spec)
    leaves = index.leaves(spec.task)
    place = f"`{data.path}`" if data.path else "own"
    return (
        f"`{spec.name}`",
        _task(spec, leaves, index),
        _limit(spec, leaves),
        " ".join([place, *([f"({data.config})"] if data.config else [])]),
        " ".join(filter(None, (data.split, f"at {data.revision}" if data.revision else None)))
        or "-",
        "-" if data.samples is None else f"{data.samples:,}",
        data.licence or "-",
        ", ".join(NEEDS[one] for one in spec.needs) or "-",
    )


def _scores(spec: BenchmarkSpec) -> tuple[str, ...]:
    printed = [f"{how.name} x {how.scale:g}" for how in (spec.reported.get(spec.headline),) if how]
    others = [
        f"`{metric}`{_as(spec, metric)}" for metric in spec.metrics if metric != spec.headline
    ]
    settings = [f"`{key}: {str(value).lower()}`" for key, value in spec.prompt.items()]
    texts = ["own text"] if spec.text else []
    texts += [f"text for {name}" for name in spec.texts]
    return (
        f"`{spec.name}`",
        f"`{spec.headline}`" + ("" if spec.higher_is_better else ", less is better"),
        printed[0] if printed else "-",
        ", ".join(others) or "-",
        ", ".join([*settings, *texts]) or "the task's",
        ", ".join(PAPERS[one] for one in spec.papers) or "-",
    )


def _notes(spec: BenchmarkSpec) -> tuple[str, ...]:
    """Return what the benchmark's file is about and what there is to know of it, one line."""
    about = comment("benchmark", spec.name)
    note = f" {spec.note.rstrip('.')}." if spec.note else ""
    return (f"- `{spec.name}`: {about}.{note}\n",)


def _as(spec: BenchmarkSpec, metric: str) -> str:
    how = spec.reported.get(metric)
    return f" ({how.name} x {how.scale:g})" if how else ""


def _index(spec: BenchmarkSpec) -> Index:
    """Return the index that has the task: ours, or lmms-eval's."""
    ours = Index({}) if spec.include_path is None else index_of(spec.include_path)
    return ours if spec.task in ours.names else library()


def _task(spec: BenchmarkSpec, leaves: Sequence[Leaf], index: Index) -> str:
    stated = {str(_version(leaf)) for leaf in leaves if _version(leaf) is not None}
    behind = f" ({', '.join(sorted(stated))})" if stated else ""
    path = index.files.get(spec.task)
    # Not all that lies in the repository: an environment may, with lmms-eval in it.
    if path is not None and path.is_relative_to(ROOT / "tasks"):
        return f"[{spec.task}](../{path.relative_to(ROOT).as_posix()}){behind}"
    return f"`{spec.task}`{behind}"


def _version(leaf: Leaf) -> Any:
    """Return the version that a task states, in a table or in a list of tables; None where it states none."""
    metadata = leaf.settings.get("metadata") or {}
    tables = metadata if isinstance(metadata, list) else [metadata]
    return next((one["version"] for one in tables if "version" in one), None)


def _limit(spec: BenchmarkSpec, leaves: Sequence[Leaf]) -> str:
    key = "max_new_tokens"
    if key in spec.generation:
        return str(spec.generation[key])
    found = {(leaf.settings.get("generation_kwargs") or {}).get(key) for leaf in leaves}
    limit = found.pop() if len(found) == 1 else None
    return "-" if limit is None else str(limit)


def _keys() -> list[tuple[str, str, str]]:
    """Return the defaults of every key with what is written behind them."""
    rows = []
    for line in (CONF / "base" / "benchmark.yaml").read_text(encoding="utf-8").splitlines():
        code, _, what = line.partition(" # ")
        key, _, default = code.partition(":")
        if code.startswith("#") or not key:
            continue
        prefix = "dataset." if key.startswith("  ") else ""
        rows.append((f"`{prefix}{key.strip()}`", f"`{default.strip() or '...'}`", what or "-"))
    return rows


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    return print_or_write(page, "lab.pages.benchmarks_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
