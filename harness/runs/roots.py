"""Where the code of a run starts, which tables choose between pieces of it, and where it is not followed.

The method, the adapters and the task's own Python files are the roots of one run, `ENTRIES` those of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import getfile
from pathlib import Path

from espalier.harness.kinds.checks.signal_check import signals_of
from espalier.harness.kinds.kind import Identity
from espalier.harness.kinds.lookup import as_decoder, kind_of
from espalier.harness.models.adapter import ADAPTERS
from espalier.harness.runs.codebase import Codebase
from espalier.harness.runs.reach import Roots
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method

#: What the harness calls to make the numbers of a row (harness/runs/single_run.py).
ENTRIES = (
    "espalier.harness.models.adapter:load_adapter",
    "espalier.harness.engine.artifacts.priors:prior_for",
    "espalier.harness.evaluation.evaluate:evaluate",
    "espalier.harness.evaluation.evaluate:open_benchmark",
    "espalier.harness.cost.peak_memory:peak_memory",
    "espalier.harness.runs.result_row:build_row",
)

#: The table of adapters: the entries of the model's and the draft's count.
BY_ADAPTER = "espalier.harness.models.adapter:ADAPTERS"

#: The table of kinds: the entry of the method's base counts.
BY_KIND = "espalier.harness.kinds.lookup:KINDS"

#: Tables by name of a signal: the entries of those that the method reads count.
BY_SIGNAL = ("espalier.harness.engine.signals.table:PRODUCERS",)

#: Code that a run reaches and that changes no number: package, module or `module:name` -> why.
STOPPED = {
    "espalier.harness.engine.artifacts.calibration_files": "reads files whose content is hashed",
    "espalier.harness.specs.catalogue": "finds methods by name; the chosen one is a root",
    "espalier.harness.store.files.digests": "names what was read",
    "espalier.harness.errors": "error lines",
    "espalier.harness.settings": "refuses values; those that pass are hashed",
    "espalier.harness.store.files.folder_checks": "refuses paths",
    "espalier.harness.specs.hub_cache": "finds files whose revision is hashed",
    "espalier.harness.evaluation.judging.client": "fetches verdicts; what is asked and of whom is hashed",
    "espalier.harness.evaluation.judging.verdicts": "keeps verdicts",
    "espalier.harness.specs.labels": "what rows and curves are called",
    "espalier.harness.store.files.lease": "says who computes a run",
    "espalier.harness.ranks": "deals the samples out; the row is that of one process",
    "espalier.harness.specs.registry": "finds classes by name; the chosen ones are followed",
    "espalier.harness.store.files.dataset_copies": "finds copies of data sets whose content is hashed",
    "espalier.harness.specs.revisions": "names what was read",
    "espalier.harness.store": "keeps what was measured",
    "espalier.harness.specs.draft_errors": "error lines",
}


def roots_of(spec: RunSpec, method: Method, base: Codebase, task: Iterable[Path]) -> Roots:
    """Return where the code of a run starts; `task` are the files of its benchmark."""
    identity = kind_of(method).identity(spec, method)
    adapters = frozenset(one.adapter for one in (spec.model, identity.draft) if one is not None)
    # Families of this repository are found in its source: importing them takes seconds.
    foreign = [ADAPTERS.load(name) for name in sorted(adapters - base.keys(BY_ADAPTER))]
    symbols, files = set(ENTRIES), set(_own_code(task, base))
    methods = (method, *identity.methods)
    for chosen in (*map(type, methods), *foreign):
        if base.path(chosen.__module__) is None:
            files.add(Path(getfile(chosen)))
        else:
            symbols.add(f"{chosen.__module__}:{chosen.__qualname__.partition('.')[0]}")
    bases = frozenset(one.__name__ for each in methods for one in type(each).__mro__)
    return Roots(
        symbols=tuple(sorted(symbols)),
        files=tuple(sorted(files)),
        choices=(
            (BY_ADAPTER, adapters),
            (BY_KIND, bases),
            *((table, _signals(spec, identity)) for table in BY_SIGNAL),
        ),
        stops=frozenset(STOPPED),
    )


def _signals(spec: RunSpec, identity: Identity) -> frozenset[str]:
    """Return the signals that are read in the model, and in the draft."""
    found: set[str] = set()
    for method in identity.methods:
        found |= signals_of(method, spec.model.facts)
        decoder = as_decoder(method)
        if identity.draft is not None and decoder is not None and decoder.reducer is not None:
            found |= signals_of(decoder.reducer, identity.draft.facts)
    return frozenset(found)


def _own_code(task: Iterable[Path], base: Codebase) -> Iterator[Path]:
    """Yield the Python files of a task that belong to no package: those of packages are followed from these."""
    for path in task:
        inside = path.is_relative_to(base.root) and path.relative_to(base.root).parts[0]
        if base.text(path) is not None and inside not in ("harness", "methods"):
            yield path
