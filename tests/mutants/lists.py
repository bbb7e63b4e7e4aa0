"""Read the lists of mistakes in this folder, and check that they still fit the code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old`, which occurs in `file` exactly once, becomes `new`; one of `tests` should fail."""

    package: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file and the first line of the replacement."""
        return f"{self.file}: {self.new.strip().splitlines()[0] if self.new.strip() else 'removed'}"


def read_mutants(folder: Path = HERE, tree: Path = ROOT) -> list[Mutant]:
    """Return the mistakes of every package.

    Raises:
        SystemExit: a line of code or a test is gone, or the line occurs twice: the list is older than the code.
    """
    mutants, stale = [], []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            tests = tuple(entry["tests"].split())
            mutant = Mutant(path.stem, entry["file"], entry["old"], entry["new"], tests)
            source = tree / mutant.file
            count = source.read_text().count(mutant.old) if source.is_file() else 0
            if count != 1 or mutant.old == mutant.new:
                stale.append(f"{path.name}: {mutant.file} has {count} of {mutant.old!r}")
            stale += [f"{path.name}: no test {test}" for test in tests if not _exists(tree, test)]
            mutants.append(mutant)
    if stale:
        raise SystemExit("\n".join(stale))
    return mutants


def _exists(tree: Path, test: str) -> bool:
    """Return whether the file of a test exists and defines the function, if one is named."""
    file, _, name = test.partition("::")
    path = tree / file
    return path.is_file() and f"def {name.partition('[')[0]}" in path.read_text()
