"""What the openings of one benchmark have in common, kept between the cells of a command.

Finding a task among all task files and loading its data set takes longer than answering ten samples of a small model,
and gives the same for each cell. The tasks themselves are made anew each time: a run lays its own functions over them,
and the functions of their files are theirs alone. Whatever is taken off the shelf is a copy, so that nobody sees what
another run did with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TaskCache:
    """Indices of task files, and the data of the benchmark that was opened last: two may not fit.

    Attributes:
        indices: by where they were looked for.
        benchmark: whose data are kept.
        data: what loading left in each task, by task.
    """

    indices: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    benchmark: Hashable = None
    data: dict[Hashable, Mapping[str, Any]] = field(default_factory=dict)

    def index(self, place: Hashable, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the index of the task files in a place, which is read once."""
        if place not in self.indices:
            self.indices[place] = read()
        return deepcopy(self.indices[place])

    def turn_to(self, benchmark: Hashable) -> None:
        """Let go of the data of any other benchmark."""
        if benchmark != self.benchmark:
            self.benchmark = benchmark
            self.data.clear()

    def put(self, task: Hashable, loaded: Mapping[str, Any]) -> None:
        """Keep a copy of what loading left in a task. Cost: little, since data sets share their tables."""
        self.data[task] = deepcopy(loaded)

    def taken(self, task: Hashable) -> Mapping[str, Any] | None:
        """Return a copy of what loading left in a task; None if it is to be loaded."""
        return deepcopy(self.data.get(task))
