"""The simulated cards refuse what GPUs refuse, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cards.simulated import HOST, Cards

MIXED: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "sum": lambda here, there, host: here + there,
    "host": lambda here, there, host: here + host,
    "number_of_a_card": lambda here, there, host: here + there.sum(),
    "stack": lambda here, there, host: torch.stack([here, there]),
    "stack_with_a_number": lambda here, there, host: torch.stack([here.sum(), host.sum()]),
    "index": lambda here, there, host: here[there > 0],
    "index_of_a_card": lambda here, there, host: host[here > 0],
    "gather": lambda here, there, host: here.gather(0, there.long() * 0),
    "written_by_index": lambda here, there, host: here.__setitem__(here > 0, there),
    "numpy": lambda here, there, host: here.numpy(),
}

ALLOWED: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "number_of_the_host": lambda here, there, host: here * host.sum(),
    "index_of_the_host": lambda here, there, host: here[host.long() * 0],
    "written_by_slice": lambda here, there, host: here.__setitem__(slice(2), there[:2]),
    "shape_of_a_card": lambda here, there, host: here[:1].expand_as(there),
    "copied": lambda here, there, host: here.copy_(there),
    "read": lambda here, there, host: torch.tensor([here[0], there[1]]),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_do_not_meet(name: str) -> None:
    with Cards():
        here, there = torch.ones(3, device="cpu:0"), torch.ones(3, device="cpu:1")
        with pytest.raises((RuntimeError, TypeError), match=r"same device|numpy"):
            MIXED[name](here, there, torch.ones(3))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_gpus_allow_is_allowed(name: str) -> None:
    with Cards():
        here, there = torch.ones(3, device="cpu:0"), torch.ones(3, device="cpu:1")
        ALLOWED[name](here, there, torch.ones(3))


def test_what_is_made_of_a_card_lies_there_and_copies_alone_cross() -> None:
    with Cards() as cards:
        there = torch.arange(4, device=torch.device("cpu", 1))
        made = [there + 1, there.new_zeros(2), torch.zeros_like(there), *there.float().unbind()]
        assert {str(tensor.device) for tensor in made} == {"cpu:1"}
        assert there.to(there.device) is there
        assert cards.crossings == []
        assert there.cpu().device == HOST
        assert there.to("cpu:0", torch.float64).dtype == torch.float64
        assert cards.crossings == [("cpu:1", "cpu"), ("cpu:1", "cpu:0")]
