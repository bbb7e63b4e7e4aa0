"""Energy of GPUs, from the counters of NVML (nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from espalier.harness.cost.meters import CostMeter
from espalier.harness.errors import UserError


class EnergyMeter(CostMeter):
    """Joules that all GPUs of a run have drawn since their driver was loaded.

    A counter is of the whole GPU: idle power, memory and other programs count. Cost of a reading: tens of microseconds.
    """

    #: NVML renews the counters every 20 to 100 ms, by generation.
    lag = 0.1

    def __init__(self, nvml: Any, names: Mapping[str, str]) -> None:
        """Open each GPU, in `names` by its UUID; torch has two names for one GPU, and NVML numbers hidden ones."""
        self._names = tuple(names.values())
        self._count = nvml.nvmlDeviceGetTotalEnergyConsumption
        self._cards = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in names]

    @classmethod
    def open(cls, devices: Sequence[str]) -> EnergyMeter:
        """Open the counters and read them once; see the base class."""
        names = sorted(name for name in devices if name.startswith("cuda"))
        if not names:
            raise UserError(
                f"engine.energy=true reads the counters of NVIDIA GPUs, and model.device={devices[0]!r} "
                "is none; valid: engine.energy=false, or model.device=cuda"
            )
        try:
            import pynvml  # not installed on machines without NVIDIA GPUs
        except ImportError as error:
            raise UserError(
                "engine.energy=true needs the package nvidia-ml-py, which is not installed; "
                "valid: engine.energy=false, or pip install nvidia-ml-py"
            ) from error
        try:
            pynvml.nvmlInit()
            uuids = [f"GPU-{card.uuid}" for card in map(torch.cuda.get_device_properties, names)]
            meter = cls(pynvml, dict(zip(uuids, names, strict=True)))
            meter.read()
        except pynvml.NVMLError as error:
            raise UserError(
                f"engine.energy=true: NVML has no energy counter of {', '.join(names)} ({error}); "
                "valid: engine.energy=false, or a whole GPU of the Volta generation or later"
            ) from error
        return meter

    def read(self) -> float:
        """Return the joules of all GPUs."""
        for name in self._names:
            torch.cuda.synchronize(name)
        millijoules: int = sum(self._count(card) for card in self._cards)
        return millijoules / 1e3
