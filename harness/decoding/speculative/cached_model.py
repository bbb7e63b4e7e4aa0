"""A loaded model as one side of speculative decoding; sparse-to-dense drafting on a part of its own cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.drafts import EMPTY_DRAFT, Draft, Row, tree_mask
from espalier.harness.decoding.speculative.samplers import TokenSampler
from espalier.harness.decoding.speculative.state_machine import Meter
from espalier.harness.engine.finite_logits import NonFiniteLogits
from espalier.harness.engine.kv_cache import IndexedCache
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.text_stack import Graphs, TextStack

#: Runs a prompt into a cache and returns the logits (V,) after it and the next position (..., 1, 1).
Prefill = Callable[[IndexedCache], tuple[Tensor, Tensor]]


class CachedModel:
    """One model and one prompt: its next-token rows after any answer.

    The cache holds the prompt and some answer. For a new answer, the common part stays in the cache, the rest is cut
    off, and only missing tokens are fed. Of a verified tree the accepted path stays. Rows are kept from the last
    requested place on; going back before it costs one token.

    Args:
        adapter: the model.
        sampler: turns its logits into rows.
        room: longest answer, including drafted tokens and all nodes of a tree.
        prefill: runs the prompt on first use.
        graphs: as in `TextStack`.
    """

    def __init__(
        self,
        adapter: ModelParts,
        sampler: TokenSampler,
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
        #: Tokens of the answer with keys and values in the cache, after the prompt's.
        self.fed: list[int] = []
        self._rows: dict[int, Row] = {}
        self._tree = EMPTY_DRAFT
        self._tree_rows: tuple[Row, ...] = ()
        #: Finite if all logits of the last forward are.
        self._sum = torch.zeros((), device=self.stack.device)

    @property
    def cache(self) -> IndexedCache:
        """Keys and values of the prompt and of the fed tokens."""
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
        # The measured time of a prefill must cover its kernels, not only their launch.
        Meter.of(self.adapter.devices).wait()
        self._rows[0] = self.sampler.rows(self.first[None], self._pasts([], 0))[0]

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], draft: Draft) -> list[Row]:
        """Return the row after `tokens`, then after each token of a drafted chain or tree, in one forward.

        Greedy rows are Python ints, fetched from the device in one transfer; sampling ones stay there.

        Raises:
            NonFiniteLogits: the forward's logits hold NaN or infinity.
        """
        self.start()
        first = len(tokens)
        if draft.parents is None:
            answer = [*tokens, *draft.tokens]
            self._settle(answer, first)
            self._feed(answer)
            rows: list[Row] = [self._rows[place] for place in range(first, len(answer) + 1)]
        else:
            self._settle(list(tokens), first)
            self._feed(list(tokens), draft)
            rows = [self._rows[first], *self._tree_rows]
        self._forget(first)
        is_finite: Row = self._sum.isfinite().long()
        if not self.sampler.samples:
            *rows, is_finite = _ids([*rows, is_finite])
        if not int(is_finite):
            raise NonFiniteLogits("an answer", first)
        return rows

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next `count` tokens, with their rows if they were drawn; only one synchronization at the end."""
        self.start()
        first = len(tokens)
        self._settle(list(tokens), first)
        self._feed(list(tokens))
        chosen: list[Tensor] = []
        rows = [self._rows[first]]
        past = self._answer(tokens) if self.sampler.reads_past else None
        with self.stack.folding():
            while True:
                chosen.append(self.sampler.pick(rows[-1], first + len(rows) - 1))
                if len(chosen) == count:
                    break
                pasts = [] if past is None else [torch.cat([past, torch.stack(chosen)])]
                logits = self.stack.run(chosen[-1].view(1), [first + len(chosen) - 1])
                rows += self.sampler.rows(logits, pasts)
        ids: list[int] = torch.stack(chosen).tolist()
        self.fed += ids[: count - 1]
        drawn_from = tuple(row for row in rows if isinstance(row, Tensor) and self.sampler.samples)
        self._rows |= dict(enumerate(drawn_from or ids, first))
        self._forget(first)
        return Draft(tuple(ids), drawn_from)

    @torch.inference_mode()
    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits (V,) after `tokens`."""
        self.start()
        self._settle(list(tokens[:-1]))
        if not tokens:
            return self.first
        logits = self._feed(list(tokens))
        self._forget(len(tokens))
        return logits[-1]

    @torch.inference_mode()
    def adopt(self, tokens: Sequence[int], source: CachedModel) -> None:
        """Copy keys and values of `tokens` from `source`, which holds them, instead of computing them.

        Raises:
            ValueError: the cache holds other tokens after the prompt, or `source` does not hold the tokens.
        """
        fed, answer = len(self.fed), list(tokens)
        if self.fed != answer[:fed] or source.fed[: len(answer)] != answer:
            raise ValueError("only tokens after those in the cache can be copied from another side")
        source_length = len(source.fed) + len(source._tree.tokens)
        self.cache.copy(source.cache, source_length - fed, len(answer) - fed)
        self.fed = answer

    @torch.inference_mode()
    def cut(self, length: int) -> None:
        """Cut the cache back to the first `length` fed tokens."""
        self._settle(self.fed[:length])

    # ------------------------------------------------------------------ going back

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Number of prompt tokens that each layer holds."""
        answer = len(self.fed) + len(self._tree.tokens)
        return tuple(length - answer for length in self.cache.lengths)

    def _settle(self, tokens: list[int], first: int | None = None) -> None:
        """Cut the cache to its common part with `tokens`, so that rows from `first` on are stored or recomputed."""
        shared = common_length(self.fed, tokens)
        path: list[int] = []
        if shared == len(self.fed) and self._tree.tokens:
            path = self._accepted_nodes(tokens[shared:])
        for row, node in enumerate(path, shared + 1):
            self._rows[row] = self._tree_rows[node]
        surplus, nodes = len(self.fed) - shared, len(self._tree.tokens)
        if path and path != list(range(len(path))):
            self.cache.keep(nodes, torch.tensor(path, device=self.stack.device))
        else:
            self.cache.cut(surplus + nodes - len(path))
        del self.fed[shared:]
        self.fed += [self._tree.tokens[node] for node in path]
        self._tree, self._tree_rows = EMPTY_DRAFT, ()
        length = len(self.fed)
        self._rows = {place: row for place, row in self._rows.items() if place <= length}
        needed = range(length + 1 if first is None else first, length + 1)
        valid = next((place - 1 for place in needed if place not in self._rows), length)
        if valid < length:  # the row of a fed token was dropped: feed that token again
            self.cache.cut(length - valid)
            del self.fed[valid:]

    def _accepted_nodes(self, tokens: list[int]) -> list[int]:
        """Return the nodes of the tree that `tokens` follow."""
        path: list[int] = []
        node = -1
        for token in tokens:
            children = self._tree.children(node)
            match = next((child for child in children if self._tree.tokens[child] == token), None)
            if match is None:
                break
            path.append(match)
            node = match
        return path

    def _forget(self, first: int) -> None:
        """Drop rows before `first`, except the prompt's; they are needed again only after going back."""
        self._rows = {
            place: row for place, row in self._rows.items() if place == 0 or place >= first
        }

    # ------------------------------------------------------------------ going on

    def _feed(self, tokens: list[int], tree: Draft = EMPTY_DRAFT) -> Tensor:
        """Feed the missing part of `tokens`, then all nodes of `tree`; return the logits (t, V) of both."""
        fed, length = len(self.fed), len(tokens)
        missing = tokens[fed:]
        if not missing and not tree.tokens:
            return self.first[None][:0]
        places = [*range(fed, length), *(length + depth for depth in tree.depths)]
        ids = self._answer([*missing, *tree.tokens])
        mask = tree_mask(len(missing), tree) if tree.tokens else None
        logits = self.stack.run(ids, places, mask)
        self._sum = logits.sum(dtype=torch.float32)
        rows = self.sampler.rows(logits, self._pasts(tokens, fed + 1, tree))
        count = len(missing)
        self._rows |= dict(enumerate(rows[:count], fed + 1))
        self.fed = tokens
        self._tree, self._tree_rows = tree, rows[count:]
        return logits

    def _answer(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.long, device=self.stack.device)

    def _pasts(self, tokens: list[int], first: int, tree: Draft = EMPTY_DRAFT) -> list[Tensor]:
        """Return the answers up to each place from `first`, then up to each node, for processors that read them."""
        if not self.sampler.reads_past:
            return []
        answer, nodes = self._answer(tokens), self._answer(tree.tokens)
        ends = [answer[:end] for end in range(first, len(tokens) + 1)]
        paths = [tree.path_to(node) for node in range(len(tree.tokens))]
        return [*ends, *(torch.cat([answer, nodes[path]]) for path in paths)]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two answers."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _ids(rows: Sequence[Row]) -> Sequence[Row]:
    """Return greedy rows as ints, with one transfer for those still on the device."""
    tensors = [row for row in rows if isinstance(row, Tensor)]
    if not tensors:
        return [int(row) for row in rows]
    fetched = iter(torch.stack(tensors).tolist())
    return [next(fetched) if isinstance(row, Tensor) else row for row in rows]


