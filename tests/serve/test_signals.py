"""Signals of a tower: attention and keys against formulas written out; hooks on a stub of vLLM's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.methods.base import Need
from espalier.serve import signals
from espalier.serve.clock import Stopwatch
from espalier.serve.places import Tower
from espalier.serve.signals import TowerSignals
from tests.serve.stubs import put_module

IMAGES, HEADS, TOKENS, WIDTH = 2, 3, 7, 4

SCALE = WIDTH**-0.5


class Attention(nn.Module):
    """vLLM's `MMEncoderAttention`: it gets queries, keys and values (images, S, H * Dh)."""

    head_size, scale = WIDTH, SCALE

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Any = None) -> Tensor:
        return value


class Block(nn.Module):
    """A part of the tower that vLLM has compiled."""

    do_not_compile = False


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    processes(monkeypatch, 1, lambda mean: mean)


def processes(
    monkeypatch: pytest.MonkeyPatch, number: int, reduce: Any, gather: Any = None
) -> None:
    put_module(
        monkeypatch,
        "vllm.distributed",
        get_tensor_model_parallel_world_size=lambda: number,
        tensor_model_parallel_all_reduce=reduce,
        tensor_model_parallel_all_gather=gather,
    )


def tower(class_tokens: int, layers: int = 2, square: int = 1) -> Tower:
    built = [Attention() for _ in range(layers)]
    entry, block = nn.Identity(), Block()
    return Tower(
        layers=built,
        compiled=[block],
        depth=layers + 1,
        class_tokens=class_tokens,
        entry=entry,
        projector=entry,
        square=square,
        to_units=lambda values: values.flatten(0, 1),
    )


def states(seed: int, shape: tuple[int, ...] = (IMAGES, TOKENS, HEADS, WIDTH)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow(signal: str, query: Tensor, key: Tensor, skip: int) -> Tensor:
    """A signal from queries and keys (images, S, H, Dh), token by token."""
    if signal.startswith("wide"):
        query, key = query.flatten(2).unsqueeze(2), key.flatten(2).unsqueeze(2)
        scale, heads = (HEADS * WIDTH) ** -0.5, 1
    else:
        scale, heads = SCALE, HEADS
    if signal.endswith("keys"):
        return torch.stack([key[:, :, head] for head in range(heads)]).mean(0)[:, skip:]
    rows = []
    for image in range(len(query)):
        askers = [0] if skip else range(query.shape[1])
        shares = []
        for asker in askers:
            for head in range(heads):
                logits = [
                    query[image, asker, head] @ entry * scale for entry in key[image, :, head]
                ]
                row = torch.stack(logits)
                shares.append(row if signal == "cls_logits" else row.exp() / row.exp().sum())
        rows.append(torch.stack(shares).mean(0)[skip:])
    return torch.stack(rows)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize(
    "signal", ["cls_attention", "cls_logits", "tower_keys", "wide_cls_attention", "wide_tower_keys"]
)
def test_a_signal_is_its_formula(signal: str, skip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries attend three at a time; a mean over heads, of shares and not of logits."""
    monkeypatch.setattr(signals, "BLOCK", 3)
    query, key = states(0), states(1)
    reader = TowerSignals(tower(skip), [], False, Stopwatch())
    values = reader._read(signal, query.transpose(1, 2), key.transpose(1, 2), SCALE)
    torch.testing.assert_close(values, slow(signal, query, key, skip))


def test_hooks_read_the_layers_that_are_needed_and_the_projector(monkeypatch: Any) -> None:
    built = tower(1)
    wanted = [Need("cls_attention"), Need("tower_keys", 0), Need("cls_logits", 0)]
    watch = TowerSignals(built, wanted, True, Stopwatch())
    query, key = states(2), states(3)

    def encode() -> None:
        for number, layer in enumerate(built.layers):
            flat = [(values + number).flatten(2) for values in (query, key)]
            layer(flat[0], key=flat[1], value=flat[0])
        built.entry(states(4, (IMAGES, TOKENS - 1, 5)))

    for _ in range(2):  # the second batch of pictures follows the first
        with watch.watching():
            assert built.compiled[0].do_not_compile
            encode()
        assert not built.compiled[0].do_not_compile
    encode()  # nobody watches any more
    last = slow("cls_attention", query + 1, key + 1, 1).flatten()
    torch.testing.assert_close(watch[wanted[0].key], last.repeat(2))
    keys = slow("tower_keys", query, key, 1).flatten(0, 1)
    torch.testing.assert_close(watch[wanted[1].key], keys.repeat(2, 1))
    torch.testing.assert_close(
        watch[wanted[2].key], slow("cls_logits", query, key, 1).flatten().repeat(2)
    )
    assert watch["features"].shape == (2 * IMAGES * (TOKENS - 1), 5)


def test_pictures_of_one_sequence_attend_to_themselves() -> None:
    """Qwen's towers take all pictures in one sequence, and their borders."""
    built = tower(0, layers=1)
    need = Need("cls_attention")
    watch = TowerSignals(built, [need], False, Stopwatch())
    query, key = states(5, (1, TOKENS, HEADS, WIDTH)), states(6, (1, TOKENS, HEADS, WIDTH))
    borders = torch.tensor([0, 2, TOKENS])
    with watch.watching():
        built.layers[0](query.flatten(2), key.flatten(2), key.flatten(2), cu_seqlens=borders)
    parts = [
        slow("cls_attention", query[:, part], key[:, part], 0)[0]
        for part in (slice(0, 2), slice(2, TOKENS))
    ]
    torch.testing.assert_close(watch[need.key], torch.cat(parts))


@pytest.mark.parametrize(
    "signal", ["cls_attention", "cls_logits", "tower_keys", "wide_cls_attention", "wide_tower_keys"]
)
def test_heads_on_two_processes_are_read_as_on_one(
    signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = (states(seed, (1, TOKENS, 4, WIDTH)).transpose(1, 2) for seed in (7, 8))
    reader = TowerSignals(tower(1), [], False, Stopwatch())
    whole = reader._read(signal, query, key, SCALE)
    sent: list[Tensor] = []

    def gather(part: Tensor, dim: int) -> Tensor:
        assert dim == 1
        return next(full for full in (query, key) if torch.equal(part, full[:, :2]))

    processes(monkeypatch, 2, lambda mean: sent.append(mean) or mean, gather)
    if not signal.startswith("wide"):
        reader._read(signal, query[:, 2:], key[:, 2:], SCALE)
    other = sent[0] if sent else None
    processes(monkeypatch, 2, lambda mean: mean + (mean if other is None else other), gather)
    torch.testing.assert_close(reader._read(signal, query[:, :2], key[:, :2], SCALE), whole)
