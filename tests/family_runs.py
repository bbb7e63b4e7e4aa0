"""The tiny models of all families, loaded once a process, and what the models say by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import Method, Need, Site, View
from tests.families import FAMILIES
from tests.linear_attention import in_doubles
from tests.tiny import Recorder, load_tiny, save_tiny

STEPS = 6
NONE, HALF, MOST = Budget("kept", 0.0), Budget("kept", 0.5), Budget("kept", 0.6)
#: One greedy token.
ONE_TOKEN = {"max_new_tokens": 1, "do_sample": False}
#: The chats of a family.
ROWS = (0, 1, 2)


@cache
def folder() -> TemporaryDirectory[str]:
    """A folder that lives as long as the process."""
    return TemporaryDirectory(prefix="espalier-models-")


@cache
def saved(name: str) -> Path:
    return save_tiny(FAMILIES[name].spec, Path(folder().name) / name)


@cache
def adapter_of(name: str, dtype: str = "float64", attention: str = "sdpa") -> Adapter:
    adapter = load_tiny(FAMILIES[name].spec, saved(name), dtype, attention)
    if dtype == "float64" and adapter.facts.text.linear is not None:
        in_doubles(adapter.decoder)
    return adapter


@dataclass(frozen=True)
class Tiny:
    """A tiny model of a family."""

    name: str
    dtype: str = "float64"
    attention: str = "sdpa"

    @property
    def adapter(self) -> Adapter:
        return adapter_of(self.name, self.dtype, self.attention)

    def inputs(self, *rows: int) -> dict[str, Any]:
        """Some of the family's chats in one batch, by default all; nobody may write to them."""
        return encoded(self, rows or ROWS)


@cache
def encoded(tiny: Tiny, rows: tuple[int, ...]) -> dict[str, Any]:
    chats = FAMILIES[tiny.name].chats
    return dict(tiny.adapter.encode([chats[row] for row in rows]))


def generation(adapter: Adapter, inputs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Greedy, and never a placeholder as an answer: the models are random and would say one now and then."""
    return {
        "max_new_tokens": STEPS,
        "do_sample": False,
        "output_logits": True,
        "suppress_tokens": list(adapter.items(inputs)),
        **changes,
    }


def span(tensor: Tensor) -> float:
    """The largest magnitude in a tensor."""
    return tensor.abs().max().item()


@cache
def plain(tiny: Tiny, *rows: int) -> tuple[Tensor, Tensor]:
    """What the model alone answers, computed once a process."""
    return answered(tiny.adapter, tiny.inputs(*rows))


def answered(adapter: Adapter, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids (B, T) and logits (B, T, V) of the model alone."""
    with torch.inference_mode():
        out = adapter.model.generate(
            **inputs, **generation(adapter, inputs), return_dict_in_generate=True
        )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def positions(adapter: Adapter, inputs: dict[str, Any]) -> Tensor:
    """Return the positions that `generate` gives the prompt."""
    rest = {key: value for key, value in inputs.items() if key != "input_ids"}
    return adapter.model._prepare_position_ids_for_generation(inputs["input_ids"], rest)


def extended(inputs: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """Append answer tokens to one prompt."""
    longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], ids], 1)}
    for key in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if key in inputs:
            filler = torch.full_like(ids, int(key == "attention_mask"))
            longer[key] = torch.cat([inputs[key], filler.to(inputs[key].dtype)], 1)
    return longer


def shown(
    adapter: Adapter,
    where: Sequence[Site],
    needs: Sequence[Need],
    chats: Sequence[list[dict]],
    ratio: float = 0.0,
    **options: Any,
) -> list[View]:
    """Return what a method would be shown at some sites, which keep the first tokens."""
    recorder = Recorder(tuple(where), tuple(needs))
    with Session(adapter, recorder, Budget("kept", ratio), **options) as session:
        session.generate(adapter.encode(list(chats)), max_new_tokens=1, do_sample=False)
    return recorder.views


# ---------------------------------------------------------------------- what an engine gives


def generated(
    adapter: Adapter,
    inputs: dict[str, Any],
    method: Method,
    budget: Budget,
    samples: Sequence[str] | None = None,
    **options: Any,
) -> GeneratedBatch:
    """Return what a session with these options answers by `generation`."""
    with Session(adapter, method, budget, **options) as session:
        return session.generate(inputs, samples, **generation(adapter, inputs))


# ---------------------------------------------------------------------- what modules take and give


class Call(NamedTuple):
    """One forward of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list[Call]]:
    """Collect the calls of a module within the block."""
    calls: list[Call] = []
    handle = module.register_forward_hook(
        lambda _, args, kwargs, output: calls.append(Call(args, kwargs, output)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def layers_given(adapter: Adapter, changes: Callable[[int], Mapping[str, Any]]) -> Iterator[None]:
    """Give each decoder layer other keyword arguments, by its number, within the block."""

    def hook_of(layer: int) -> Callable[..., Any]:
        return lambda _, args, kwargs: (args, {**kwargs, **changes(layer)})

    with ExitStack() as stack:
        for layer, module in enumerate(adapter.decoder.layers):
            handle = module.register_forward_pre_hook(hook_of(layer), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def numbered_units(adapter: Adapter, inputs: dict[str, Any]) -> tuple[int, Tensor]:
    """Replace the projector's outputs by their number, counted over its calls, which the model then places.

    Returns: how many there were, and what enters the decoder (B, L, D). The adapter is of no use afterwards.
    """
    total = 0

    def number(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal total
        first, total = total, total + output[..., 0].numel()
        numbers = torch.arange(first, total).to(output.dtype)
        return numbers.view(*output.shape[:-1], 1).expand_as(output)

    adapter.projector.register_forward_hook(number)
    with calls_of(adapter.decoder) as calls, torch.inference_mode():
        adapter.model(**inputs)
    return total, calls[0].kwargs["inputs_embeds"]


def placed_units(adapter: Adapter, inputs: dict[str, Any]) -> int:
    """Check that each unit lands on the placeholder that the layout says; return how many there are."""
    layout = adapter.layout(inputs)
    total, entered = numbered_units(adapter, inputs)
    numbers = []
    for row, count in enumerate(layout.counts):
        units = entered[row, layout.visual[row, :count], 0]
        assert torch.equal(units.long(), layout.source[row, :count, 0])
        numbers += units.tolist()
    assert sorted(numbers) == list(range(total))
    return total
