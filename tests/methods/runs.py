"""Methods through the real engine on tiny models, for the tests of single methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import Decoder, Plan, TokenReducer, View
from espalier.methods.none import NoReduction
from tests.family_runs import shown
from tests.methods.twins import best


def kept_by(
    adapter: Adapter,
    method: TokenReducer,
    chats: Sequence[list[dict]],
    ratio: float,
    samples: Sequence[str] | None = None,
    rule: str = "kept",
    count: int | None = None,
    **changes: Any,
) -> GeneratedBatch:
    """Generate with a method; `records[row].origin` are the tokens alive in the end."""
    inputs = adapter.encode(list(chats))
    with Session(adapter, method, Budget(rule, ratio, count), **changes) as session:
        return session.generate(
            inputs,
            samples,
            max_new_tokens=3,
            do_sample=False,
            output_logits=True,
            suppress_tokens=list(adapter.items(inputs)),
        )


@contextmanager
def noted(**modules: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Yield what modules return, call by call, by the names given to them."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in modules}
    with ExitStack() as hooks:
        for name, module in modules.items():
            note = outputs[name].append
            hooks.enter_context(
                module.register_forward_hook(lambda _module, _args, output, note=note: note(output))
            )
        yield outputs


def logits_of(query: Tensor, key: Tensor, n_heads: int) -> Tensor:
    """Return the scaled products (B, H, S, S) of projected queries and keys (B, S, H Dh)."""
    query, key = (part.unflatten(2, (n_heads, -1)).transpose(1, 2) for part in (query, key))
    return query @ key.transpose(2, 3) * query.shape[-1] ** -0.5


def watched(method: TokenReducer) -> tuple[TokenReducer, list[tuple[View, int, Plan]]]:
    """Return the same method, and the list of what it is shown and asked from now on, with its answers."""
    seen: list[tuple[View, int, Plan]] = []

    class Watched(type(method)):  # type: ignore[misc]
        def plan(self, view: View, keep: int) -> Plan:
            seen.append((view, keep, super().plan(view, keep)))
            return seen[-1][2]

    return Watched(**{field.name: getattr(method, field.name) for field in fields(method)}), seen


def left_by(
    seen: Sequence[tuple[View, int, Plan]], scores: Callable[[View], Sequence[float]]
) -> list[int]:
    """Return the tokens of one row that stay if each site keeps the best of what the last one left."""
    left = list(range(seen[0][0].tokens.shape[1]))
    for view, keep, _ in seen:
        assert view.tokens.shape[1] == len(left)
        left = [left[place] for place in best(scores(view), keep)]
    return left


def check_stages(
    adapter: Adapter,
    method: TokenReducer,
    chat: list[dict],
    ratio: float,
    scores: Callable[[View], Sequence[float]],
) -> SampleRecord:
    """Hold a method of several sites on a chat: each keeps the best of what the last one left; return its record."""
    watching, seen = watched(method)
    record = kept_by(adapter, watching, [chat], ratio).records[0]
    assert record.kept == tuple(keep for _, keep, _ in seen)
    assert record.origin.tolist() == left_by(seen, scores)
    return record


def views_of(adapter: Adapter, method: TokenReducer, chats: Sequence[list[dict]]) -> list[View]:
    """What the method would be shown at its first site, with everything kept."""
    site = method.sites(adapter.facts.text.layers)[0]
    return shown(adapter, [site], method.needs(site), chats)


def check_adaptive(
    adapter: Adapter,
    method: TokenReducer,
    chats: Sequence[list[dict]],
    ratio: float,
    count: Callable[[View, int], int],
) -> None:
    """Hold a method whose rows keep other counts: alone and in a batch, each keeps `count` of its view and budget."""
    plain = kept_by(adapter, NoReduction(), chats, 0.0)
    assert torch.equal(kept_by(adapter, method, chats, 0.0).logits, plain.logits)
    fast = kept_by(adapter, method, chats, ratio)
    slow = kept_by(adapter, method, chats, ratio, backend="emulate")
    assert torch.equal(fast.ids, slow.ids)
    assert (fast.logits - slow.logits).abs().max() < 1e-9 * slow.logits.abs().max()
    assert len({record.kept[0] for record in fast.records}) > 1
    for row, record in enumerate(fast.records):
        alone = kept_by(adapter, method, [chats[row]], ratio)
        assert alone.records[0].kept == record.kept
        assert torch.equal(alone.records[0].origin, record.origin)
        assert (alone.logits[0] - fast.logits[row]).abs().max() < 1e-3
        allowed = Budget("kept", ratio).keep(method, adapter.facts, record.visual, record.text)
        assert record.requested == allowed
        assert Budget("kept", ratio).verify(method, adapter.facts, record).kept == record.kept[0]
        (view,) = views_of(adapter, method, [chats[row]])
        assert record.kept[0] == count(view, allowed[0])


def recall(
    method: TokenReducer | Decoder,
    n_tokens: int,
    view_of: Callable[[Tensor], View],
    n_planted: int = 6,
    keep: int = 20,
) -> tuple[float, float, float]:
    """Return the share of planted tokens kept: by a method, by chance, and with its scores turned round.

    Args:
        method: what keeps the tokens with high scores; of a choice for each layer the last one counts.
        n_tokens: N.
        view_of: makes views of 16 rows from (16, N) scores.
        n_planted: tokens with a high score.
        keep: tokens kept.
    """
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(16, n_tokens, generator=generator)
    planted = torch.rand(16, n_tokens, generator=generator).argsort(dim=1)[:, :n_planted]
    scores = noise.scatter(1, planted, 3.0)

    def share_kept(turned: Tensor) -> float:
        view, reduces = view_of(turned), isinstance(method, TokenReducer)
        kept = method.plan(view, keep).kept if reduces else method.choose(view, keep)
        kept = kept if kept.dim() == 2 else kept[:, -1]
        return float((kept.unsqueeze(2) == planted.unsqueeze(1)).any(dim=1).float().mean())

    return share_kept(scores), keep / n_tokens, share_kept(1 / (scores + 0.1))
