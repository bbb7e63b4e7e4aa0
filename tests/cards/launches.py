"""How many kernels a call launches, as the calls of torch that are not views or allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: Return a view, or memory that nothing is written to.
FREE = frozenset(
    {"view", "_unsafe_view", "_reshape_alias", "alias", "detach", "expand", "permute", "t"}
    | {"transpose", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes"}
    | {"unbind", "unfold", "diagonal", "as_strided", "lift_fresh"}
    | {"empty", "empty_like", "new_empty", "empty_strided"}
)


class Launches(TorchDispatchMode):
    """Counts them inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.removeprefix("aten::") not in FREE
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], object]) -> int:
    with Launches() as counted:
        call()
    return counted.count
