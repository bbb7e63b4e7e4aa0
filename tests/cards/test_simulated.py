"""The simulated cards refuse what GPUs refuse, and nothing else; they count what waits, and change no value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from espalier.harness.tools.rehearsal.simulated_cards import HOST, SimulatedCards

Meeting = Callable[[Tensor, Tensor], object]


def places(like: Tensor) -> Tensor:
    """Indices on the device of a tensor, and of its shape."""
    return like.long() * 0


#: Refused of two cards, and of a card and the host.
BOTH: dict[str, Meeting] = {
    "add": lambda x, y: x + y,
    "rsub": lambda x, y: y - x,
    "in_place": lambda x, y: x.mul_(y),
    "into_the_other": lambda x, y: y.mul_(x),
    "out": lambda x, y: torch.add(x, x, out=y),
    "compared": lambda x, y: x > y,
    "equal": lambda x, y: torch.equal(x, y),
    "allclose": lambda x, y: torch.allclose(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "pow": lambda x, y: x**y,
    "lerp": lambda x, y: x.lerp(y, 0.5),
    "lerp_weight": lambda x, y: x.lerp(x, y),
    "clamp": lambda x, y: x.clamp(min=y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "matmul": lambda x, y: x @ y,
    "matrix_vector": lambda x, y: x @ y[0],
    "bmm": lambda x, y: torch.bmm(x[None], y[None]),
    "addmm": lambda x, y: torch.addmm(y, x, x),
    "baddbmm": lambda x, y: torch.baddbmm(x[None], x[None], y[None]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "einsum": lambda x, y: torch.einsum("ab,cb->ac", x, y),
    "cdist": lambda x, y: torch.cdist(x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "stack_of_numbers": lambda x, y: torch.stack([x[0, 0], y[0, 0]]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where_condition": lambda x, y: torch.where(y > 0, x, x),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.0),
    "masked_select": lambda x, y: x.masked_select(y > 0),
    "masked_scatter": lambda x, y: x.masked_scatter(x > 0, y),
    "gather": lambda x, y: x.gather(0, places(y)),
    "take_along_dim": lambda x, y: x.take_along_dim(places(y), 0),
    "scatter": lambda x, y: x.scatter(0, places(y), x),
    "scatter_source": lambda x, y: x.scatter(0, places(x), y),
    "scatter_add": lambda x, y: x.scatter_add(0, places(y), x),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, places(y), x, "amax"),
    "index_select": lambda x, y: x.index_select(0, places(y)[0]),
    "index_add": lambda x, y: x.index_add(0, places(x)[0], y),
    "index_copy": lambda x, y: x.index_copy(0, places(y)[0, :1], x[:1]),
    "index_fill": lambda x, y: x.index_fill(0, places(y)[0], 0.0),
    "index_of_a_card": lambda x, y: y[places(x)],
    "mask_of_a_card": lambda x, y: y[x > 0],
    "written_by_index": lambda x, y: x.__setitem__(places(x), y),
    "written_by_mask": lambda x, y: x.__setitem__(x > 0, y[y > 0]),
    "embedding": lambda x, y: F.embedding(places(y), x),
    "linear": lambda x, y: F.linear(x, y),
    "bias": lambda x, y: F.linear(x, x, y[0]),
    "conv": lambda x, y: F.conv1d(x[None], y[:, :, None]),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[0]),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,), y[0]),
    "sdpa": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "sdpa_mask": lambda x, y: F.scaled_dot_product_attention(
        x[None], x[None], x[None], y[None] > 0
    ),
    "cross_entropy": lambda x, y: F.cross_entropy(x, places(y)[0]),
    "searchsorted": lambda x, y: torch.searchsorted(x, y),
    "bucketize": lambda x, y: torch.bucketize(y, x[0]),
    "isin": lambda x, y: torch.isin(x, y),
    "bincount": lambda x, y: x[0].long().bincount(y[0]),
}

#: Refused of two cards, and not of a card and the host: single numbers and indices of the host.
CARDS: dict[str, Meeting] = {
    "number": lambda x, y: x * y.sum(),
    "number_first": lambda x, y: y.sum() - x,
    "number_clamp": lambda x, y: x.clamp(max=y.sum()),
    "number_lerp": lambda x, y: x.lerp(x, y.sum()),
    "number_pow": lambda x, y: x ** y.sum(),
    "number_where": lambda x, y: torch.where(x > 0, x, y.sum()),
    "number_compared": lambda x, y: x <= y.sum(),
    "number_minimum": lambda x, y: x.minimum(y.sum()),
    "number_in_place": lambda x, y: x.add_(y.sum()),
    "index": lambda x, y: x[places(y)],
    "index_mask": lambda x, y: x[y > 0],
    "index_written": lambda x, y: x.__setitem__(places(y), 1.0),
    "mask_written": lambda x, y: x.__setitem__(y > 0, 0.0),
    "index_put": lambda x, y: x.index_put((places(y),), x),
    "number_filled": lambda x, y: x.fill_(y.sum()),
    "number_masked_fill": lambda x, y: x.masked_fill(x > 0, y.sum()),
    "number_written": lambda x, y: x.__setitem__(places(x), y.sum()),
}

#: Never refused.
NEVER: dict[str, Meeting] = {
    "copied": lambda x, y: x.copy_(y),
    "written_by_slice": lambda x, y: x.__setitem__(slice(2), y[:2]),
    "shape": lambda x, y: x.expand_as(y).view_as(y).reshape_as(y),
    "like": lambda x, y: torch.zeros_like(y) + y.new_ones(4),
    "type_as": lambda x, y: x.type_as(y) + y,
    "numbers_read": lambda x, y: torch.tensor([x[0, 0], y[0, 0]]),
    "numbers_as_tensor": lambda x, y: torch.as_tensor([x[0, 0], y[0, 0]], device="cuda:1"),
}

#: What torch's own fake tensors let pass, since they do not look at the devices of indices, nor join numbers.
UNCHECKED = {
    *("stack_of_numbers", "index_of_a_card", "index", "index_written", "mask_written", "index_put"),
    "number_written",
}
#: What these cannot run: they have no values.
VALUED = {
    *("index_mask", "numbers_read", "numbers_as_tensor", "equal", "allclose", "masked_select"),
    *("mask_of_a_card", "written_by_mask", "bincount"),
}

OTHERS = ("cuda:1", "cpu")


def square(device: str) -> Tensor:
    return torch.ones(4, 4).to(device)


def is_refused(name: str, device: str) -> bool:
    """Whether an operation is refused for tensors of the first card and of another device."""
    meeting = {**BOTH, **CARDS, **NEVER}[name]
    try:
        meeting(square("cuda:0"), square(device))
    except RuntimeError as error:
        if "device" not in str(error).lower():
            raise
        return True
    return False


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*BOTH, *CARDS, *NEVER])
def test_devices_meet_as_on_gpus(name: str) -> None:
    expected = (name not in NEVER, name in BOTH)
    with SimulatedCards(2):
        assert not is_refused(name, "cuda:0")
        assert tuple(is_refused(name, device) for device in OTHERS) == expected
    if name not in UNCHECKED | VALUED:
        with FakeTensorMode():
            assert tuple(is_refused(name, device) for device in OTHERS) == expected


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda card: card.numpy(), "numpy"),
        (lambda card: np.asarray(card), "numpy"),
        (lambda card: torch.ones(1, device="cuda:2"), "invalid device ordinal"),
        (lambda card: torch.rand(1, device="cuda:1", generator=torch.Generator()), "generator"),
        (lambda card: torch.rand(1, generator=torch.Generator("cuda:1")), "generator"),
    ],
)
def test_what_is_no_meeting_is_refused_too(call: Callable[[Tensor], object], line: str) -> None:
    with SimulatedCards(2), pytest.raises((RuntimeError, TypeError), match=line):
        call(square("cuda:0"))


def test_a_tensor_outlives_its_card_and_is_no_use() -> None:
    with SimulatedCards():
        card = square("cuda:0")
    with pytest.raises(RuntimeError, match="are gone"):
        card.sum()


def test_what_is_made_of_a_card_lies_there() -> None:
    generator = torch.Generator()
    with SimulatedCards(2) as cards:
        card = torch.arange(4, device="cuda:1")
        parts = (
            card + 1,
            card.new_zeros(2),
            card.new_tensor(range(2)),
            torch.zeros_like(card),
            *card.float().unbind(),
        )
        drawn = torch.rand(3, device="cuda:1", generator=torch.Generator("cuda:1"))
        parameter = nn.Parameter(drawn, requires_grad=False)
        module = nn.Linear(2, 2).to("cuda:1")
        assert {str(part.device) for part in (*parts, drawn, parameter, *module.parameters())} == {
            "cuda:1"
        }
        assert card.to(card.device) is card
        host = (torch.from_numpy(np.ones(2)), torch.rand(2, generator=generator), card.cpu())
        assert {part.device for part in (*host, card.to("cpu").pin_memory())} == {HOST}
        assert cards.moves == 0
        parameter.data = card.to("cuda:0", torch.float64)
        assert (cards.moves, parameter.dtype, str(parameter.device)) == (
            *(1, torch.float64),
            "cuda:0",
        )
        assert parameter.tolist() == [0, 1, 2, 3]


#: What the host does with a tensor of a card: how often it waits for the card, and how often it sends to it.
TRANSFERS: dict[str, tuple[Callable[[Tensor], object], int, int]] = {
    "item": (lambda card: card[0, 0].item(), 1, 0),
    "float": (lambda card: float(card.sum()), 1, 0),
    "bool": (lambda card: bool((card > 0).any()), 1, 0),
    "index": (lambda card: [5, 6][card[0, 0].long()], 1, 0),
    "list": (lambda card: card.tolist(), 1, 0),
    "cpu": (lambda card: card.cpu(), 1, 0),
    "to_host": (lambda card: card.to("cpu"), 1, 0),
    "copied_to_host": (lambda card: torch.ones(4, 4).copy_(card), 1, 0),
    "equal": (lambda card: torch.equal(card, card), 1, 0),
    "allclose": (lambda card: torch.allclose(card, card), 1, 0),
    "nonzero": (lambda card: card.nonzero(), 1, 0),
    "where": (lambda card: torch.where(card > 0), 1, 0),
    "unique": (lambda card: card.unique(), 1, 0),
    "unique_rows": (lambda card: card.unique(dim=0), 1, 0),
    "unique_consecutive": (lambda card: card.unique_consecutive(), 1, 0),
    "masked_select": (lambda card: card.masked_select(card > 0), 1, 0),
    "mask": (lambda card: card[card > 0], 1, 0),
    "mask_written": (lambda card: card.__setitem__(card > 0, card[0, 0]), 1, 0),
    "bincount": (lambda card: card[0].long().bincount(), 1, 0),
    "repeated": (lambda card: card.repeat_interleave(card[0].long(), 0), 1, 0),
    "one_hot": (lambda card: F.one_hot(card.long()), 1, 0),
    "numbers": (lambda card: torch.tensor([card[0, 0], card[1, 1]]), 2, 0),
    "masked_fill_of_a_card": (lambda card: card.masked_fill(card > 0, card[0, 0]), 1, 0),
    "inverse": (lambda card: torch.linalg.inv(card + torch.eye(4, device="cuda:0")), 1, 0),
    "upload": (lambda card: torch.ones(4).to("cuda:0"), 0, 1),
    "upload_of_numbers": (lambda card: torch.tensor([1, 2], device="cuda:0"), 0, 1),
    "new_tensor": (lambda card: card.new_tensor([1, 2]), 0, 1),
    "copied_from_host": (lambda card: card.copy_(torch.ones(4, 4)), 0, 1),
    "index_of_the_host": (lambda card: card[torch.tensor([0, 1])], 0, 1),
    "mask_of_the_host": (lambda card: card[torch.ones(4, 4) > 0], 0, 1),
    "move": (lambda card: card.to("cuda:1") + 1, 0, 0),
    "made": (lambda card: torch.arange(3, device="cuda:0") + card.new_zeros(3), 0, 0),
    "number_of_the_host": (lambda card: card * torch.tensor(2.0) + 1, 0, 0),
    "number_written_by_mask": (lambda card: card.__setitem__(card > 0, 0.0), 0, 0),
    "masked_fill": (lambda card: card.masked_fill(card > 0, 0.0), 0, 0),
    "repeated_to_a_size": (
        lambda card: card.repeat_interleave(card[0].long(), 0, output_size=4),
        *(0, 0),
    ),
    "repeated_alike": (lambda card: card.repeat_interleave(2, 0), 0, 0),
    "sorted": (lambda card: card.sort().values.topk(2).indices.argmax(), 0, 0),
    "gathered": (lambda card: card.gather(0, places(card)), 0, 0),
    "index_of_a_card": (lambda card: card[places(card)], 0, 0),
    "slice": (lambda card: card[1:, None, :2].mT, 0, 0),
    "shape": (lambda card: (card.shape, card.dtype, card.device, len(card), card.is_cuda), 0, 0),
    "chosen": (lambda card: torch.where(card > 0, card, 0.0), 0, 0),
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_the_host_waits_and_sends_as_with_gpus(name: str) -> None:
    call, reads, uploads = TRANSFERS[name]
    with SimulatedCards(2) as cards:
        card = square("cuda:0")
        before = cards.uploads
        call(card)
        assert (cards.reads, cards.uploads - before, cards.moves) == (
            *(reads, uploads),
            name == "move",
        )


#: Operations on square tensors, some in place and some on views, that keep their values in bounds.
#: Attention is not among them: the host has one kernel for it, and cards take its parts.
STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a + b.tanh(),
    lambda a, b: (a @ b).tanh(),
    lambda a, b: a.softmax(1) - b.sigmoid(),
    lambda a, b: a.T.contiguous().sub_(b.mean()),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a[:2], b[2:]]).flip(0),
    lambda a, b: a.gather(1, b.argsort(1)),
    lambda a, b: F.layer_norm(a, (4,), b[0], b[1]).clamp(-2, 2),
    lambda a, b: F.conv1d(a[None], b[:, :, None])[0].tanh(),
    lambda a, b: a.clone().masked_fill_(b > 0, 0.5).index_add_(0, b[0].argsort(), b).tanh(),
    lambda a, b: a.clone().T.mul_(0.5).T + b.cumsum(0).tanh(),
    lambda a, b: a[a.sum(1).argsort()][:, b[0].topk(4).indices],
    lambda a, b: a.bfloat16().float() + torch.rand_like(b),
    lambda a, b: a.scatter(0, b.argsort(0), b).lerp(a, 0.25),
)


def walked(seed: int, device: str) -> list[float]:
    """The values of forty operations, drawn at random."""
    torch.manual_seed(seed)
    draws, tensors = Random(seed), [torch.randn(4, 4).to(device) for _ in range(3)]
    for _ in range(40):
        step = draws.choice(STEPS)
        tensors[draws.randrange(3)] = step(draws.choice(tensors), draws.choice(tensors))
    values: list[float] = torch.stack(tensors).cpu().flatten().tolist()
    return values


@pytest.mark.parametrize("seed", range(6))
def test_values_are_those_of_the_host(seed: int) -> None:
    expected = walked(seed, "cpu")
    with SimulatedCards(2):
        assert walked(seed, "cuda:1") == expected


def test_bytes_are_those_of_storages_alive() -> None:
    with SimulatedCards(2) as cards:
        card = torch.zeros(1024, device="cuda:1")
        view = card.view(32, 32)[4:].T
        assert dict(cards.held) == {1: 4096}
        del card
        assert cards.held[1] == torch.cuda.memory_allocated(1) == 4096
        kept = (view + 1).half()
        assert (cards.held[1], cards.peak[1]) == (4096 + 1792, 4096 + 3584 + 1792)
        del view
        torch.cuda.reset_peak_memory_stats(1)
        assert cards.held[1] == torch.cuda.max_memory_allocated("cuda:1") == 1792
        free, total = torch.cuda.mem_get_info(1)
        assert total - free == 2**30 + 1792
        kept.add_(1)
        kept.data = torch.zeros(8, device="cuda:0")
        assert cards.held[0] == 32
    del kept
    assert set(cards.held.values()) == {0}


def test_threads_see_the_cards() -> None:
    lines: list[object] = []

    def use() -> None:
        card = square("cuda:1")
        lines.append((card.device, (card @ card).tolist()[0][0]))
        lines.append(is_refused("add", "cuda:1"))

    with SimulatedCards(2):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert lines == [(torch.device("cuda:1"), 4.0), True]


def state() -> tuple[object, ...]:
    """What a block may change of torch."""
    tables = (torch, torch.cuda, torch._C, torch.__future__, Tensor, threading.Thread)
    return (
        [dict(vars(table)) for table in tables],
        _get_current_dispatch_mode_stack(),
        _get_current_function_mode_stack(),
        torch._C._only_lift_cpu_tensors(),
        _device_constructors(),
        torch.cuda.is_available(),
        torch.get_rng_state().tolist(),
    )


def test_torch_is_as_before_when_a_block_fails() -> None:
    before = state()
    with suppress(ZeroDivisionError), SimulatedCards(2):
        drawn = torch.rand(2, device="cuda:1", generator=torch.Generator("cuda:1"))
        raise ZeroDivisionError(drawn)
    assert state() == before
