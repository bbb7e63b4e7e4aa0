"""Drafted tokens, their acceptance (greedy, or by rejection sampling), and the walk that verifies them.

Rejection sampling preserves the target's distribution. Random numbers derive from positions: both sides of a run, and
every rerun, draw the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Purpose = Literal["draft", "accept", "replace"]

#: A side's prediction of the next token: the likeliest id, or probabilities (V,).
Row = Tensor | int


@dataclass(frozen=True)
class RandomNumbers:
    """Uniform numbers by (seed, position, purpose)."""

    seed: int

    def uniform(self, position: int, purpose: Purpose, turn: int = 0) -> float:
        """Return a number in [0, 1) for a position of the answer; `turn` counts siblings tried there."""
        name = f"{self.seed}/{position}/{purpose}/{turn}".encode()
        digest = hashlib.blake2b(name, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


class Greedy:
    """A token is accepted if it is the target's likeliest; rows are the likeliest ids (ties: the lowest)."""

    def accepts(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare ids."""
        return token == int(p)

    def residual(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return the same row: the likeliest token stays the likeliest."""
        return p

    def choose(self, p: Row, position: int) -> int:
        """Return the likeliest id."""
        return int(p)


def draw_from(row: Tensor, level: float) -> Tensor:
    """Return () the id at which the cumulative row (V,) passes `level` in [0, 1) of its sum, without synchronizing."""
    cumulated = row.double().cumsum(0)
    index = torch.searchsorted(cumulated, level * cumulated[-1:], right=True)
    return index[0].clamp(max=len(row) - 1)


@dataclass(frozen=True)
class Sampling:
    """Rejection sampling: keep with min(1, p/q), else draw from norm(max(0, p - q)); rows are probabilities.

    Accepted and replaced tokens together have the target's own distribution (Leviathan et al., arXiv 2211.17192). A
    token chosen deterministically counts as drawn from a one-hot row. A drafter may know fewer ids than the target; it
    never draws ids after its last one.
    """

    numbers: RandomNumbers

    def accepts(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare the position's number with p / q."""
        draft_probability = 1.0 if q is None else float(q[token])
        level = self.numbers.uniform(position, "accept", turn)
        return level * draft_probability < float(_probabilities(p)[token])

    def residual(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return norm(max(0, p - q)); p itself if the difference is zero, which only rounding can cause."""
        remainder = _probabilities(p).clone()
        if q is None:
            remainder[token] = 0
        else:
            drafted = q.to(remainder.device)
            remainder[: len(drafted)] -= drafted
            remainder = remainder.clamp(min=0)
        total = remainder.sum()
        return remainder / total if float(total) > 0 else p

    def choose(self, p: Row, position: int) -> int:
        """Draw from `p`."""
        return self.draw(_probabilities(p), position, "replace")

    def draw(self, row: Tensor, position: int, purpose: Purpose) -> int:
        """Return the id at which the cumulative row (V,) passes the position's number."""
        return int(draw_from(row, self.numbers.uniform(position, purpose)))


#: Compares drafted tokens with the target's next-token row.
Rule = Greedy | Sampling


def _probabilities(row: Row) -> Tensor:
    """Return the row of a sampling side.

    Raises:
        TypeError: it is the id of a greedy side.
    """
    if isinstance(row, int):
        raise TypeError("sampling judges rows of probabilities; this side has its likeliest id")
    return row


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
    """

    path: tuple[int, ...]
    target_token: int | None
    refused: bool


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
    node = -1
    while node + 1 < len(rows):
        p = rows[node + 1]
        refused = False
        place = position + len(path)
        for turn, child in enumerate(draft.children(node)):
            token, q = draft.tokens[child], draft.row(child)
            if rule.accepts(token, p, q, place, turn):
                path.append(child)
                node = child
                break
            p = rule.residual(token, p, q)
            refused = True
        else:
            return Verification(tuple(path), rule.choose(p, place), refused)
    return Verification(tuple(path), None, False)


def tree_mask(missing: int, tree: Draft) -> Tensor:
    """Return the (t, t) attention mask of `missing` tokens in a row followed by the nodes of a tree."""
    count = missing + len(tree.tokens)
    visible = torch.zeros(count, count, dtype=torch.bool)
    visible[:, :missing] = True
    visible[:missing, :missing].tril_()
    for node in range(len(tree.tokens)):
        visible[missing + node, [missing + ancestor for ancestor in tree.path_to(node)]] = True
    return visible
