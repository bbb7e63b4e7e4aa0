"""Select the videos of the video tasks. lmms-eval runs this file once per task: no state here."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import av
from datasets import Dataset, DatasetDict
from lmms_eval.api.task import ConfigurableMessagesTask
from lmms_eval.tasks.mvbench.utils import DATA_LIST
from tqdm import tqdm

try:
    from espalier.harness.errors import UserError
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.errors import UserError
from espalier.harness.media.frames import decoded_moments
from espalier.harness.media.timeline import open_video, read_timeline

#: What may name a document's video; questions about one video share it.
NAMES = ("video_name", "videoID", "video_path")

#: Seconds between two updates of this bar, which appears above a bar of the run.
PATIENCE = 5.0


def seconds(path: str) -> float:
    """Return the length of a video in seconds, from its header, or from its packets if the header lacks it.

    Cost: milliseconds; without a stated length one pass over the file.

    Raises:
        UserError: the file is missing, not a video or damaged.
    """
    with open_video(path) as (container, _):
        stated = container.duration
    if stated:
        return float(stated / av.time_base)
    timeline = read_timeline(path)
    displayed = decoded_moments(path) if timeline is None else timeline.moments
    return displayed.duration


class VideoTask(ConfigurableMessagesTask):
    """A task with one question per video of a data set, in a fixed random order, so that a limit is a random sample.

    Videos shorter than `metadata.shortest_seconds` of the task file are left out before the draw. All headers are read
    for that each time the task is opened, because a limit is not known here; 0 reads none and leaves none out.
    The order follows from `metadata.seed`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the settings of the task file, without `class`."""
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """Load the documents and keep one for each video that is long enough.

        Raises:
            UserError: the threshold is not a number of seconds, a video cannot be read, or none is long enough.
        """
        shortest = self.config.metadata.get("shortest_seconds")
        if isinstance(shortest, bool) or not isinstance(shortest, int | float) or shortest < 0:
            raise self._error(f"metadata.shortest_seconds={shortest!r}; valid: seconds, at least 0")
        docs = self.documents(dataset_kwargs)
        name = next(name for name in NAMES if name in docs.column_names)
        first: dict[str, int] = {}
        for place, video in enumerate(docs[name]):
            first.setdefault(video, place)
        places = self._long(docs, list(first.values()), shortest) if shortest else [*first.values()]
        random.Random(self.config.metadata.get("seed", 0)).shuffle(places)
        # None of these data sets has a column of images that would have to be left out of the second.
        self.dataset = DatasetDict({self.config.test_split: docs.select(places)})
        self.dataset_no_image = self.dataset

    def documents(self, dataset_kwargs: dict[str, Any] | None) -> Dataset:
        """Return all documents of the split, after lmms-eval has fetched and unpacked them."""
        super().download(dataset_kwargs)
        return self.dataset[self.config.test_split]

    def _long(self, docs: Dataset, places: list[int], shortest: float) -> list[int]:
        """Return the indices of videos that are long enough, and print their number on stderr."""
        title = f"{self.config.task}: lengths of videos"
        # `disable=None` hides the bar unless stderr is a terminal.
        bar = tqdm(places, title, disable=None, leave=False, mininterval=PATIENCE, unit="video")
        lasting = {place: self._seconds(docs[place]) for place in bar}
        kept = [place for place, length in lasting.items() if length >= shortest]
        if not kept:
            raise self._error(
                f"none of its {len(places)} videos lasts metadata.shortest_seconds={shortest:g}; "
                f"the longest lasts {max(lasting.values()):.1f} s; valid: seconds up to that, or 0 for all videos"
            )
        print(
            f"{self.config.task}: {len(kept)} of {len(places)} videos last at least {shortest:g} s",
            file=sys.stderr,
        )
        return kept

    def _seconds(self, doc: dict[str, Any]) -> float:
        try:
            (path,) = self.doc_to_visual(doc)
            return seconds(path)
        except (FileNotFoundError, UserError) as problem:
            raise self._error(str(problem)) from problem

    def _error(self, problem: str) -> UserError:
        return UserError(f"benchmark.task={self.config.task!r}: {problem}")


class MVBench(VideoTask):
    """The subtasks of MVBench as one task; lmms-eval has a configuration and a folder of videos for each."""

    def documents(self, dataset_kwargs: dict[str, Any] | None) -> Dataset:
        """Return one document per question: its subtask, and the path of its video in the unpacked data set."""
        documents = []
        for subtask, folder in sorted(DATA_LIST.items()):
            self.DATASET_NAME = subtask
            # The first call unpacks the videos, and removes its settings from the arguments.
            videos = super().documents(dataset_kwargs)["video"]
            documents += [
                {"subtask": subtask, "video_path": f"{folder}/{video}"} for video in videos
            ]
        return Dataset.from_list(documents)
