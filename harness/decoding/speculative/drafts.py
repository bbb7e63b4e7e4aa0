"""A drafter's proposal, and the walk that verifies it against the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.acceptance import Row, Rule


@dataclass(frozen=True, eq=False)
class Draft:
    """Proposed tokens: a chain, or a tree given by the parent of each node.

    Attributes:
        tokens: parents before children; siblings in the order in which they are tried.
        rows: the row (V,) that each token was drawn from; empty or None for tokens chosen deterministically.
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
        """Return the row that a token was drawn from."""
        return self.rows[node] if self.rows else None

    def children(self, node: int) -> list[int]:
        """Return the tokens that follow `node` (-1: the start)."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def joined(self, successor: Draft) -> Draft:
        """Return the concatenation of two chains."""
        rows = tuple(
            draft.row(node) for draft in (self, successor) for node in range(len(draft.tokens))
        )
        return Draft(self.tokens + successor.tokens, rows)

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each token from the start: 0 for a first token."""
        if self.parents is None:
            return tuple(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the start to `node`, inclusive."""
        if self.parents is None:
            return list(range(node + 1))
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = self.parents[node]
        return path

    def part(self, first: int, last: int | None = None) -> Draft:
        """Return the tokens of a chain from `first` to before `last`."""
        return Draft(self.tokens[first:last], self.rows[first:last])


#: A draft without tokens.
EMPTY_DRAFT = Draft(())


@dataclass(frozen=True)
class Verification:
    """The verified part of a draft.

    Attributes:
        path: accepted nodes, in order.
        target_token: the target's token after them: in place of a refused one, or one more; None if it was not
            evaluated there.
        refused: whether a drafted token was tried there and refused.
        tried: number of siblings tried at each place, including the last.
    """

    path: tuple[int, ...]
    target_token: int | None
    refused: bool
    tried: tuple[int, ...]


def walk(draft: Draft, rows: Sequence[Row], rule: Rule, position: int) -> Verification:
    """Follow the draft as far as the target accepts it.

    Args:
        draft: tokens from `position` of the answer on.
        rows: the target's row after the start, then after each drafted token; the last may be missing for a chain (the
            target has not seen its last token).
        rule: decides whether a token is accepted.
        position: of the first token in the answer.

    Cost: O(V) for each token tried when sampling, O(1) when greedy.
    """
    path: list[int] = []
    tried: list[int] = []
    node = -1
    while node + 1 < len(rows):
        p = rows[node + 1]
        refused = False
        place = position + len(path)
        children = draft.children(node)
        for turn, child in enumerate(children):
            token, q = draft.tokens[child], draft.row(child)
            if rule.accepts(token, p, q, place, turn):
                path.append(child)
                tried.append(turn + 1)
                node = child
                break
            p = rule.residual(token, p, q)
            refused = True
        else:
            if children:
                tried.append(len(children))
            return Verification(tuple(path), rule.choose(p, place), refused, tuple(tried))
    return Verification(tuple(path), None, False, tuple(tried))


def tree_mask(missing: int, tree: Draft) -> Tensor:
    """Return the (t, t) attention mask of `missing` tokens in a row followed by the nodes of a tree."""
    count = missing + len(tree.tokens)
    visible = torch.zeros(count, count, dtype=torch.bool)
    visible[:, :missing] = True
    visible[:missing, :missing].tril_()
    for node in range(len(tree.tokens)):
        visible[missing + node, [missing + ancestor for ancestor in tree.path_to(node)]] = True
    return visible
