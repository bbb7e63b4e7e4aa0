"""Simulated cards: tensors that lie on `cuda:N`, compute on the host, and refuse to meet those of another card.

As on GPUs, an operation takes tensors of one device, single numbers (0-dimensional tensors) of the host,
and indices of the host; copies alone cross. Counted: kernels, reads by the host, uploads, copies between cards, waits
for a stream, and the bytes alive on each card. Not simulated: which kernels run, their time, CUDA graphs, an
allocator's rounding and workspaces. Composite functions count by their parts, so that kernels are an upper bound.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

HOST = torch.device("cpu")

#: Structures of arguments; a union of types, made at each check, would take a tenth of the time.
SEQUENCES = (list, tuple)

#: Take indices of the host.
INDEXED = frozenset({"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"})

#: Take no number of the host beside tensors of a card.
JOINS = frozenset({"cat", "stack"})

#: Make the host wait for a card: it needs values, or how many there are.
READS = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "allclose"}
    | {"_linalg_check_errors", "_linalg_eigh", "_linalg_svd"}
)

#: Read the number that they write.
FILLS = frozenset({"masked_fill", "masked_fill_"})

#: Start no kernel, besides views.
FREE = frozenset({"empty", "empty_strided", "new_empty", "empty_like", "_local_scalar_dense"})

#: Bytes of a card that driver and libraries take.
TAKEN = 2**30


class CardTensor(Tensor):
    """A tensor of a card; `content` is a tensor of the host with its values, or one of the meta device without them."""

    content: Tensor
    hold: _Hold

    @staticmethod
    def __new__(cls, content: Tensor, device: torch.device) -> CardTensor:
        """Wrap a tensor."""
        card_tensor: CardTensor = Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=device,
        )
        card_tensor.content = content
        return card_tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the content and the card."""
        return f"{self.content!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        """Refuse: no cards are there."""
        raise RuntimeError(f"{func}: the simulated cards of a tensor are gone")

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refuse, as torch does for tensors of a GPU."""
        raise TypeError(f"can't convert a tensor of {self.device} to numpy; use Tensor.cpu() first")

    __array__ = numpy

    def new_tensor(self, values: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return a tensor of values on the same card, where torch takes the card that is current."""
        return torch.tensor(values, **{"dtype": self.dtype, "device": self.device, **kwargs})

    def tolist(self) -> Any:
        """Return the values; the host waits for them."""
        return self.cpu().tolist()

    @property
    def data(self) -> Tensor:
        """The tensor without its history; set, the tensor becomes another."""
        return self.detach()

    @data.setter
    def data(self, source: Any) -> None:
        Tensor.data.__set__(self, source)  # type: ignore[attr-defined]
        # The source is kept, since its bytes are counted while it lives.
        self.content, self.source = source.content, source

    def untyped_storage(self) -> Any:
        """Return the storage of the content."""
        return self.content.untyped_storage()

    def data_ptr(self) -> int:
        """Return an address that only tensors of the same storage share, also without values."""
        return int(self.content.untyped_storage()._cdata + self.storage_offset())


class _Hold:
    """Counts the bytes of a storage on a card, once for all tensors that have it, while it is not collected."""

    __slots__ = ("card", "cards", "content", "key")

    def __init__(self, cards: SimulatedCards, content: Tensor, card: int) -> None:
        storage = content.untyped_storage()
        # The content keeps the storage, by which the key is known.
        self.cards, self.content, self.card = cards, content, card
        self.key = (storage._cdata, card)
        cards.holders[self.key] += 1
        if cards.holders[self.key] == 1:
            cards.held[card] += storage.nbytes()
            cards.peak[card] = max(cards.peak[card], cards.held[card])

    def __del__(self) -> None:
        holders = self.cards.holders
        holders[self.key] -= 1
        if not holders[self.key]:
            del holders[self.key]
            self.cards.held[self.card] -= self.content.untyped_storage().nbytes()


class HostGenerator(torch.Generator):
    """Draws on the host for every device; `of_cards` has those of cards, by the address that operations are handed."""

    of_cards: ClassVar[WeakValueDictionary[int, HostGenerator]] = WeakValueDictionary()

    def __new__(cls, device: Any = HOST) -> HostGenerator:
        """Make a generator."""
        generator: HostGenerator = super().__new__(cls, HOST)  # type: ignore[call-arg]
        if torch.device(device) != HOST:
            cls.of_cards[generator._cdata] = generator  # type: ignore[attr-defined]
        return generator


class CardEvent:
    """A point in the work of all cards, as of torch.cuda.Event; it has come once the host has waited after it."""

    def __init__(self, cards: SimulatedCards) -> None:
        self._cards = cards
        self._kernels, self._time = 0, 0.0

    def record(self, *_: Any) -> CardEvent:
        """Set the point here."""
        self._kernels, self._time = self._cards.kernels, perf_counter()
        return self

    def query(self) -> bool:
        """Return whether the host knows that the point has been passed."""
        return self._kernels <= self._cards.finished

    def synchronize(self) -> None:
        """Wait, unless the point has been passed."""
        if not self.query():
            self._cards.finish(waits=1)

    def elapsed_time(self, later: CardEvent) -> float:
        """Return the host's milliseconds up to a later point."""
        if not later.query():
            raise RuntimeError("CUDA error: device not ready")
        return 1000 * (later._time - self._time)


class SimulatedCards(TorchDispatchMode):
    """Makes `count` cards of `memory` bytes visible to torch inside the block, also in threads that start there.

    Attributes:
        kernels: operations on tensors of cards, without views.
        reads: how often the host needed values of a card: it waits for all that was queued.
        uploads: copies from the host; from memory that is not pinned they wait, too.
        moves: copies from card to card.
        waits: how often the host waited for a stream, or for an event that had not come.
        held: bytes of the tensors alive on each card.
        peak: the most bytes alive on each card since torch.cuda.reset_peak_memory_stats.
    """

    def __init__(self, count: int = 1, memory: int = 80 * 2**30) -> None:
        torch._C._ensureCUDADeviceGuardSet()
        # Kept by torch from its first use on: `torch.tensor` must not be the one that stands in.
        _device_constructors()
        super().__init__()
        # As of torch's own fake tensors: what is made of a list on the host reaches the mode before it moves.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.count, self.memory = count, memory
        self.kernels = self.reads = self.uploads = self.moves = self.waits = 0
        #: Kernels that have ended as far as the host can know.
        self.finished = 0
        self.held: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        #: Tensors of each storage, by its address and card.
        self.holders: Counter[tuple[int, int]] = Counter()
        self._stack = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, seconds."""
        return False

    def __enter__(self) -> Self:
        """Show the cards."""
        replaced: Callable[..., Any] = patch.multiple
        for stand_in in (
            replaced(torch.cuda, **self._of_cuda()),
            replaced(torch, Generator=HostGenerator, tensor=_numbers_read(torch.tensor)),
            replaced(torch, as_tensor=_numbers_read(torch.as_tensor)),
            replaced(Tensor, pin_memory=lambda tensor, *_: tensor),
            # `module.to` replaces parameters, since their tensors cannot become others.
            replaced(torch.__future__, _overwrite_module_params_on_conversion=True),
            # Tensors that wrap others cannot be made in inference mode.
            replaced(torch._C, _InferenceMode=lambda _: torch.no_grad()),
            replaced(threading.Thread, run=self._in_thread(threading.Thread.run)),
            self._active(),
        ):
            self._stack.enter_context(stand_in)
        return self

    def __exit__(self, *error: object) -> None:
        """Take the cards away."""
        self._stack.close()

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Dispatch the operations of this thread here."""
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)
            torch._C._set_only_lift_cpu_tensors(False)

    def _in_thread(self, run: Callable[[threading.Thread], None]) -> Callable[..., None]:
        def run_here(thread: threading.Thread) -> None:
            with self._active():
                run(thread)

        return run_here

    def _of_cuda(self) -> dict[str, Callable[..., Any]]:
        """Return what stands in for functions of torch.cuda."""

        def wait(*_: Any) -> None:
            self.finish(waits=1)

        def reset(device: Any = None) -> None:
            self.peak[_number(device)] = self.held[_number(device)]

        def free(device: Any = None) -> tuple[int, int]:
            return self.memory - TAKEN - self.held[_number(device)], self.memory

        def nothing(*_: Any, **__: Any) -> None: ...

        def stream(device: Any = None, *_: Any, **__: Any) -> SimpleNamespace:
            return SimpleNamespace(
                device=torch.device("cuda", _number(device)),
                cuda_stream=0,
                synchronize=wait,
                wait_stream=nothing,
                wait_event=nothing,
                record_event=lambda event=None: (event or CardEvent(self)).record(),
            )

        name, version = "simulated card", (9, 0)
        facts = SimpleNamespace(name=name, total_memory=self.memory, major=9, minor=0)
        ignored = ("empty_cache", "set_device", "manual_seed_all", "_lazy_init")
        return {
            **dict.fromkeys(ignored, nothing),
            **dict.fromkeys(("device", "stream"), lambda *_: nullcontext()),
            **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
            **dict.fromkeys(("current_stream", "default_stream", "Stream"), stream),
            "Event": lambda *_, **__: CardEvent(self),
            "synchronize": wait,
            "is_bf16_supported": lambda *_: True,
            "is_current_stream_capturing": lambda: False,
            "device_count": lambda: self.count,
            "current_device": lambda: 0,
            # Draws are the host's for every device.
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "get_device_name": lambda *_: name,
            "get_device_properties": lambda *_: facts,
            "get_device_capability": lambda *_: version,
            "mem_get_info": free,
            "memory_allocated": lambda device=None: self.held[_number(device)],
            "memory_reserved": lambda device=None: self.held[_number(device)],
            "max_memory_allocated": lambda device=None: self.peak[_number(device)],
            "reset_peak_memory_stats": reset,
        }

    # ------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation on the contents, and wrap the result."""
        kwargs, name = {**(kwargs or {})}, func.overloadpacket.__name__
        kwargs.pop("pin_memory", None)
        wanted = None if kwargs.get("device") is None else self._device_of(kwargs["device"])
        tensors = tensors_of((args, kwargs))
        cards = [tensor for tensor in tensors if isinstance(tensor, CardTensor)]
        is_of_host = not cards and (wanted is None or wanted.type != "cuda")
        generator = kwargs.get("generator")
        if generator is not None and is_of_host == (generator._cdata in HostGenerator.of_cards):
            raise RuntimeError(f"{func}: a generator draws on its own device")
        if is_of_host:
            return func(*args, **kwargs)
        if name == "_to_copy":
            return self._copied(func, args[0], kwargs, wanted or args[0].device)
        if name == "copy_":
            return self._overwritten(func, *args, **kwargs)
        place = wanted or HOST
        if tensors:
            place = common_device(func, name, args, tensors)
        self._count(func, name, args, kwargs)
        if wanted is not None:
            kwargs["device"] = HOST
        result = self.compute(func, name, (args, kwargs), *change((args, kwargs), self.content))
        wrappers = {id(tensor.content): tensor for tensor in cards}

        def wrapped(content: Tensor) -> Tensor:
            if id(content) in wrappers:
                return wrappers[id(content)]
            return self.wrap(content, wanted or place)

        return change(result, wrapped)

    def content(self, value: Any) -> Any:
        """Return what an operation computes on."""
        return content_of(value)

    def compute(self, func: Any, name: str, arguments: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on contents; `arguments` are its arguments before."""
        # The host has no kernels of these types: softmax from halves to floats, and histograms of integers.
        if name in ("_softmax", "_log_softmax") and args[2]:
            args = (args[0].float(), args[1], False)
        if name == "histc":
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)

    def copy(self, func: Any, content: Tensor, kwargs: Any, place: torch.device) -> Tensor:
        """Return a copy of a content for another device, perhaps of another type."""
        return cast("Tensor", func(content, **kwargs))

    def overwrite(self, func: Any, into: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
        """Write the content `source` into that of another tensor."""
        func(content_of(into), source, *args, **kwargs)

    def wrap(self, content: Tensor, place: torch.device) -> Tensor:
        """Return a tensor of a card, and count its bytes while it lives."""
        if place.type != "cuda":
            return content
        card_tensor = CardTensor(content, place)
        self.hold(card_tensor)
        return card_tensor

    def hold(self, card_tensor: CardTensor) -> None:
        """Count the storage of a tensor as alive until the last tensor that has it is gone."""
        card_tensor.hold = _Hold(self, card_tensor.content, card_tensor.device.index)

    def _device_of(self, device: Any) -> torch.device:
        place = torch.device(device)
        if place.type != "cuda":
            return place
        place = torch.device("cuda", place.index or 0)
        if place.index >= self.count:
            raise RuntimeError(f"invalid device ordinal: {place}, and there are {self.count} cards")
        return place

    def _copied(self, func: Any, source: Tensor, kwargs: Any, place: torch.device) -> Tensor:
        self._cross(source.device, place)
        inner = {key: value for key, value in kwargs.items() if key != "device"}
        return self.wrap(self.copy(func, self.content(source), inner, place), place)

    def _overwritten(
        self, func: Any, into: Tensor, source: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._cross(source.device, into.device)
        self.overwrite(func, into, self.content(source), *args, **kwargs)
        return into

    def _cross(self, source: torch.device, place: torch.device) -> None:
        if source == place:
            self.kernels += 1
        elif source == HOST:
            self.uploads += 1
        elif place == HOST:
            self.finish(reads=1)
        else:
            self.moves += 1

    def _count(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        self.kernels += not func.is_view and name not in FREE
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        filled = name in FILLS and isinstance(args[2], CardTensor)
        reads = int(name in READS or unsized or filled)
        if name in INDEXED:
            indices = tensors_of(args[1])
            self.uploads += sum(index.device == HOST for index in indices)
            reads += any(index.dtype == torch.bool and index.device != HOST for index in indices)
        self.finish(reads=reads)

    def finish(self, reads: int = 0, waits: int = 0) -> None:
        """Let the host wait for all kernels, if it reads or waits."""
        self.reads += reads
        self.waits += waits
        if reads or waits:
            self.finished = self.kernels


def common_device(func: Any, name: str, args: Any, tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of an operation on `tensors`.

    Raises:
        RuntimeError: they lie on several, as on GPUs.
    """
    checked = tensors
    if name in INDEXED:  # indices may lie on the host
        indices = {id(index) for index in tensors_of(args[1]) if index.device == HOST}
        checked = [tensor for tensor in tensors if id(tensor) not in indices]
    places = {t.device for t in checked if name in JOINS or t.dim() or t.device != HOST}
    if len(places) > 1:
        raise RuntimeError(
            f"{func}: expected all tensors on the same device, but they lie on {sorted(map(str, places))}"
        )
    return places.pop() if places else HOST


def content_of(value: Any) -> Any:
    """Return the content of a tensor of a card; other values as they are."""
    return value.content if isinstance(value, CardTensor) else value


def change(value: Any, of_tensor: Callable[[Any], Any]) -> Any:
    """Return a structure of lists, tuples and tables with its tensors changed. Faster than torch's tree_map."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, SEQUENCES):
        parts = [change(part, of_tensor) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: change(part, of_tensor) for key, part in value.items()}
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a structure."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, SEQUENCES):
        return []
    return [tensor for part in value for tensor in tensors_of(part)]


def _number(device: Any) -> int:
    """Return the number of the card of an argument of torch.cuda's functions."""
    return device if isinstance(device, int) else torch.device(device or "cuda").index or 0


def _numbers_read(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.tensor, or a function like it, for lists with numbers of cards, which torch reads one by one."""

    def numbers(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [numbers(part) for part in value]
        return value.item() if isinstance(value, CardTensor) else value

    def tensor_of(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        return tensor(numbers(data) if isinstance(data, list | tuple) else data, *args, **kwargs)

    return tensor_of
