"""Speculative decoding with a tree of drafts: the static tree of EAGLE (Li et al., ICML 2024, arXiv 2401.15077).

If the draft's likeliest token is rejected its second may be accepted, so several are drafted at a place, fewer at
deeper levels and after less likely tokens. A node is named by ranks: "0.1" is the second likeliest token after the
likeliest first one. The five levels have 4, 8, 8, 3 and 2 of the 25 nodes; a round takes five forwards of the draft,
one a level, and one of the target, in which every node sees its own ancestors only. Siblings are tried likeliest first;
a rejected one is removed from the target's distribution, so that the accepted token is distributed as without a draft.

Drafting does not overlap with verification: the next tree would have to be drafted for every leaf.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.methods.base import Decoder, MethodError
from espalier.methods.checks import require

#: The static tree of EAGLE's first version, level by level.
EAGLE = (
    *("0", "1", "2", "3"),
    *("0.0", "0.1", "0.2", "1.0", "1.1", "2.0", "2.1", "3.0"),
    *("0.0.0", "0.0.1", "0.0.2", "0.1.0", "0.1.1", "0.2.0", "0.2.1", "1.0.0"),
    *("0.0.0.0", "0.0.0.1", "0.0.0.2"),
    *("0.0.0.0.0", "0.0.0.0.1"),
)

_PATH = re.compile(r"[0-9]+(\.[0-9]+)*")


@dataclass(frozen=True)
class SDTree(Decoder):
    """Drafts a tree of fixed form, then verifies it.

    Attributes:
        paths: the tree's nodes by the ranks that lead to them.
    """

    paths: tuple[str, ...] = EAGLE

    def __post_init__(self) -> None:
        """Check that the paths form a tree."""
        parents_of(self.paths)

    @property
    def window(self) -> int:
        """Levels of the tree, each one forward of the draft."""
        return depth_of(self.paths)

    @property
    def tree(self) -> tuple[int, ...]:
        """Parents of the nodes, level by level, siblings by rank."""
        return parents_of(self.paths)


def depth_of(paths: Sequence[str]) -> int:
    """Return the number of levels."""
    return max(len(path.split(".")) for path in paths)


def parents_of(paths: Sequence[str]) -> tuple[int, ...]:
    """Return each node's parent, -1 for a first token; nodes are numbered level by level, siblings by rank.

    Raises:
        MethodError: there is no path, or a path is not ranks with dots between, is listed twice, or lacks its parent or
            its likelier sibling.
    """
    require(bool(paths), "paths", list(paths), "one path or more, for example ['0', '1', '0.0']")
    nodes: set[tuple[int, ...]] = set()
    for path in paths:
        require(_PATH.fullmatch(path) is not None, "paths", path, "ranks with dots between: '0.1'")
        node = tuple(map(int, path.split(".")))
        require(node not in nodes, "paths", path, "each path once")
        nodes.add(node)
    numbers = {node: number for number, node in enumerate(sorted(nodes, key=_by_level))}
    for node in numbers:
        parent, rank = node[:-1], node[-1]
        for required in (parent, (*parent, rank - 1) if rank else ()):
            if required and required not in nodes:
                raise MethodError(
                    f"method.params.paths={_name(node)!r} needs {_name(required)!r}; valid: trees in which every "
                    "path's parent and likelier siblings are listed too"
                )
    return tuple(numbers.get(node[:-1], -1) for node in numbers)


def _by_level(node: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(node), node


def _name(node: tuple[int, ...]) -> str:
    return ".".join(map(str, node))
