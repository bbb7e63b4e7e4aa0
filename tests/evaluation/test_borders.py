"""Media that a data set names come from its folder or the hub's cache, and nothing is asked of another machine."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.evaluation.data_sources import AllowedSources, allowed_sources, local_data
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, load_tasks
from espalier.harness.runs.run_settings import task_files
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, DatasetSpec
from espalier.harness.store.files.digests import Digests
from tests.refused import refused

TASK = """
task: shown
dataset_path: somebody/pictures
test_split: test
output_type: generate_until
doc_to_visual: !function utils.images
doc_to_text: !function utils.text
doc_to_target: target
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""

UTILS = """
from PIL import Image

def images(doc):
    return [doc["image"]]

def text(doc, lmms_eval_specific_kwargs=None):
    return "what"

def opened(doc):
    return Image.open(doc["file"])
"""


class Counting(BaseHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(png("red"))

    do_HEAD = do_GET

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []
    handler = type("Handler", (Counting,), {"requests": requests})
    with HTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", requests
        listening.shutdown()


def png(colour: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(out, "PNG")
    return out.getvalue()


def write(folder: Path, *images: dict[str, Any]) -> Path:
    """Write a data set with these values in its image column, and a picture inside of the folder."""
    (folder / "images" / ".hidden").mkdir(parents=True, exist_ok=True)
    (folder / "images/inside.png").write_bytes(png("blue"))
    (folder / "images/.hidden/secret.png").write_bytes(png("red"))
    columns = {
        "image": pa.array(images, type=pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        "target": ["a"] * len(images),
        "file": [image["path"] for image in images],
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "target": datasets.Value("string"),
            "file": datasets.Value("string"),
        }
    )
    table = pa.table(columns).replace_schema_metadata(features.arrow_schema.metadata)
    pq.write_table(table, folder / "test-00000-of-00001.parquet")
    return folder


def opened(data: Path, task: Path, offline: bool = True) -> LoadedBenchmark:
    task.mkdir(exist_ok=True)
    (task / "shown.yaml").write_text(TASK)
    (task / "utils.py").write_text(UTILS)
    bench = BenchmarkSpec(
        *("shown", "shown", None, None, ("exact_match",), "exact_match"),
        dataset=DatasetSpec(path="somebody/pictures"),
        path=data,
    )
    return load_tasks("shown", task, offline, data=local_data(bench))


def outside(tmp_path: Path, data: Path, address: str) -> dict[str, str]:
    """Return ways to name a picture that does not lie in the data set's folder."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(png("red"))
    (data / "images").mkdir(parents=True, exist_ok=True)
    (data / "images/link.png").symlink_to(secret)
    (data / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("secret.png", png("red"))
    return {
        "path": str(secret),
        "parent": str(data / "images/../../secret.png"),
        "relative": "../secret.png",
        "link": str(data / "images/link.png"),
        "linked folder": str(data / "elsewhere/secret.png"),
        "file address": f"file://{secret}",
        "local address": f"local://{secret}",
        "hidden": str(data / "images/.hidden/secret.png"),
        "archive": f"zip://secret.png::{tmp_path / 'all.zip'}",
        "archive at a file address": f"zip://secret.png::file://{tmp_path / 'all.zip'}",
        "address": f"{address}/x.png",
        "upper case address": f"{address.replace('http', 'HTTP')}/x.png",
        "archive at an address": f"zip://secret.png::{address}/all.zip",
        "cached address": f"simplecache::{address}/x.png",
        "cached file": f"filecache::file://{secret}",
        "bucket": "s3://bucket/x.png",
        "hub": "hf://datasets/somebody/pictures/x.png",
        "metadata service": "http://169.254.169.254/latest/x.png",
    }


@pytest.mark.slow
def test_media_outside_of_the_folder_are_refused_and_no_request_is_made(
    tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    address, requests = server
    data = tmp_path / "data"
    ways = outside(tmp_path, data, address)
    # lmms-eval looks at the first row when it loads a task.
    write(data, *({"bytes": None, "path": path} for path in ["images/inside.png", *ways.values()]))
    for offline in (True, False):
        loaded = opened(data, tmp_path / "task", offline)
        (task,) = loaded.tasks
        docs = task.test_docs()
        for row, path in enumerate(ways.values(), start=1):
            with loaded.serving():
                with pytest.raises(UserError, match=r"valid: .*benchmark\.path="):
                    docs[row]
                for kind in ("image", "video"):
                    assert "in the data" in refused(
                        loaded.borders.chat, [{"content": [{"type": kind, kind: path}]}]
                    )
                # What a task's own function opens.
                if "://" not in path:
                    assert "in the data lies elsewhere" in refused(Image.open, path)
    assert requests == []


def test_media_inside_of_the_folder_are_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with_bytes = {"bytes": png("red"), "path": "http://127.0.0.1:9/never/asked.png"}
    inside = str(data / "images/inside.png")
    (data / "images").mkdir(parents=True)
    (data / "images/again.png").symlink_to("inside.png")
    with zipfile.ZipFile(data / "all.zip", "w") as archive:
        archive.writestr("a.png", png("blue"))
    paths = [
        inside,
        "images/inside.png",
        f"file://{inside}",
        str(data / "images/../images/inside.png"),
        str(data / "images/again.png"),
        f"zip://a.png::{data / 'all.zip'}",
        f"zip://a.png::file://{data / 'all.zip'}",
    ]
    write(data, with_bytes, *({"bytes": None, "path": path} for path in paths))
    loaded = opened(data, tmp_path / "task")
    (task,) = loaded.tasks
    with loaded.serving():
        pixels = [doc["image"].getpixel((0, 0)) for doc in task.test_docs()]
        assert Image.open(inside).size == (8, 8)
    assert pixels == [(255, 0, 0), *[(0, 0, 255)] * len(paths)]
    # Nothing stays in place of what was there.
    assert Image.open(tmp_path / "data/images/.hidden/secret.png").size == (8, 8)


def test_a_folder_of_the_hub_s_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    data = tmp_path / "datasets--a--b/snapshots/abc"
    data.mkdir(parents=True)
    (tmp_path / "datasets--a--b/blobs").mkdir()
    (tmp_path / "datasets--a--b/blobs/1").write_bytes(png("green"))
    (data / "x.png").symlink_to("../../blobs/1")
    write(data, {"bytes": None, "path": str(data / "x.png")})
    loaded = opened(data, tmp_path / "task")
    with loaded.serving():
        assert loaded.tasks[0].test_docs()[0]["image"].getpixel((0, 0)) == (0, 128, 0)


def test_a_changed_picture_changes_the_digests_that_the_key_is_made_of(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"bytes": None, "path": "images/inside.png"})
    spec = BenchmarkSpec(
        "shown", "shown", None, None, (), "", dataset=DatasetSpec(path="a/b"), path=data
    )
    served = local_data(spec)
    before = served.copies.revision(Digests())
    (data / "images/inside.png").write_bytes(png("yellow"))
    assert served.copies.revision(Digests()) != before
    # Beside a task of the user's own, too.
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "scene.png").write_bytes(png("blue"))
    benchmark = BenchmarkSpec("own", "own", folder, None, (), "")
    assert task_files(benchmark) == {folder: [folder / "scene.png"]}


@pytest.mark.parametrize("scheme", ["http", "https", "ftp", "s3", "gs", "gcs", "az", "ssh", "smb"])
def test_offline_refuses_every_other_machine(scheme: str, tmp_path: Path) -> None:
    with allowed_sources(None, tmp_path, offline=True).enforced(pixels=False):
        for name in (f"{scheme}://127.0.0.1:9/x", f"{scheme}://127.0.0.1:9/x.zip"):
            with pytest.raises((UserError, ImportError)):
                fsspec.open(name).open()
        assert fsspec.filesystem("file").exists(str(tmp_path))


def test_a_table_at_an_address_is_refused_offline(
    tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    address, requests = server
    folder = tmp_path / "task"
    folder.mkdir()
    table = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {address}/x.jsonl}}}}"
    (folder / "shown.yaml").write_text(TASK.replace("dataset_path: somebody/pictures", table))
    (folder / "utils.py").write_text(UTILS)
    assert "offline=true" in refused(load_tasks, "shown", folder)
    assert requests == []


def test_wide_and_transparent_pictures_of_a_column_come_whole(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    wide, clear = io.BytesIO(), io.BytesIO()
    Image.fromarray(ramp).save(wide, "PNG")
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(clear, "PNG")
    rows = ({"bytes": file.getvalue(), "path": None} for file in (wide, clear))
    loaded = opened(write(tmp_path / "data", *rows), tmp_path / "task")
    docs, borders = loaded.tasks[0].test_docs(), loaded.borders
    for how, shade in (("drop", 0), ("white", 255)):
        laid = AllowedSources(borders.digested, borders.folders, True, how)
        with laid.enforced(pixels=True):
            # What the functions of tasks do with a column.
            first, second = (doc["image"].convert("RGB") for doc in docs)
        assert np.abs(np.asarray(first)[..., 0] - ramp / 257.0).max() <= 0.5
        assert second.getpixel((0, 0)) == (shade,) * 3
