"""What a drafter proposes, and the walk that finds how far the target goes along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.acceptance import Row, Rule


@dataclass(frozen=True, eq=False)
class Draft:
    """Proposed tokens: a chain, or a tree whose nodes name their parents.

    Attributes:
        tokens: parents before children; siblings in the order in which they are tried.
        rows: the row (V,) that each token was drawn from, none or None for tokens chosen outright.
        parents: index of each token's parent, -1 for a first token; None: a chain.
    """

    tokens: tuple[int, ...]
    rows: tuple[Tensor | None, ...] = ()
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for rows or parents that do not fit the tokens."""
        if self.rows and len(self.rows) != len(self.tokens):
            raise ValueError(f"{len(self.rows)} rows for {len(self.tokens)} drafted tokens")
        if self.parents is not None and (
            len(self.parents) != len(self.tokens)
            or any(not -1 <= parent < node for node, parent in enumerate(self.parents))
        ):
            raise ValueError(f"parents {self.parents} do not come before their tokens")

    def row(self, node: int) -> Tensor | None:
        """Return the row a token was drawn from."""
        return self.rows[node] if self.rows else None

    def children(self, node: int) -> list[int]:
        """Return the tokens that follow `node` (-1: the start)."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def joined(self, other: Draft) -> Draft:
        """Return the chain of both; only chains join."""
        rows = tuple(one.row(node) for one in (self, other) for node in range(len(one.tokens)))
        return Draft(self.tokens + other.tokens, rows)

    @property
    def depths(self) -> tuple[int, ...]:
        """Places between the start and each token: 0 for a first one."""
        if self.parents is None:
            return tuple(range(len(self.tokens)))
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return tuple(found)

    def way(self, node: int) -> list[int]:
        """Return the tokens from the start to `node`, itself included."""
        if self.parents is None:
            return list(range(node + 1))
        found: list[int] = []
        while node >= 0:
            found.insert(0, node)
            node = self.parents[node]
        return found

    def part(self, first: int, last: int | None = None) -> Draft:
        """Return the tokens from `first` to before `last` of a chain."""
        return Draft(self.tokens[first:last], self.rows[first:last])


#: No token at all.
NOTHING = Draft(())


@dataclass(frozen=True)
class Verdict:
    """How far the target goes along.

    Attributes:
        path: accepted nodes, in order.
        own: the target's token behind them: what it says instead of a refused one, or one more; None if it was not
            asked what follows.
        refused: whether a drafted token was tried there and refused.
        tried: siblings tried at each place, the last one included.
    """

    path: tuple[int, ...]
    own: int | None
    refused: bool
    tried: tuple[int, ...]


def walk(draft: Draft, rows: Sequence[Row], rule: Rule, position: int) -> Verdict:
    """Follow the draft as far as the target does.

    Args:
        draft: tokens from `position` of the answer on.
        rows: the target's row for what follows the start, then for what follows each drafted token; the last may be
            missing if the draft is a chain (the target has not seen its last token).
        rule: what makes a token stand.
        position: of the first token in the answer.

    Cost: O(V) for each token tried when sampling, O(1) when greedy.
    """
    path: list[int] = []
    tried: list[int] = []
    node = -1
    while node + 1 < len(rows):
        p = rows[node + 1]
        refused = False
        here = position + len(path)
        children = draft.children(node)
        for turn, child in enumerate(children):
            token, q = draft.tokens[child], draft.row(child)
            if rule.stands(token, p, q, here, turn):
                path.append(child)
                tried.append(turn + 1)
                node = child
                break
            p = rule.rest(token, p, q)
            refused = True
        else:
            if children:
                tried.append(len(children))
            return Verdict(tuple(path), rule.choose(p, here), refused, tuple(tried))
    return Verdict(tuple(path), None, False, tuple(tried))


def tree_sight(missing: int, tree: Draft) -> Tensor:
    """Return (t, t) what `missing` tokens in a row and the nodes of a tree behind them see of each other."""
    count = missing + len(tree.tokens)
    seen = torch.zeros(count, count, dtype=torch.bool)
    seen[:, :missing] = True
    seen[:missing, :missing].tril_()
    for node in range(len(tree.tokens)):
        seen[missing + node, [missing + above for above in tree.way(node)]] = True
    return seen
