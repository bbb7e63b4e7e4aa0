"""Shared by all training stages: workers, optimiser, learning rate, checkpoints and logs."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.multiprocessing.spawn import spawn

RECIPE = Path(__file__).with_name("recipe.yaml")


def load_recipe(path: Path = RECIPE, continued: bool = False) -> dict[str, Any]:
    """Reads a training recipe.

    Args:
        path: The recipe.
        continued: Whether stages with a part "continued" start from shipped weights with its settings.
    """
    recipe: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if continued:
        for name, plan in recipe.items():
            if isinstance(plan, dict):
                recipe[name] = {**plan, **plan.get("continued", {})}
    return recipe


@dataclass(frozen=True)
class Worker:
    """One data-parallel process: its rank, the world size, its device, and its data processes."""

    rank: int
    count: int
    device: str = "cpu"
    feeders: int = 0

    @property
    def leads(self) -> bool:
        """Whether this worker writes logs and checkpoints."""
        return self.rank == 0

    def share(self, step: int, batch: int, first: int) -> range:
        """Returns the scene indices of this worker's part of a global batch."""
        local = batch // self.count
        start = first + step * batch + self.rank * local
        return range(start, start + local)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages gradients over the workers in one exchange; missing ones count as zero."""
        if self.count == 1:
            return
        parameters = list(parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def run_workers(stage: Callable[..., None], count: int, *args: Any) -> None:
    """Runs ``stage(worker, *args)`` in ``count`` processes of one thread each.

    Single-threaded processes are faster than one process with many threads: the model is so small that
    threads wait at barriers, especially when another process uses a core.
    """
    if count == 1:
        _start_worker(0, stage, 1, 0, args)
        return
    port = 20000 + os.getpid() % 20000
    spawn(_start_worker, args=(stage, count, port, args), nprocs=count, join=True)


def _start_worker(
    rank: int, stage: Callable[..., None], count: int, port: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if count > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    stage(Worker(rank, count), *args)
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


def make_optimiser(
    parameters: Iterable[nn.Parameter], lr: float, betas: Sequence[float], weight_decay: float
) -> torch.optim.AdamW:
    """Returns AdamW that decays matrices only."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), fused=True)


def make_optimisers(
    parameters: Iterable[nn.Parameter], matrices: Sequence[nn.Parameter], plan: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """Returns AdamW, and Muon for some matrices, with steps as long as AdamW's.

    Args:
        parameters: All trained parameters.
        matrices: Parameters for Muon; none for AdamW only.
        plan: "lr", "betas" and "weight_decay".
    """
    taken = {id(matrix) for matrix in matrices}
    adam_parameters = [parameter for parameter in parameters if id(parameter) not in taken]
    lr, decay = plan["lr"], plan["weight_decay"]
    optimisers: list[torch.optim.Optimizer] = [
        make_optimiser(adam_parameters, lr, plan["betas"], decay)
    ]
    if matrices:
        optimisers.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimisers


def cosine_lr(step: int, steps: int, warmup: int, peak: float, floor: float = 0.01) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine down to ``floor * peak``."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))
    return peak * min(1.0, (step + 1) / warmup) * (cosine * (1 - floor) + floor)


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimiser.param_groups:
        group["lr"] = lr


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint atomically: an interruption leaves the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Reads a checkpoint, or returns None if there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


class TrainingLog:
    """Appends JSON lines to a file, and prints them on a terminal."""

    def __init__(self, path: Path, stage: str) -> None:
        """Opens the log for one stage."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._stage = stage
        self._start = time.monotonic()

    def write(self, **values: Any) -> None:
        """Appends one record; floats are rounded to keep the file small."""
        seconds = round(time.monotonic() - self._start)
        record = {"stage": self._stage, "seconds": seconds, **_rounded(values)}
        line = json.dumps(record, separators=(",", ":"))
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        if sys.stdout.isatty():
            sys.stdout.write(line + "\n")


class Training:
    """The steps of a stage: it resumes from its checkpoint, learns, and writes its log and checkpoints.

    Attributes:
        optimiser: AdamW of all parameters.
        log: of the stage.
        first_step: number of the next step.
    """

    def __init__(
        self,
        worker: Worker,
        plan: dict[str, Any],
        path: Path,
        modules: dict[str, nn.Module],
        parameters: Sequence[nn.Parameter],
        lr: Callable[[int], float] | None = None,
        stage: str = "",
        start: dict[str, Any] | None = None,
    ) -> None:
        """Takes up where the checkpoint ends.

        Args:
            worker: This process.
            plan: The recipe's part for the stage.
            path: The checkpoint.
            modules: What the checkpoint holds, by name.
            parameters: What learns.
            lr: The learning rate of a step; by default a warm-up and a cosine.
            stage: Name in the log; by default the checkpoint's.
            start: A checkpoint to start from if there is none of its own.
        """
        self._worker, self._plan, self._path, self._modules = worker, plan, path, modules
        self._parameters = list(parameters)
        self._lr = lr or (lambda step: cosine_lr(step, plan["steps"], plan["warmup"], plan["lr"]))
        self.optimiser = make_optimiser(
            self._parameters, self._lr(0), plan["betas"], plan["weight_decay"]
        )
        self.log = TrainingLog(path.with_name("log.jsonl"), stage or path.stem)
        self.first_step = 0
        if checkpoint := load_checkpoint(path) or start:
            for name, module in modules.items():
                module.load_state_dict(checkpoint[name])
            self.optimiser.load_state_dict(checkpoint["optimiser"])
            self.first_step = checkpoint["step"]

    def run(
        self,
        learn: Callable[[int], dict[str, torch.Tensor]],
        log_every: int,
        validate: Callable[[], Iterable[dict[str, Any]]],
        after: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Runs all steps; only the leading worker writes.

        Args:
            learn: Computes the gradients of a step and returns its losses.
            log_every: Steps of a line of the log, which has the means of the losses.
            validate: Returns records of the log.
            after: Called with the number of each step when the parameters have moved.
        """
        steps, sums = self._plan["steps"], dict[str, Any]()
        for step in range(self.first_step, steps):
            set_lr(self.optimiser, self._lr(step))
            self.optimiser.zero_grad()
            for name, loss in learn(step).items():
                sums[name] = sums.get(name, 0.0) + loss.detach()
            self._worker.average_gradients(self._parameters)
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self.optimiser.step()
            after(step)
            done = step + 1
            if not self._worker.leads:
                continue
            if done % log_every == 0:
                means = {name: total.item() / log_every for name, total in sums.items()}
                self.log.write(step=done, **means)
                sums = {}
            if done % self._plan["save_every"] == 0 or done == steps:
                self.save(done)
            if done % self._plan["validate_every"] == 0 or done == steps:
                for record in validate():
                    self.log.write(step=done, **record)

    def save(self, done: int, path: Path | None = None) -> None:
        """Writes the checkpoint after `done` steps, or another one."""
        state: dict[str, Any] = {
            name: module.state_dict() for name, module in self._modules.items()
        }
        state |= {"optimiser": self.optimiser.state_dict(), "step": done}
        save_checkpoint(path or self._path, state)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
