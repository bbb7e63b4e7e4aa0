"""Who drafts for a target, and where: nobody, the target itself, a model in this process or in one of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.device_places import besides, devices_of, placed
from espalier.harness.decoding.speculative.draft_model import DraftModel, DraftSpec, Order
from espalier.harness.decoding.speculative.draft_process import Processes
from espalier.harness.decoding.speculative.draft_thread import Threads
from espalier.harness.decoding.speculative.guidance import Guidance
from espalier.harness.decoding.speculative.meter import Meter
from espalier.harness.decoding.speculative.samplers import sampler_of
from espalier.harness.decoding.speculative.sparse_draft import SparseDrafter
from espalier.harness.decoding.speculative.state_machine import (
    READING,
    Drafter,
    DrafterLost,
    Transport,
)
from espalier.harness.decoding.speculative.transports import Sequential
from espalier.harness.models.adapter import Adapter, load_adapter
from espalier.methods.base import Source

log = logging.getLogger(__name__)

#: So often a draft's process is started again; then the target goes on alone.
RESTARTS = 3


@dataclass(frozen=True)
class Answering:
    """The answer that is being decoded: the target's side, where its visual tokens are, and what the draft is told."""

    target: CachedModel
    visual: Tensor
    order: Order


class Partner(Protocol):
    """Drafts for one answer after another."""

    @property
    def devices(self) -> int:
        """Devices that are busy besides the target's."""

    @property
    def transport(self) -> Transport:
        """How both sides run."""

    @property
    def drafter(self) -> Drafter | None:
        """What proposes tokens for the answer begun; None if nobody does, for `why`."""

    @property
    def why(self) -> str | None:
        """Say why nobody drafts where somebody should."""

    def begin(self, answering: Answering) -> None:
        """Prepare for an answer."""

    def guide(self, guidance: Guidance) -> None:
        """Hand on what the target chose."""

    def start(self) -> None:
        """Run the prompt; without this call the first draft does."""


@dataclass
class Nobody:
    """The target decodes alone."""

    devices: int = 0
    transport: Transport = field(default_factory=Sequential)
    drafter: Drafter | None = None
    why: str | None = None

    def begin(self, answering: Answering) -> None:
        """Do nothing."""

    def guide(self, guidance: Guidance) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Do nothing."""


@dataclass
class OwnCache(Nobody):
    """The target drafts on a part of its own cache."""

    _answering: Answering | None = None

    def begin(self, answering: Answering) -> None:
        """Remember whose cache it is."""
        self._answering, self.drafter = answering, None

    def guide(self, guidance: Guidance) -> None:
        """Take the entries that each layer keeps; the cache is gathered when the first draft is asked for."""
        one = self._answering
        assert one is not None  # an answer was begun
        order = one.order
        sampler = sampler_of(
            one.target.adapter, order.config, one.target.sampler.prompt, numbers=order.numbers
        )
        kept = guidance.kept.to(one.target.adapter.device)
        self.drafter = SparseDrafter(one.target, kept, one.visual, sampler)


@dataclass
class InProcess:
    """A draft model in this process, in this thread or in one of its own."""

    model: DraftModel
    transport: Transport = field(default_factory=Sequential)
    devices: int = 0
    why: str | None = None

    @property
    def drafter(self) -> Drafter:
        """The model."""
        return self.model

    def begin(self, answering: Answering) -> None:
        """Let the model read the chat."""
        self.model.begin(answering.order)

    def guide(self, guidance: Guidance) -> None:
        """Hand on what the target chose."""
        self.model.guide(guidance)

    def start(self) -> None:
        """Run the prompt."""
        self.model.start()


@dataclass
class OwnProcess:
    """A draft model in a process of its own, which is started again when it was lost.

    Args:
        launch: starts the process.
        target: the devices of the target.
    """

    launch: Callable[[], Processes]
    target: Sequence[torch.device]
    why: str | None = None
    _open: Processes | None = None
    _losses: int = 0

    def __enter__(self) -> OwnProcess:
        """Start the process; raises DrafterLost if it cannot even start."""
        self._open = self.launch().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End the process."""
        self._close()

    @property
    def devices(self) -> int:
        """Devices besides the target's: GPUs, or on the CPU the other half of the cores."""
        there = () if self._open is None else self._open.devices
        on_cpu = all(device.type == "cpu" for device in (*self.target, *there))
        return 1 if on_cpu else besides(self.target, there)

    @property
    def transport(self) -> Transport:
        """The process, or this thread alone where there is none."""
        return self._open or Sequential(Meter.of(self.target))

    @property
    def drafter(self) -> Drafter | None:
        """The far end; None where it was lost."""
        return None if self._open is None or self.why else self._open.drafter

    def begin(self, answering: Answering) -> None:
        """Let the draft read the chat, in a new process if the last one was lost."""
        if self._open is None or self._open.lost:
            self._restart()
        self._try(lambda process: process.drafter.begin(answering.order))

    def guide(self, guidance: Guidance) -> None:
        """Hand on what the target chose; if nobody is there, the next draft will tell."""
        self._try(lambda process: process.drafter.guide(guidance))

    def start(self) -> None:
        """Run the prompt."""
        self._try(lambda process: process.drafter.start())

    def _try(self, ask: Callable[[Processes], None]) -> None:
        """Ask the process; a loss is remembered until the next answer begins."""
        if self._open is None or self.why:
            return
        try:
            ask(self._open)
        except DrafterLost as lost:
            self.why = str(lost)

    def _restart(self) -> None:
        if self._open is not None:
            self.why = self._open.lost
        self._close()
        if self._losses >= RESTARTS:
            return
        self._losses += 1
        log.warning("draft: %s; a new process is started", self.why)
        try:
            self.__enter__()
            self.why = None
        except DrafterLost as lost:
            self.why = str(lost)

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


