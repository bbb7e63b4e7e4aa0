"""Draft providers: no draft, the target's own cache, or a draft model in this process or a separate one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.cached_model import CachedModel, SparseDrafter
from espalier.harness.decoding.speculative.draft_model import DraftModel, DraftRequest, DraftSpec
from espalier.harness.decoding.speculative.guidance import Guidance
from espalier.harness.decoding.speculative.samplers import sampler_of
from espalier.harness.decoding.speculative.state_machine import (
    READING,
    Drafter,
    DrafterLost,
    Meter,
    Transport,
)
from espalier.harness.decoding.speculative.transports import (
    ProcessTransport,
    SequentialTransport,
    ThreadTransport,
    why_not_imported,
)
from espalier.harness.errors import tell_once
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.ranks import processors
from espalier.harness.specs.run_spec import ModelSpec
from espalier.methods.base import Source

log = logging.getLogger(__name__)

#: Maximum number of restarts of a draft's process; afterwards the target continues without a draft.
RESTARTS = 3


@dataclass
class DraftProvider:
    """Provides a drafter for one answer after another; by itself none, so that the target decodes alone.

    Attributes:
        devices: number of devices used in addition to the target's.
        transport: runs both sides.
        drafter: of the current answer; None if there is none, for the reason in `loss`.
        loss: why there is no drafter although the decoder needs one.
    """

    devices: int = 0
    transport: Transport = field(default_factory=SequentialTransport)
    drafter: Drafter | None = None
    loss: str | None = None

    def begin(self, request: DraftRequest, target: CachedModel, visual: Tensor) -> None:
        """Prepare for an answer of the target, with these positions (N,) of visual tokens in its prompt."""

    def guide(self, guidance: Guidance) -> None:
        """Pass on the target's choice of tokens."""

    def start(self) -> None:
        """Run the prompt; without this call the first draft does."""


@dataclass
class CacheDraft(DraftProvider):
    """The target drafts on a part of its own cache."""

    def begin(self, request: DraftRequest, target: CachedModel, visual: Tensor) -> None:
        """Store what the answer's drafter is made of."""
        self._request, self._target, self._visual = request, target, visual
        self.drafter = None

    def guide(self, guidance: Guidance) -> None:
        """Take the entries that each layer keeps; the cache is gathered at the first draft."""
        request, target = self._request, self._target
        sampler = sampler_of(
            target.adapter, request.config, target.sampler.prompt, numbers=request.numbers
        )
        kept = guidance.kept.to(target.adapter.device)
        self.drafter = SparseDrafter(target, kept, self._visual, sampler)


@dataclass
class LocalDraft(DraftProvider):
    """A draft model in this process, in this thread or a separate one."""

    drafter: DraftModel = field(kw_only=True)

    def begin(self, request: DraftRequest, target: CachedModel, visual: Tensor) -> None:
        """Let the model read the chat."""
        self.drafter.begin(request)

    def guide(self, guidance: Guidance) -> None:
        """Pass on the target's choice of tokens."""
        self.drafter.guide(guidance)

    def start(self) -> None:
        """Run the prompt."""
        self.drafter.start()


@dataclass
class ProcessDraft:
    """A draft model in a separate process, which is restarted after a loss.

    Args:
        launch: starts the process.
        target: the devices of the target.
    """

    launch: Callable[[], ProcessTransport]
    target: Sequence[torch.device]
    loss: str | None = None
    _process: ProcessTransport | None = None
    _losses: int = 0

    def __enter__(self) -> ProcessDraft:
        """Start the process; raises DrafterLost if it cannot even start."""
        self._process = self.launch().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def devices(self) -> int:
        """Devices in addition to the target's: GPUs, or on the CPU the other half of the cores."""
        draft_devices = () if self._process is None else self._process.devices
        on_cpu = all(device.type == "cpu" for device in (*self.target, *draft_devices))
        return 1 if on_cpu else extra_gpus(self.target, draft_devices)

    @property
    def transport(self) -> Transport:
        """The process, or this thread if there is none."""
        return self._process or SequentialTransport(Meter.of(self.target))

    @property
    def drafter(self) -> Drafter | None:
        """The drafter in the process; None if it was lost."""
        return None if self.loss else self._process

    def begin(self, request: DraftRequest, target: CachedModel, visual: Tensor) -> None:
        """Let the draft read the chat, in a new process if the last one was lost."""
        if self._process is None or self._process.lost:
            self._restart()
        self._try(lambda process: process.begin(request))

    def guide(self, guidance: Guidance) -> None:
        """Pass on the target's choice of tokens; if the process was lost, the next draft reports it."""
        self._try(lambda process: process.guide(guidance))

    def start(self) -> None:
        """Run the prompt."""
        self._try(lambda process: process.start())

    def _try(self, action: Callable[[ProcessTransport], None]) -> None:
        """Run an action on the process; a loss is stored until the next answer begins."""
        if self._process is None or self.loss:
            return
        try:
            action(self._process)
        except DrafterLost as lost:
            self.loss = str(lost)

    def _restart(self) -> None:
        if self._process is not None:
            self.loss = self._process.lost
        self.__exit__()
        if self._losses >= RESTARTS:
            return
        self._losses += 1
        log.warning("draft: %s; a new process is started", self.loss)
        try:
            self.__enter__()
            self.loss = None
        except DrafterLost as lost:
            self.loss = str(lost)


