"""Pictures of 12 megapixels and video files on the disk, and a benchmark with a question on each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image

#: Width and height of a picture, as phones take them, and of a frame; frames a second, and of a file.
PICTURE, FRAME, RATE, FRAMES = (4000, 3000), (1280, 720), 24, 240

TASK = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: NAME.jsonl}}
test_split: test
output_type: generate_until
doc_to_messages: !function utils.messages
doc_to_visual: !function utils.nothing
doc_to_text: question
doc_to_target: kind
process_results: !function utils.score
generation_kwargs: {do_sample: false, temperature: 0}
metric_list:
  - {metric: mark, aggregation: mean, higher_is_better: true}
"""

UTILS = """
def messages(doc, lmms_eval_specific_kwargs=None):
    part = {"type": doc["kind"], "url": doc["file"]}
    return [{"role": "user", "content": [part, {"type": "text", "text": doc["question"]}]}]

def nothing(doc):
    return []

def score(doc, results):
    return {"mark": 1.0}
"""


def write_pictures(folder: Path, count: int) -> list[Path]:
    """Write JPEG files of some megabytes each, all different."""
    paths = [folder / f"picture_{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        Image.fromarray(_pixels(number, *PICTURE)).save(path, quality=90)
    return paths


def write_videos(folder: Path, count: int) -> list[Path]:
    """Write mp4 files in H.264 of ten seconds, a keyframe a second, all different."""
    paths = [folder / f"video_{number}.mp4" for number in range(count)]
    for number, path in enumerate(paths):
        wide = _pixels(number, 2 * FRAME[0], FRAME[1])
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=RATE)
            stream.width, stream.height, stream.pix_fmt = *FRAME, "yuv420p"
            stream.options = {"preset": "veryfast", "g": str(RATE)}
            for index in range(FRAMES):
                offset = index * FRAME[0] // FRAMES  # the camera turns
                pixels = np.ascontiguousarray(wide[:, offset : offset + FRAME[0]])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode(None))
    return paths


def write_benchmark(folder: Path, name: str, kind: str, files: Sequence[Path]) -> list[str]:
    """Write a task with one question on each file; return the overrides that select it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(TASK.replace("NAME", name), encoding="utf-8")
    (folder / "utils.py").write_text(UTILS, encoding="utf-8")
    docs = [{"question": "What is it?", "kind": kind, "file": str(file)} for file in files]
    (folder / f"{name}.jsonl").write_text(
        "".join(f"{json.dumps(doc)}\n" for doc in docs), encoding="utf-8"
    )
    return [
        *(f"benchmark.{key}={name}" for key in ("name", "task")),
        f"benchmark.include_path={folder}",
        f"benchmark.sources=[{folder}]",
        "benchmark.metrics=[mark]",
        "benchmark.headline=mark",
        "limit=null",
    ]


def _pixels(seed: int, width: int, height: int) -> np.ndarray:
    """Return (H, W, 3) uint8: smooth colours with grain, which compress about as photographs do."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 100, width // 100, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    grain = rng.integers(-6, 7, (height, width, 1), dtype=np.int16)
    return np.clip(smooth + grain, 0, 255).astype(np.uint8)