class SparseDrafter:
    """Drafts with the target on a second cache: per layer all words and the kept visual tokens, at their positions.

    Keys and values of verified tokens are copied from the target's cache, and the draft's own are dropped. The target
    must not run meanwhile, since both share its weights and its cache.

    Args:
        target: the verifying side.
        kept: (layers, K) visual tokens that each layer of the draft sees, ascending.
        visual: (N,) position of each visual token in the prompt.
        sampler: turns its logits into tokens; None: the target's. A sampling one needs random numbers.

    Raises:
        ValueError: `kept` does not have one row per layer.
    """

    def __init__(
        self, target: CachedModel, kept: Tensor, visual: Tensor, sampler: TokenSampler | None = None
    ) -> None:
        layers = len(target.cache.lengths)
        if kept.dim() != 2 or kept.shape[0] != layers:
            raise ValueError(
                f"kept visual tokens {tuple(kept.shape)} are not one row for each of {layers} layers"
            )
        self._target = target
        self._kept, self._visual = kept, visual
        draft_sampler = sampler or target.sampler
        self._side = CachedModel(
            target.adapter, draft_sampler, target.room, self._prefill, target.graphs
        )
        self._dense = 0

    @property
    def cache(self) -> IndexedCache:
        """Keys and values that the draft attends to."""
        return self._side.cache

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next `count` tokens; only tokens that the target's cache lacks are fed."""
        target, side = self._target, self._side
        target.start()
        side.start()
        side.cut(min(self._dense, common_length(side.fed, tokens)))
        # The last token's row comes from the draft's own pass, so that token is always fed, not copied.
        self._dense = common_length(target.fed, tokens[:-1])
        side.adopt(tokens[: self._dense], target)
        return side.draft(tokens, count)

    def _prefill(self, cache: IndexedCache) -> tuple[Tensor, Tensor]:
        """Gather the kept part of the prompt, which the target has run."""
        target = self._target
        shape = len(self._kept), target.prompt_lengths[0]
        visible = torch.ones(shape, dtype=torch.bool, device=self._kept.device)
        visual = self._visual.to(visible.device)
        visible[:, visual] = False
        visible.scatter_(1, visual[self._kept], True)
        slots = visible.nonzero()[:, 1].view(len(visible), -1)
        cache.gather(target.cache, slots)
        return target.first, target.stack.following
