"""Selection of a store's rows by commit: rows store the output of `git describe`, users type any prefix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from espalier.harness.errors import UserError

#: Suffix of a commit with uncommitted changes on top.
DIRTY = "-dirty"

#: Minimum number of letters of a commit.
SHORTEST = 4

#: Output of `git describe` for a commit after a tag: `v0.1-3-g88e34e31ee17`.
DESCRIBED = re.compile(r".+-\d+-g(?P<hash>[0-9a-f]+)")
HASH = re.compile(rf"[0-9a-f]{{{SHORTEST},}}")

#: Maximum number of commits in an error line.
NAMED = 8


def matching_commits(
    names: Iterable[str], rows: Mapping[str | None, int], option: str
) -> frozenset[str]:
    """Return the commits of rows that the names select, including those with changes on top, unless `-dirty` is given.

    Args:
        names: commits, at least four letters of each, in either case.
        rows: number of rows of each commit; None: rows without one.
        option: the option that took the names, for errors.

    Raises:
        UserError: a name is empty or too short, or selects no commit of the rows, or several.
    """
    return frozenset(commit for name in names for commit in _matching(name, rows, option))


def _matching(name: str, rows: Mapping[str | None, int], option: str) -> list[str]:
    letters = name.strip().lower()
    base = letters.removesuffix(DIRTY)
    commits = [
        commit
        for commit in rows
        if commit is not None
        and (letters == base or commit.endswith(DIRTY))
        and _means(base, commit.removesuffix(DIRTY))
    ]
    different = {commit.removesuffix(DIRTY) for commit in commits}
    if len(different) == 1:
        return commits
    if different:
        problem = f"is the beginning of {len(different)} commits; valid: more letters of one"
    elif len(base) < SHORTEST:
        problem = f"must be a commit, {SHORTEST} letters or more; valid"
    else:
        problem = "is the commit of no row, so that every row would go; valid"
    raise UserError(
        f"{option}={name!r} {problem}: {format_counts(rows) or 'none, the store has no row'}"
    )


def _means(name: str, commit: str) -> bool:
    if name == commit.lower():
        return True
    described = DESCRIBED.fullmatch(commit)
    letters = commit if described is None else described["hash"]
    return (
        HASH.fullmatch(name) is not None
        and HASH.fullmatch(letters) is not None
        and (letters.startswith(name) or name.startswith(letters))
    )


def format_counts(rows: Mapping[str | None, int]) -> str:
    """Return commits with their numbers of rows, the most frequent first."""
    counts = Counter(rows).most_common()
    lines = [f"{commit or 'no commit'} ({count})" for commit, count in counts[:NAMED]]
    suffix = f" and {len(counts) - NAMED} more" if len(counts) > NAMED else ""
    return ", ".join(lines) + suffix
