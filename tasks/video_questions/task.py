"""MVBench as one task. lmms-eval runs this file once per task: no state here."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

from datasets import Dataset, DatasetDict
from lmms_eval.api.task import ConfigurableMessagesTask
from lmms_eval.tasks.mvbench.utils import DATA_LIST

#: Columns that all subtasks have; some have more, such as the times between which a video was cut.
COLUMNS = ("video", "question", "candidates", "answer")


class MVBenchQuestions(ConfigurableMessagesTask):
    """MVBench with alternating subtasks, so that a limit takes equally many questions of each."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the settings of the task file, without `class`."""
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """Load the questions of all subtasks, each with its name and the folder of its videos."""
        split = self.config.test_split
        parts = []
        for subtask, folder in sorted(DATA_LIST.items()):
            self.DATASET_NAME = subtask
            # The first call unpacks the videos, and removes its settings from the arguments.
            super().download(dataset_kwargs)
            docs = self.dataset[split].select_columns(list(COLUMNS))
            parts.append([doc | {"subtask": subtask, "folder": folder} for doc in docs])
        turns = chain.from_iterable(zip_longest(*parts))
        docs = Dataset.from_list([doc for doc in turns if doc is not None])
        self.dataset = DatasetDict({split: docs})
        self.dataset_no_image = self.dataset
