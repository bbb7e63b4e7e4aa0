"""Which pages the tasks of reading ask about. lmms-eval runs this file once per task: no state here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
from datasets import Dataset, DatasetDict
from huggingface_hub.errors import LocalEntryNotFoundError
from lmms_eval.api.task import ConfigurableMessagesTask

try:
    from espalier.harness.errors import UserError
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.errors import UserError
from espalier.harness.evaluation.scoring import page_files as pages
from espalier.harness.evaluation.scoring.documents import cdm


class Pages(ConfigurableMessagesTask):
    """Reads a data set's own files: its repository has no table that `datasets` could load.

    `metadata.layout` of the task file names the function that reads them, `metadata.part` what of them.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the task file; `class` is what led here and no setting."""
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """Fetch the repository, or find it where it is, and list its pages.

        Raises:
            UserError: it is neither here nor can be had, or its files are not what they should be.
        """
        more = dict(dataset_kwargs or {})
        place = more.pop("hint", "")
        # The library reads this when it is imported, which may have been before a run was told to stay offline.
        more.setdefault("local_files_only", os.environ.get("HF_HUB_OFFLINE") == "1")
        try:
            folder = huggingface_hub.snapshot_download(
                self.DATASET_PATH, repo_type="dataset", **more
            )
        except OSError as error:
            away = isinstance(error, LocalEntryNotFoundError)
            line = (
                "not on this machine" if away else next(iter(str(error).splitlines()), repr(error))
            )
            raise UserError(
                f"benchmark.task={self.config.task!r}: {self.DATASET_PATH} cannot be had: {line}; "
                f"valid: a machine that has it, or benchmark.path{place}"
            ) from error
        read = pages.LAYOUTS[self.config.metadata["layout"]]
        rows = read(Path(folder), self.config.metadata.get("part", ""))
        self.dataset = DatasetDict({self.config.test_split: Dataset.from_list(rows)})
        # A page is the path of its picture, no column of pictures.
        self.dataset_no_image = self.dataset


class DrawnFormulas(Pages):
    """Pages whose formulas are compared as they look, which takes programs that not every machine has."""

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """List the pages, once it is known that formulas can be drawn.

        Raises:
            UserError: also where they cannot.
        """
        cdm.check(f"benchmark.task={self.config.task!r}")
        super().download(dataset_kwargs)
