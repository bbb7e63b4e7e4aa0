"""List the pages of OCR tasks. lmms-eval runs this file once per task: no state here."""

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
from espalier.harness.evaluation.scoring.documents.omnidoc_page import check_drawing


class PageTask(ConfigurableMessagesTask):
    """A task that reads a data set's files itself, because `datasets` cannot load them.

    `metadata.layout` of the task file names the function that reads them, `metadata.part` the part to read.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the settings of the task file, without `class`."""
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """Fetch the repository, or use the local copy, and list its pages.

        Raises:
            UserError: it cannot be fetched, or its files have another form.
        """
        options = dict(dataset_kwargs or {})
        place = options.pop("hint", "")
        # The library reads the variable at import, which may be before the run sets it.
        options.setdefault("local_files_only", os.environ.get("HF_HUB_OFFLINE") == "1")
        try:
            folder = huggingface_hub.snapshot_download(
                self.DATASET_PATH, repo_type="dataset", **options
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
        # A page is the path of its picture; there is no column of pictures.
        self.dataset_no_image = self.dataset


class DrawnFormulas(PageTask):
    """Pages with formulas compared as rendered, which needs further programs."""

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """List the pages, after a check that formulas can be drawn.

        Raises:
            UserError: as `PageTask.download`, or formulas cannot be drawn.
        """
        check_drawing(f"benchmark.task={self.config.task!r}")
        super().download(dataset_kwargs)
