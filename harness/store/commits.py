"""Which rows of a store a commit names: rows have what `git describe` printed, a person any length of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from espalier.harness.errors import UserError

#: Behind the commit of code that had changes on top of it.
DIRTY = "-dirty"

#: Letters of a commit that name it at least.
SHORTEST = 4

#: What `git describe` prints of a commit behind a tag: `v0.1-3-g88e34e31ee17`.
DESCRIBED = re.compile(r".+-\d+-g(?P<hash>[0-9a-f]+)")
HASH = re.compile(rf"[0-9a-f]{{{SHORTEST},}}")

#: Commits that an error line names at most.
NAMED = 8


def named(asked: Iterable[str], rows: Mapping[str | None, int], option: str) -> frozenset[str]:
    """Return the commits of rows that some names mean: also those with changes on top, unless `-dirty` is named.

    Args:
        asked: commits, four letters or more of each, in either case.
        rows: how many rows a store has of each commit; None: rows without one.
        option: what the names were given to, for errors.

    Raises:
        UserError: a name is empty or too short, means no commit of the rows, or several.
    """
    return frozenset(commit for name in asked for commit in _named(name, rows, option))


def _named(name: str, rows: Mapping[str | None, int], option: str) -> list[str]:
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
    raise UserError(f"{option}={name!r} {problem}: {counted(rows) or 'none, the store has no row'}")


def _means(asked: str, commit: str) -> bool:
    if asked == commit.lower():
        return True
    described = DESCRIBED.fullmatch(commit)
    known = commit if described is None else described["hash"]
    return (
        HASH.fullmatch(asked) is not None
        and HASH.fullmatch(known) is not None
        and (known.startswith(asked) or asked.startswith(known))
    )


def counted(rows: Mapping[str | None, int]) -> str:
    """Return commits with their numbers of rows, the most frequent first."""
    most = Counter(rows).most_common()
    lines = [f"{commit or 'no commit'} ({count})" for commit, count in most[:NAMED]]
    more = f" and {len(most) - NAMED} more" if len(most) > NAMED else ""
    return ", ".join(lines) + more
