"""Videos unpacked by lmms-eval's tasks, below HF_HOME."""

from __future__ import annotations

import os
from pathlib import Path

from espalier.harness.errors import UserError

#: File suffixes of the videos in these data sets.
ENDINGS = (".mp4", ".MP4", ".mkv")


def unpacked(folder: str, video: str) -> str:
    """Return the path of a video below HF_HOME, with any of the suffixes.

    Raises:
        UserError: the path is a folder of frames, of unknown order and rate.
        FileNotFoundError: the video is missing.
    """
    home = Path(os.getenv("HF_HOME", "~/.cache/huggingface")).expanduser()
    path = home / folder / video
    # A name may contain dots, so suffixes are added, not replaced.
    candidates = (path, *(path.with_name(path.name + end) for end in ENDINGS))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None and path.is_dir():
        raise UserError(
            f"video {str(path)!r} is a folder of frames; valid: a video file, as in the revision of the data set that "
            "the task file names"
        )
    if file is None:
        raise FileNotFoundError(
            f"video {str(path)!r} does not exist; valid: the videos that lmms-eval unpacks"
        )
    return str(file)
