"""Videos where lmms-eval's tasks unpack them: below HF_HOME."""

from __future__ import annotations

import os
from pathlib import Path

from espalier.harness.errors import UserError

#: Endings that the videos of these data sets have.
ENDINGS = (".mp4", ".MP4", ".mkv")


def unpacked(folder: str, video: str) -> str:
    """Return the path of a video below HF_HOME, whatever its ending.

    Raises:
        UserError: what lies there is a folder of frames, whose order and rate nothing tells.
        FileNotFoundError: there is none of that name.
    """
    home = Path(os.getenv("HF_HOME", "~/.cache/huggingface")).expanduser()
    path = home / folder / video
    # A name may hold dots, so endings are added, not exchanged.
    candidates = (path, *(path.with_name(path.name + end) for end in ENDINGS))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None and path.is_dir():
        raise UserError(
            f"video {str(path)!r} is a folder of frames; valid: a video file, as in the revision of the data set that "
            "the task file names"
        )
    if file is None:
        raise FileNotFoundError(
            f"video {str(path)!r} is not there; valid: the videos that lmms-eval unpacks"
        )
    return str(file)
