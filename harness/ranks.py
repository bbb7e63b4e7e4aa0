"""The processes of one run under torchrun: the identity of this one, and exchange between all."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

from espalier.harness.errors import UserError

T = TypeVar("T")

#: Longest wait of one process for another, which may be scoring or downloading. A process that dies is noticed at
#: once, by its closed connection; this limit is for one that hangs.
TIMEOUT = timedelta(hours=2)

#: Variables that a launcher must set in addition to WORLD_SIZE.
RENDEZVOUS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

#: Variables from which libraries detect that they are one of several processes.
LAUNCHED = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", *RENDEZVOUS)


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RankLost(RuntimeError):
    """Another process of the run ended or does not answer; the processes can no longer agree on anything."""


@dataclass
class Ranks:
    """One process among `world`, numbered `rank`; rank 0 decides, writes and prints. The default is a single process.

    All processes must make the same calls of `gather`, `first`, `in_turn` and `each` in the same order.

    Args:
        rank: number of this process in the run.
        world: number of processes of the run.
        local_rank: number of this process on its machine.
        local_world: number of processes of the run on this machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    _received_error: Exception | None = field(default=None, repr=False)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return every `world`-th item, starting with the `rank`-th."""
        return items[self.rank :: self.world]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, ordered by rank; values must pickle. Cost: all wait for the slowest.

        Raises:
            RankLost: a process has ended.
            Exception: an error that another process raised inside `each` instead of gathering.
        """
        return [value] if self.world == 1 else self._exchange(value, None)

    def first(self, function: Callable[[], T]) -> T:
        """Call `function` in rank 0 alone and return its result everywhere."""
        return cast("T", self.gather(function() if self.rank == 0 else None)[0])

    def in_turn(self, function: Callable[[], T]) -> T:
        """Call `function` in rank 0, then in the others, which reuse what it left in shared caches."""
        if self.rank == 0:
            result = function()
        self.gather(None)
        if self.rank != 0:
            result = function()
        return result

    def each(self, function: Callable[[], T]) -> T:
        """Call `function` in every process and return its own result; see `together`."""
        with self.together():
            return function()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block in every process; an exception in one of them is raised in all.

        A process that fails sends its error to the others, which receive it at their next exchange, at the latest at
        the end of their own block. So all leave together, none waits for a failed process, and the next block can
        begin.
        """
        try:
            yield
            self.gather(None)
        except Exception as error:  # for any error, the others must not wait for this process
            if error is not self._received_error and self.world > 1:
                with suppress(
                    Exception
                ):  # the others may have failed as well; this error is reported
                    self._exchange(None, _portable(error, self.rank))
            raise

    def use_device(self, device: str) -> None:
        """Make the plain name `cuda` mean a separate device for this process.

        Raises:
            UserError: there are fewer devices than processes.
        """
        if self.world == 1 or device != "cuda":
            return
        # torch takes seconds to import, and run.py, which imports this file, prints a line before that.
        import torch

        present = torch.cuda.device_count()
        if self.local_rank >= present:
            raise UserError(
                f"model.device='cuda': {self.local_world} processes on a machine with {present} CUDA devices; "
                f"valid: torchrun --nproc_per_node {present}"
            )
        torch.cuda.set_device(self.local_rank)

    def _exchange(self, value: Any, trouble: Exception | None) -> list[Any]:
        # Only processes connected by `join` get here; a single one needs no torch.
        import torch.distributed as dist

        messages: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(messages, (value, trouble))
        except RuntimeError as error:
            self._received_error = RankLost(
                "another process of this run ended or does not answer; finished samples are kept, "
                "the same command goes on from them"
            )
            raise self._received_error from error
        for rank, (_, error_sent) in enumerate(messages):
            if error_sent is not None and rank != self.rank:
                self._received_error = error_sent
                raise error_sent
        return [sent_value for sent_value, _ in messages]


@contextmanager
def join() -> Iterator[Ranks]:
    """Connect to the other processes that the launcher started, and disconnect at the end of the block.

    Objects are sent over gloo, also on machines with GPUs: nothing large is exchanged.

    Raises:
        UserError: WORLD_SIZE announces other processes, but not where to meet them.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world == "1":
        yield Ranks()
        return
    _check_launch(world)
    # torch takes seconds to import; a person sees a line before that.
    import torch.distributed as dist

    # Imported before the group exists: its functions take the group at import as a default and would keep it, with its
    # threads, after the block; a thread that then frees a tensor while Python ends aborts the process. Transformers
    # would import it later.
    import torch.distributed.nn.functional  # noqa: F401

    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        first = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"MASTER_ADDR, MASTER_PORT: the processes did not meet at {address}: {first}"
        ) from error
    try:
        yield Ranks(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        )
    finally:
        dist.destroy_process_group()


def _check_launch(world: str) -> None:
    """Raise UserError unless the launcher's variables are complete and valid."""
    advice = (
        "valid: unset WORLD_SIZE, or start with torchrun --nproc_per_node <processes> run.py ..."
    )
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if missing or not world.isdecimal() or world == "0":
        without = ", ".join(missing) or "a number of processes"
        raise UserError(f"WORLD_SIZE={world} without {without}; {advice}")
    numbers = {name: int(world) for name in ("RANK", "LOCAL_RANK")}
    for name, limit in {**numbers, "MASTER_PORT": 65_536}.items():
        value = os.environ[name]
        if not value.isdecimal() or int(value) >= limit:
            raise UserError(f"{name}={value} must be an integer from 0 to {limit - 1}; {advice}")
    local = os.environ.get("LOCAL_WORLD_SIZE", world)
    if not local.isdecimal() or not 0 < int(local) <= int(world):
        raise UserError(f"LOCAL_WORLD_SIZE={local} must be an integer from 1 to {world}; {advice}")


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the launcher's variables from libraries that would distribute samples again, or wait for others."""
    hidden = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def is_main_process() -> bool:
    """Return whether this process prints: of several that a launcher started, only the first.

    Also True for an invalid rank, since the mistake must be reported.
    """
    launched = all(name in os.environ for name in RENDEZVOUS)
    world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    later_rank = world.isdecimal() and rank.isdecimal() and 0 < int(rank) < int(world)
    return not (launched and later_rank)


def _portable(error: Exception, rank: int) -> Exception:
    """Return the error if it survives pickling, else one with the same text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # a third party's exception may fail in any way
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    first = next(iter(str(error).splitlines()), "")
    return RuntimeError(f"process {rank}: {type(error).__name__}: {first}")