@contextmanager
def open_provider(
    draft: DraftSpec | None,
    target: Adapter,
    source: Source,
    kind: str,
    patience: float,
    loaded: Adapter | None = None,
) -> Iterator[DraftProvider | ProcessDraft]:
    """Yield the draft provider of `target`, and close it afterwards.

    Args:
        draft: the draft model; None if the decoder needs none.
        target: the loaded target.
        source: the decoder's source of drafts.
        kind: `sequential`, `processes` or `threads`.
        patience: seconds to wait for a draft.
        loaded: the draft, if it is already loaded; a separate process loads it again.

    Raises:
        DrafterLost: the draft's process could not be started.
        UserError: the draft could not be loaded.
    """
    meter = Meter.of(target.devices)
    if draft is None:
        provider_class = CacheDraft if source == "cache" else DraftProvider
        yield provider_class(transport=SequentialTransport(meter, meter))
        return
    draft = replace(draft, model=placed(draft.model))
    if kind == "processes":
        devices = (*target.devices, *devices_of(draft.model))
        on_cpu = all(device.type == "cpu" for device in devices)
        cores = halves(sorted(os.sched_getaffinity(0))) if on_cpu else None
        target_threads, draft_threads = (None, None) if cores is None else map(len, cores)
        spec = replace(draft, threads=draft.threads or draft_threads)
        launch = partial(ProcessTransport, spec.build, patience, cores, target=meter)
        with (
            ProcessDraft(launch, target.devices) as process,
            _threads(draft.threads or target_threads),
        ):
            yield process
        return
    adapter = loaded
    if kind == "threads" and loaded is target:
        adapter = None  # a second copy of the weights: attention is switched per model
    elif kind != "threads" and draft.model == placed(target.spec):
        adapter = loaded or target
    model = DraftModel(draft, adapter or load_adapter(draft.model), READING * patience)
    extra = extra_gpus(target.devices, model.devices)
    if kind == "threads":
        with ThreadTransport(
            target.devices, model.devices, patience, lambda: model.unread
        ) as threads:
            yield LocalDraft(extra, threads, drafter=model)
    else:
        yield LocalDraft(extra, SequentialTransport(meter, Meter.of(model.devices)), drafter=model)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads during the block; None keeps the setting."""
    former = torch.get_num_threads()
    torch.set_num_threads(count or former)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def halves(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the cores of the target and of the draft; None if there is only one core."""
    middle = (len(cores) + 1) // 2
    return (cores[:middle], cores[middle:]) if len(cores) > 1 else None


def indexed(device: torch.device | str) -> torch.device:
    """Return a device with its index; `cuda` becomes the process's current device."""
    result = torch.device(device)
    if result.type == "cuda" and result.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return result


def placed(model: ModelSpec) -> ModelSpec:
    """Return a model's settings with an indexed device, which means the same in every process."""
    return replace(model, device=str(indexed(model.device)))


def devices_of(model: ModelSpec) -> tuple[torch.device, ...]:
    """Return the devices of a model: its device, or all GPUs if it is spread."""
    device = indexed(model.device)
    if model.device_map is None or device.type != "cuda":
        return (device,)
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def transport_of(
    setting: str, overlap: bool, target: Collection[torch.device], draft: Collection[torch.device]
) -> str:
    """Return the transport of two sides, which `engine.transport=auto` leaves open.

    Sides that work in turn need no second process, and neither do two models on a single processor. Two models on one
    GPU share it by streams, since two processes would only take turns on it; two models elsewhere get a process each,
    since Python runs one thread at a time. In a script that a second process would run again, they get threads, which
    one line reports.
    """
    if setting != "auto":
        return setting
    on_gpu = any(indexed(device).type != "cpu" for device in (*target, *draft))
    if not overlap or (processors() == 1 and not on_gpu):
        return "sequential"
    if one_gpu(target, draft):
        return "threads"
    reason = why_not_imported()
    if reason is None:
        return "processes"
    tell_once(
        f"draft and target run in threads: a second process, which is faster, {reason}; valid for processes: the call "
        'below `if __name__ == "__main__":`'
    )
    return "threads"


def one_gpu(target: Collection[torch.device], draft: Collection[torch.device]) -> bool:
    """Return whether both sides are entirely on the same single GPU."""
    devices = {indexed(device) for device in (*target, *draft)}
    return len(devices) == 1 and devices.pop().type == "cuda"


def extra_gpus(target: Sequence[torch.device], draft: Sequence[torch.device]) -> int:
    """Return the number of GPUs that the drafter uses and the target does not."""
    targets = {indexed(device) for device in target}
    return sum(device.type == "cuda" for device in {indexed(place) for place in draft} - targets)
