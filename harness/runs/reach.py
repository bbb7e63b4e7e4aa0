"""What code a run can reach: the definitions that some roots use, directly or not, and one digest of them.

Definitions are followed rather than files: what else a file holds makes no difference. A name is followed to the
definition that it stands for, through imports, those inside functions too; what a file runs when it is imported counts
as soon as something imports it. A class that only an annotation names is followed, for an object of it may come from
outside.

Where a name chooses the code, `TABLE.add("name", "module:object")` or a dict by name, only the chosen entries count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from espalier.harness.runs.code_source import Source
from espalier.harness.runs.codebase import Codebase, Stamp, stamp
from espalier.harness.runs.normal_code import Binding, Chain, Code
from espalier.harness.store.files.digests import digest

#: A definition: module and name; the name "" is what runs when the module is imported.
Symbol = tuple[str, str]


@dataclass(frozen=True)
class Roots:
    """Where to start, and where not to go.

    Attributes:
        symbols: `module:name` of what is called.
        files: Python files outside the packages, all of which runs; what they use of the packages is followed.
        choices: `module:TABLE` of tables, each with the entries chosen.
        stops: packages, modules and `module:name` that are not followed.
    """

    symbols: tuple[str, ...]
    files: tuple[Path, ...] = ()
    choices: tuple[tuple[str, frozenset[str]], ...] = ()
    stops: frozenset[str] = frozenset()


@dataclass
class Reach:
    """What was reached.

    Attributes:
        code: of each definition its digest, and what the imported names in it stand for.
        outside: modules of libraries that it uses.
        stopped: those of `Roots.stops` that it came to.
        files: every file that was read.
    """

    code: dict[Symbol, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    files: set[Stamp] = field(default_factory=set)

    @property
    def digest(self) -> str:
        """One hash of all that was reached, in whatever order."""
        return digest(sorted([*symbol, *code] for symbol, code in self.code.items()))


@dataclass
class Reaches:
    """What roots reach in one codebase, remembered until a file changes.

    Args:
        base: the code.
    """

    base: Codebase
    _known: dict[Roots, tuple[frozenset[Stamp], str]] = field(default_factory=dict)

    def digest(self, roots: Roots) -> str:
        """Return the digest of what roots reach.

        Raises:
            LookupError: a root is not there.

        Cost: of roots asked for before, one look at the time of change of each file read.
        """
        known = self._known.get(roots)
        if known is None or any(stamp(one[0]) != one for one in known[0]):
            found = reach(self.base, roots)
            known = self._known[roots] = frozenset(found.files), found.digest
        return known[1]


@cache
def reaches(root: Path) -> Reaches:
    """Return what is known of the code below a folder, the same for every run of a process."""
    return Reaches(Codebase(root))


def reach(base: Codebase, roots: Roots) -> Reach:
    """Return what roots reach.

    Raises:
        LookupError: a root is not there.

    Cost: half a second where nothing was parsed before, else about 25 milliseconds.
    """
    walk = _Walk(base, roots)
    for symbol in roots.symbols:
        module, _, name = symbol.partition(":")
        if not walk.follow(Binding(module, name)):
            raise LookupError(f"no {symbol} below {base.root}")
    for path in roots.files:
        walk.file(path)
    walk.finish()
    return walk.found


class _Walk:
    """One walk from roots to all that they reach."""

    def __init__(self, base: Codebase, roots: Roots) -> None:
        self._base = base
        self._choices = dict(roots.choices)
        self._stops = roots.stops
        self._opened: dict[str, Source | None] = {}
        self._loaded: set[str] = set()
        self._followed: dict[tuple[Binding, Chain], bool] = {}
        self._taken: set[Symbol] = set()
        self._waiting: list[tuple[Symbol, Code, Source]] = []
        self.found = Reach()

    # ------------------------------------------------------------------ modules

    def _open(self, module: str) -> Source | None:
        """Return a module of the packages, None for what is none of them."""
        if module not in self._opened:
            path = self._base.path(module)
            self._opened[module] = None if path is None else self._read(path, module)
        return self._opened[module]

    def _read(self, path: Path, module: str) -> Source:
        found = stamp(path)
        assert found is not None  # it was there just now
        self.found.files.add(found)
        return self._base.source(found, module)

    def _load(self, module: str) -> None:
        """Take what runs when a module is imported, and when those are that it imports."""
        waiting = [module]
        while waiting:
            one = waiting.pop()
            if one in self._loaded or self._is_stopped(one):
                continue
            self._loaded.add(one)
            waiting.append(one.rpartition(".")[0])
            source = self._open(one) if one else None
            if source is None:
                continue
            self._effects(one, source)
            for binding in source.imports.get("*", ()):
                self.follow(Binding(binding.module))  # any name may be one of its
            waiting += [name for binding in source.loads for name in self._modules(binding)]

    def _effects(self, module: str, source: Source) -> None:
        if source.effects.digest:
            self._wait((module, ""), source.effects, source)

    def _modules(self, binding: Binding) -> Iterator[str]:
        """Yield the modules that an import imports."""
        yield binding.module
        if binding.attribute is not None:
            source = self._open(binding.module)
            if source is not None and binding.attribute not in source:
                yield f"{binding.module}.{binding.attribute}"

    def _is_stopped(self, module: str, name: str = "") -> bool:
        parts = module.split(".")
        inside = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        met = self._stops.intersection([*inside, f"{module}:{name}"])
        self.found.stopped |= met
        return bool(met)

    # ------------------------------------------------------------------ definitions

    def follow(self, binding: Binding, rest: Chain = ()) -> bool:
        """Take what an imported name with attributes stands for; say whether there is such a thing."""
        asked = binding, rest
        if asked not in self._followed:
            self._followed[asked] = True  # of circles
            self._followed[asked] = self._follow(binding, rest)
        return self._followed[asked]

    def _follow(self, binding: Binding, rest: Chain) -> bool:
        module = binding.module
        names = rest if binding.attribute is None else (binding.attribute, *rest)
        source = self._open(module)
        if source is None:
            self.found.outside.add(module)
            return False
        while names and names[0] not in source:
            inner = self._open(f"{module}.{names[0]}")
            if inner is None:
                self._load(
                    module
                )  # it is bound by what runs there, by Python, or when it is asked for
                if "__getattr__" in source:
                    self._take(module, source, ("__getattr__",))
                return False
            module, names, source = f"{module}.{names[0]}", names[1:], inner
        if self._is_stopped(module, names[0] if names else ""):
            return True
        self._load(module)
        if names:
            self._take(module, source, names)
        else:  # the module itself is handed on
            for name in source.definitions:
                self._take(module, source, (name,))
        return True

    def _take(self, module: str, source: Source, chain: Chain) -> None:
        """Take a definition of a module, or what the module imports under its name."""
        name, *rest = chain
        if name in source.definitions:
            self._define(module, source, name)
        for binding in source.imports.get(name, ()):
            meanings = tuple(f"{name}={one}" for one in source.imports[name])
            self.found.code.setdefault((module, name), ("", meanings))
            self.follow(binding, tuple(rest))

    def _define(self, module: str, source: Source, name: str) -> None:
        chosen = self._choices.get(f"{module}:{name}")
        items = source.items.get(name, {}) if chosen is not None else {}
        for key, code in (*items.items(), *source.entries.get(name, {}).items()):
            if chosen is None or key in chosen:
                self._wait((module, f"{name}[{key}]"), code, source)
        if not items:
            self._wait((module, name), source.definitions[name], source)

    def _wait(self, symbol: Symbol, code: Code, source: Source) -> None:
        if symbol not in self._taken:
            self._taken.add(symbol)
            self._waiting.append((symbol, code, source))

    def file(self, path: Path) -> None:
        """Take all of a file outside the packages, and follow what it uses of them."""
        source = self._read(path, "")
        entries = [one for table in source.entries.values() for one in table.values()]
        for code in (source.effects, *source.definitions.values(), *entries):
            # By its content: nobody imports it by a name of the packages, and it may lie anywhere.
            self.found.code[path.name, code.digest] = (code.digest, self._uses(code, source))
        for binding in source.loads:
            for module in self._modules(binding):
                self._load(module)

    def finish(self) -> None:
        """Follow what waits."""
        while self._waiting:
            symbol, code, source = self._waiting.pop()
            self.found.code[symbol] = (code.digest, self._uses(code, source, symbol[0]))

    def _uses(self, code: Code, source: Source, module: str = "") -> tuple[str, ...]:
        """Follow the names in some code; return what the imported ones stand for."""
        meanings: set[str] = set()
        for chain in code.uses | code.hints:
            name, rest = chain[0], chain[1:]
            if module and name in source.definitions:
                self._take(module, source, chain)
            bound = (*code.imports.get(name, ()), *source.imports.get(name, ()))
            for binding in (*bound, *source.hints.get(name, ())):
                self.follow(binding, rest)
            if chain in code.uses:
                meanings.update(f"{name}={binding}" for binding in bound)
        for binding in code.loads:
            for one in self._modules(binding):
                self._load(one)
        for binding in code.targets:
            if self._open(binding.module) is not None:
                self.follow(binding)
        return tuple(sorted(meanings))
