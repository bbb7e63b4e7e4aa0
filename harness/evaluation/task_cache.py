"""Task indices and data sets, cached between the runs of a command.

Finding a task among all task files and loading its data set takes longer than answering ten samples of a small model,
and is the same for each run. The tasks themselves are made anew each time, because a run replaces some of their
functions. The cache returns copies, so that runs do not see each other's changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TaskCache:
    """Indices of task files, and the data of the last opened benchmark; data of two may not fit in memory.

    Attributes:
        indices: by searched folders.
        benchmark: the benchmark of `data`.
        data: attributes that loading set in each task.
    """

    indices: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    benchmark: Hashable = None
    data: dict[Hashable, Mapping[str, Any]] = field(default_factory=dict)

    def index(self, place: Hashable, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the index of the task files in some folders, which is read once."""
        if place not in self.indices:
            self.indices[place] = read()
        return deepcopy(self.indices[place])

    def turn_to(self, benchmark: Hashable) -> None:
        """Drop the data of any other benchmark."""
        if benchmark != self.benchmark:
            self.benchmark = benchmark
            self.data.clear()

    def put(self, task: Hashable, loaded: Mapping[str, Any]) -> None:
        """Keep a copy of a task's loaded attributes. Cost: little, because data sets share their tables."""
        self.data[task] = deepcopy(loaded)

    def taken(self, task: Hashable) -> Mapping[str, Any] | None:
        """Return a copy of a task's loaded attributes; None if they must be loaded."""
        return deepcopy(self.data.get(task))