@contextmanager
def open_partner(
    draft: DraftSpec | None,
    target: Adapter,
    source: Source,
    kind: str,
    patience: float,
    loaded: Adapter | None = None,
) -> Iterator[Partner]:
    """Yield who drafts for `target`, and end it afterwards.

    Args:
        draft: the draft model; None where the decoder needs none.
        target: the loaded target.
        source: who drafts.
        kind: `sequential`, `processes` or `threads`.
        patience: seconds to wait for a draft.
        loaded: the draft, where it is loaded already; a process of its own loads it anew.

    Raises:
        DrafterLost: the draft's process could not be started.
        UserError: the draft could not be loaded.
    """
    meter = Meter.of(target.devices)
    if draft is None:
        kind_of = OwnCache if source == "cache" else Nobody
        yield kind_of(transport=Sequential(meter, meter))
        return
    draft = replace(draft, model=placed(draft.model))
    if kind == "processes":
        there = (*target.devices, *devices_of(draft.model))
        on_cpu = all(device.type == "cpu" for device in there)
        cores = halves(sorted(os.sched_getaffinity(0))) if on_cpu else None
        own, its = (None, None) if cores is None else map(len, cores)
        spec = replace(draft, threads=draft.threads or its)
        launch = partial(Processes, spec.build, patience, cores, target=meter)
        with OwnProcess(launch, target.devices) as process, _threads(draft.threads or own):
            yield process
    elif kind == "threads":
        # Its own copy of the weights, even where target and draft are one model: attention is switched model by model.
        apart = loaded if loaded is not None and loaded is not target else load_adapter(draft.model)
        model = DraftModel(draft, apart, READING * patience)
        extra = besides(target.devices, model.devices)
        with Threads(target.devices, model.devices, patience, lambda: model.unread) as transport:
            yield InProcess(model, transport, extra)
    else:
        shared = target if draft.model == placed(target.spec) else None
        model = DraftModel(draft, loaded or shared or load_adapter(draft.model))
        extra = besides(target.devices, model.devices)
        yield InProcess(model, Sequential(meter, Meter.of(model.devices)), extra)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use as many threads as this process has cores; None leaves the setting alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def halves(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the cores of the target and of the draft; None where there is only one to share."""
    middle = (len(cores) + 1) // 2
    return (cores[:middle], cores[middle:]) if len(cores) > 1 else None
