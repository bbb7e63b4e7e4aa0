"""What the plug-in does, in vLLM's /metrics.

The processes that answer HTTP also prepare prompts: they count requests and tokens in the registry that /metrics shows.
Pictures are encoded in processes of an engine, and /metrics does not show their registries: these write their times
into files of prometheus_client's form for several processes, in a folder that they inherit by an environment variable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from espalier.serve.setting import KEY

#: Folder of the files. With several processes for HTTP it is vLLM's own, which /metrics shows as it is.
FOLDER, OF_VLLM = "ESPALIER_METRICS_DIR", "PROMETHEUS_MULTIPROC_DIR"

SECONDS = f"{KEY}_selection_seconds"
ABOUT_SECONDS = "Seconds that a batch of pictures and videos spends on signals, choice and merging."

#: Upper ends of the histogram's classes.
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, float("inf"))


@cache
def make_folder() -> TemporaryDirectory[str] | None:
    """Make the folder and name it in the environment, before engines start; None: vLLM has named one.

    The folder is removed when this process ends.
    """
    if OF_VLLM in os.environ:
        return None
    folder = TemporaryDirectory(prefix="espalier-metrics-")
    os.environ[FOLDER] = folder.name
    return folder


@dataclass(frozen=True)
class RequestCounts:
    """Counters of this process.

    Attributes:
        requests: by method.
        visual: visual tokens that a method may drop, by method.
        kept: of these the ones that stay, by method.
    """

    requests: Any
    visual: Any
    kept: Any

    def add(self, method: str, visual: int, kept: int) -> None:
        """Count one request."""
        self.requests.labels(method).inc()
        self.visual.labels(method).inc(visual)
        self.kept.labels(method).inc(kept)


@cache  # a registry takes a name once
def request_counts() -> RequestCounts:
    """Return the counters, in prometheus_client's registry with the times of the engines beside them."""
    from prometheus_client import REGISTRY, Counter
    from prometheus_client.multiprocess import MultiProcessCollector

    if FOLDER in os.environ:
        MultiProcessCollector(REGISTRY, os.environ[FOLDER])
    return RequestCounts(
        Counter(f"{KEY}_requests", "Requests with pictures or videos.", ["method"]),
        Counter(f"{KEY}_visual_tokens", "Visual tokens before the method.", ["method"]),
        Counter(f"{KEY}_kept_tokens", "Visual tokens that stay.", ["method"]),
    )


class SelectionTimes:
    """A histogram that another process shows.

    Args:
        folder: of its file.
    """

    def __init__(self, folder: Path) -> None:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key
        from prometheus_client.utils import floatToGoString

        self._values = MmapedDict(str(folder / f"histogram_{KEY}{os.getpid()}.db"))
        self._sum = mmap_key(SECONDS, f"{SECONDS}_sum", [], [], ABOUT_SECONDS)
        self._classes = {
            bound: mmap_key(
                SECONDS, f"{SECONDS}_bucket", ["le"], [floatToGoString(bound)], ABOUT_SECONDS
            )
            for bound in BOUNDS
        }
        for key in (self._sum, *self._classes.values()):
            self._add(key, 0.0)

    def observe(self, seconds: float) -> None:
        """Add one batch. Cost: microseconds, no call of the system."""
        self._add(self._sum, seconds)
        self._add(self._classes[next(bound for bound in BOUNDS if seconds <= bound)], 1.0)

    def _add(self, key: str, amount: float) -> None:
        value, _ = self._values.read_value(key)
        self._values.write_value(key, value + amount, 0.0)


def selection_times() -> SelectionTimes | None:
    """Return the histogram of this process of an engine; None: there is no folder for it."""
    folder = os.environ.get(OF_VLLM) or os.environ.get(FOLDER)
    return None if folder is None or not Path(folder).is_dir() else SelectionTimes(Path(folder))
