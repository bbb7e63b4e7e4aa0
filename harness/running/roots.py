"""Where the code of a run starts, which tables choose between pieces of it, and where it is not followed.

The method, the adapters and the task's own Python files are the roots of one run, `ENTRIES` those of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import getfile
from pathlib import Path

from harness.adapters.base import ADAPTERS
from harness.admission.signals import signals_of
from harness.kinds.base import Identity
from harness.kinds.lookup import as_decoder, kind_of
from harness.running.codebase import Codebase
from harness.running.reach import Roots
from harness.specs import RunSpec
from methods.base import Method

#: What the harness calls to make the numbers of a row (harness/running/cell_runner.py).
ENTRIES = (
    "harness.adapters.base:load_adapter",
    "harness.artifacts.priors:prior_for",
    "harness.evaluation.evaluate:evaluate",
    "harness.evaluation.evaluate:open_benchmark",
    "harness.measure.memory:peak_memory",
    "harness.running.row:build_row",
)

#: The table of adapters: the entries of the model's and the draft's count.
BY_ADAPTER = "harness.adapters.base:ADAPTERS"

#: The table of kinds: the entry of the method's base counts.
BY_KIND = "harness.kinds.lookup:KINDS"

#: Tables by name of a signal: the entries of those that the method reads count.
BY_SIGNAL = ("harness.engine.signals.table:PRODUCERS",)

#: Code that a run reaches and that changes no number: package, module or `module:name` -> why.
STOPPED = {
    "harness.artifacts.files": "reads files whose content is hashed",
    "harness.catalogue": "finds methods by name; the chosen one is a root",
    "harness.digests": "names what was read",
    "harness.errors": "error lines",
    "harness.folders": "refuses paths",
    "harness.hub": "finds files whose revision is hashed",
    "harness.judging.client": "fetches verdicts; what is asked and of whom is hashed",
    "harness.judging.verdicts": "keeps verdicts",
    "harness.labels": "what rows and curves are called",
    "harness.lease": "says who computes a run",
    "harness.ranks": "deals the samples out; the row is that of one process",
    "harness.registry": "finds classes by name; the chosen ones are followed",
    "harness.repositories": "finds copies of data sets whose content is hashed",
    "harness.revisions": "names what was read",
    "harness.store": "keeps what was measured",
    "harness.wording": "error lines",
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
        if base.text(path) is not None and inside not in base.packages:
            yield path
