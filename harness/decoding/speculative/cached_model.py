"""A loaded model as a side of speculative decoding: prefilled once, then fed what its cache does not hold yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.acceptance import Row
from espalier.harness.decoding.speculative.drafts import NOTHING, Draft, tree_sight
from espalier.harness.decoding.speculative.meter import Meter
from espalier.harness.decoding.speculative.samplers import Sampler
from espalier.harness.engine.finite_logits import NonFiniteLogits
from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.text.cuda_graphs import Graphs
from espalier.harness.engine.text.kv_cache import IndexedCache
from espalier.harness.engine.text.text_stack import TextStack

#: Runs a prompt into a cache and returns logits (V,) behind it and the position (..., 1, 1) that follows.
Prefill = Callable[[IndexedCache], tuple[Tensor, Tensor]]


class CachedModel:
    """One model and one prompt: what it says behind any answer.

    The cache holds the prompt and some answer. Whatever is asked next, the part that both answers share stays, the rest
    is cut off, and only what is missing is fed. Of a verified tree the path that was taken stays. Rows are remembered
    from the last place asked for on; who goes back behind it pays one token.

    Args:
        adapter: the model.
        sampler: how its logits become rows.
        room: longest answer, drafted tokens and all nodes of a tree included.
        prefill: runs the prompt, when the side is asked first.
        graphs: as in `TextStack`.
    """

    def __init__(
        self,
        adapter: Parts,
        sampler: Sampler,
        room: int,
        prefill: Prefill,
        graphs: Graphs | None = None,
    ) -> None:
        self.adapter = adapter
        self.sampler = sampler
        self.room = room
        self.graphs = graphs
        self.stack = TextStack(adapter, room, graphs)
        self._prefill: Prefill | None = prefill
        #: Tokens of the answer whose keys and values the cache holds behind the prompt's.
        self.fed: list[int] = []
        self._rows: dict[int, Row] = {}
        self._tree = NOTHING
        self._tree_rows: tuple[Row, ...] = ()
        #: Finite if all logits of the last forward are.
        self._sum = torch.zeros(())

    @property
    def cache(self) -> IndexedCache:
        """Keys and values of the prompt and of what is held behind it."""
        return self.stack.cache

    @property
    def started(self) -> bool:
        """Whether the prompt has been run."""
        return self._prefill is None

    @torch.inference_mode()
    def start(self) -> None:
        """Run the prompt, once."""
        if self._prefill is None:
            return
        self.first, self.stack.following = self._prefill(self.cache)
        self._prefill = None
        # Whoever takes the time of a prefill takes that of its kernels, not of their launch.
        Meter.of(self.adapter.devices).rest()
        self._rows[0] = self.sampler.rows(self.first[None], self._pasts([], 0))[0]

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], draft: Draft) -> list[Row]:
        """Return the row behind `tokens`, then behind each token of a drafted chain or tree, in one forward.

        Greedy rows are Python ints, fetched from the device all at once; sampling ones stay there.

        Raises:
            NonFiniteLogits: the forward's logits hold NaN or infinity.
        """
        self.start()
        first = len(tokens)
        if draft.parents is None:
            whole = [*tokens, *draft.tokens]
            self._settle(whole, first)
            self._feed(whole)
            found = [self._rows[place] for place in range(first, len(whole) + 1)]
        else:
            self._settle(list(tokens), first)
            self._feed(list(tokens), draft)
            found = [self._rows[first], *self._tree_rows]
        if not bool(self._sum.isfinite()):  # the rows are waited for as well
            raise NonFiniteLogits("an answer", first)
        self._forget(first)
        return found if self.sampler.samples else list(_ids(found))

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next `count` tokens, with their rows if they were drawn; nobody waits for any but the last."""
        self.start()
        first = len(tokens)
        self._settle(list(tokens), first)
        self._feed(list(tokens))
        said: list[Tensor] = []
        rows = [self._rows[first]]
        past = self._answer(tokens) if self.sampler.reads_past else None
        with self.stack.folding():
            while True:
                said.append(self.sampler.pick(rows[-1], first + len(rows) - 1))
                if len(said) == count:
                    break
                pasts = [] if past is None else [torch.cat([past, torch.stack(said)])]
                logits = self.stack.run(said[-1].view(1), [first + len(said) - 1])
                rows += self.sampler.rows(logits, pasts)
        found: list[int] = torch.stack(said).tolist()
        self.fed += found[: count - 1]
        drawn_from = tuple(row for row in rows if isinstance(row, Tensor) and self.sampler.samples)
        self._rows |= dict(enumerate(drawn_from or found, first))
        self._forget(first)
        return Draft(tuple(found), drawn_from)

    @torch.inference_mode()
    def behind(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits (V,) behind `tokens`."""
        self.start()
        self._settle(list(tokens[:-1]))
        if not tokens:
            return self.first
        logits = self._feed(list(tokens))
        self._forget(len(tokens))
        return logits[-1]

    @torch.inference_mode()
    def adopt(self, tokens: Sequence[int], source: CachedModel) -> None:
        """Copy keys and values of `tokens`, which `source` holds too, instead of computing them.

        Raises:
            ValueError: the cache holds anything else behind the prompt, or `source` does not hold the tokens.
        """
        held, wanted = len(self.fed), list(tokens)
        if self.fed != wanted[:held] or source.fed[: len(wanted)] != wanted:
            raise ValueError("only what follows the tokens held can be taken from another side")
        behind = len(source.fed) + len(source._tree.tokens)
        self.cache.copy(source.cache, behind - held, len(wanted) - held)
        self.fed = wanted

    @torch.inference_mode()
    def cut(self, length: int) -> None:
        """Go back to the first `length` tokens held."""
        self._settle(self.fed[:length])

    # ------------------------------------------------------------------ going back

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Tokens of the prompt that each layer holds."""
        answer = len(self.fed) + len(self._tree.tokens)
        return tuple(length - answer for length in self.cache.lengths)

    def _settle(self, tokens: list[int], first: int | None = None) -> None:
        """Cut the cache back to what it shares with `tokens`, so that rows from `first` on are known or come anew."""
        shared = common_length(self.fed, tokens)
        path: list[int] = []
        if shared == len(self.fed) and self._tree.tokens:
            path = self._path(tokens[shared:])
        for row, node in enumerate(path, shared + 1):
            self._rows[row] = self._tree_rows[node]
        gone, nodes = len(self.fed) - shared, len(self._tree.tokens)
        if path and path != list(range(len(path))):
            self.cache.keep(nodes, torch.tensor(path, device=self.stack.device))
        else:
            self.cache.cut(gone + nodes - len(path))
        del self.fed[shared:]
        self.fed += [self._tree.tokens[node] for node in path]
        self._tree, self._tree_rows = NOTHING, ()
        held = len(self.fed)
        self._rows = {place: row for place, row in self._rows.items() if place <= held}
        asked = range(held + 1 if first is None else first, held + 1)
        known = next((place - 1 for place in asked if place not in self._rows), held)
        if known < held:  # the row of a token held was forgotten: that token is fed once more
            self.cache.cut(held - known)
            del self.fed[known:]

    def _path(self, tokens: list[int]) -> list[int]:
        """Return the nodes of the tree that `tokens` follow."""
        path: list[int] = []
        node = -1
        for token in tokens:
            children = self._tree.children(node)
            taken = next((child for child in children if self._tree.tokens[child] == token), None)
            if taken is None:
                break
            path.append(taken)
            node = taken
        return path

    def _forget(self, first: int) -> None:
        """Let go of rows that nobody will ask for unless they go back; the prompt's own stays."""
        self._rows = {
            place: row for place, row in self._rows.items() if place == 0 or place >= first
        }

    # ------------------------------------------------------------------ going on

    def _feed(self, tokens: list[int], tree: Draft = NOTHING) -> Tensor:
        """Feed what is missing of `tokens`, then all nodes of `tree`; return the logits (t, V) of both."""
        held, length = len(self.fed), len(tokens)
        missing = tokens[held:]
        if not missing and not tree.tokens:
            return self.first[None][:0]
        places = [*range(held, length), *(length + depth for depth in tree.depths)]
        ids = self._answer([*missing, *tree.tokens])
        seen = tree_sight(len(missing), tree) if tree.tokens else None
        logits = self.stack.run(ids, places, seen)
        self._sum = logits.sum(dtype=torch.float32)
        rows = self.sampler.rows(logits, self._pasts(tokens, held + 1, tree))
        count = len(missing)
        self._rows |= dict(enumerate(rows[:count], held + 1))
        self.fed = tokens
        self._tree, self._tree_rows = tree, rows[count:]
        return logits

    def _answer(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.long, device=self.stack.device)

    def _pasts(self, tokens: list[int], first: int, tree: Draft = NOTHING) -> list[Tensor]:
        """Return the answers that end at place `first` to the end of `tokens`, then at each node; for processors."""
        if not self.sampler.reads_past:
            return []
        answer, nodes = self._answer(tokens), self._answer(tree.tokens)
        ends = [answer[:end] for end in range(first, len(tokens) + 1)]
        ways = [tree.way(node) for node in range(len(tree.tokens))]
        return [*ends, *(torch.cat([answer, nodes[way]]) for way in ways)]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two answers share from the first on."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _ids(rows: Sequence[Row]) -> list[int]:
    """Return greedy rows as numbers, with one transfer for all that are not yet."""
    waiting = [row for row in rows if isinstance(row, Tensor)]
    if not waiting:
        return [int(row) for row in rows]
    fetched = iter(torch.stack(waiting).tolist())
    return [next(fetched) if isinstance(row, Tensor) else row for row in rows]
