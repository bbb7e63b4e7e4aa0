"""Task indices and data sets, cached between the runs of a command.

Finding a task among all task files and loading its data set takes longer than answering ten samples of a small model,
and is the same for each run. The tasks themselves are made anew each time, because a run replaces some of their
functions. The cache holds and gives copies, so that runs do not see each other's changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
