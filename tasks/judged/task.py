"""Unpack MMBench-Video's videos, which the hub has as pickles. lmms-eval runs this file once per task: no state."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmms_eval.api.task
from datasets import Dataset, DatasetDict
from lmms_eval.api.task import ConfigurableMessagesTask

try:
    from espalier.harness.store.files import durable
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.store.files import durable
from espalier.harness.errors import FOREIGN, UserError

#: Folders of the repository: videos as files, in some copies, and as pickles, on the hub.
FILES, PICKLES = "video", "video_pkl"

#: Folder below HF_HOME with unpacked videos.
UNPACKED = "mmbench_video"

#: Columns that the table must have.
COLUMNS = ("index", "video", "question", "answer", "dimensions")


class DataUnpickler(pickle.Unpickler):
    """Reads pickled tables of names and bytes, and refuses anything else, so that a pickle runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise UnpicklingError."""
        raise pickle.UnpicklingError(f"it holds {module}.{name}; valid: names and bytes alone")


class MMBenchVideo(ConfigurableMessagesTask):
    """The questions, with the path of the video in a further column, `file`."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the settings of the task file, without `class`."""
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """Load the table, and unpack the videos if they are only in pickles.

        Raises:
            UserError: a column or a video is missing, or a pickle is damaged.
        """
        super().download(dataset_kwargs)
        docs = self.dataset[self.config.test_split]
        missing = [name for name in COLUMNS if name not in docs.column_names]
        if missing:
            raise self._error(
                f"split {self.config.test_split} has no column {missing[0]!r}; there is: "
                + ", ".join(docs.column_names)
            )
        docs = docs.add_column("file", self._files(docs))
        self.dataset = DatasetDict({self.config.test_split: docs})
        self.dataset_no_image = self.dataset

    def _files(self, docs: Dataset) -> list[str]:
        wanted = list(dict.fromkeys(docs["video"]))
        home = Path(os.getenv("HF_HOME", "~/.cache/huggingface")).expanduser() / UNPACKED
        files = _existing([home], wanted)
        if len(files) < len(wanted):
            # Looked up in its module, where a run from local files replaces it.
            root = Path(
                lmms_eval.api.task.snapshot_download(repo_id=self.DATASET_PATH, repo_type="dataset")
            )
            files = _existing([root / FILES, home], wanted)
            if len(files) < len(wanted):
                home.mkdir(parents=True, exist_ok=True)
                for file in sorted((root / PICKLES).glob("*.pkl")):
                    self._unpack(file, home)
                files = _existing([root / FILES, home], wanted)
        lost = [name for name in wanted if name not in files]
        if lost:
            row = list(docs["video"]).index(lost[0])
            raise self._error(
                f"split {self.config.test_split}, row {row}: there is no video {lost[0]!r} ({len(lost)} are missing); "
                f"valid: {FILES}/ or {PICKLES}/ of the repository"
            )
        return [str(files[name]) for name in docs["video"]]

    def _unpack(self, file: Path, home: Path) -> None:
        """Write the videos of one pickle, each atomically. Cost: the memory of the pickle."""
        try:
            with file.open("rb") as stream:
                videos = DataUnpickler(stream).load()
            if not isinstance(videos, Mapping):
                raise pickle.UnpicklingError("it is not a table")
        except (*FOREIGN, pickle.UnpicklingError) as error:
            raise self._error(
                f"{str(file)!r} is damaged: {error}; valid: fetch it again"
            ) from error
        for name, content in videos.items():
            if not isinstance(content, bytes) or Path(name).name != name:
                raise self._error(f"{str(file)!r} is damaged: {str(name)[:80]!r} is no video")
            if not (home / f"{name}.mp4").is_file():
                durable.replace(home / f"{name}.mp4", content)

    def _error(self, problem: str) -> UserError:
        return UserError(f"benchmark.task={self.config.task!r}: {self.DATASET_PATH}: {problem}")


def _existing(folders: list[Path], names: list[str]) -> dict[str, Path]:
    """Return the videos that are in one of the folders, by name."""
    paths = {name: [folder / f"{name}.mp4" for folder in folders] for name in names}
    return {
        name: file
        for name, several in paths.items()
        if (file := next((path for path in several if path.is_file()), None)) is not None
    }
