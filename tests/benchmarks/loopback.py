"""A small hub on loopback: folders `<owner>/<name>` served by the part of the Hub's protocol that downloads use."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

API = re.compile(
    r"/api/(?P<kind>datasets|models)/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<what>revision|tree|paths-info|resolve-revision)/(?P<rev>[^/]+)(?:/(?P<path>.*))?)?"
)
FILE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)")

#: Files from this size on are kept apart, as the Hub does with Git LFS.
LARGE = 5_000


@dataclass
class Hub:
    """What is served, and what was requested.

    Attributes:
        root: holds `<owner>/<name>`.
        gated: repositories whose files nobody gets.
        revisions: what else stands for the one commit that each has.
        broken: how many downloads of large files still end in the middle.
        requests: every (method, path).
    """

    root: Path
    gated: set[str] = field(default_factory=set)
    revisions: set[str] = field(default_factory=set)
    broken: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def files(self, name: str) -> dict[str, Path]:
        folder = self.root / name
        return {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    def commit(self, name: str) -> str:
        listing = [
            (path, hashlib.sha1(file.read_bytes()).hexdigest())
            for path, file in self.files(name).items()
        ]
        return hashlib.sha1(json.dumps(listing).encode()).hexdigest()

    def downloads(self) -> list[str]:
        """Return the files that were asked for, not only looked at."""
        return [
            match["path"]
            for method, path in self.requests
            if method == "GET" and (match := FILE.fullmatch(path)) is not None
        ]


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """Serve a folder until the block ends."""
    hub = Hub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reached(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process reach the hub, with an empty cache."""
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "datasets"))
    # It remembers the first folder of the process.
    resolve = "lmms_eval.api.task._resolve_hf_datasets_cache_dir"
    monkeypatch.setattr(resolve, lambda: str(home / "datasets"))


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Say nothing: a test's output is its own."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if match := API.fullmatch(path):
            self._api(match, parse_qs(url.query), body)
        elif match := FILE.fullmatch(path):
            self._file(match)
        else:
            self._error(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = _answer

    def _api(self, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        name, revision = match["name"], match["rev"]
        files = self.hub.files(name)
        if not files:
            self._error(401, "RepoNotFound")
            return
        commit = self.hub.commit(name)
        if revision not in (None, "main", *self.hub.revisions, commit):
            self._error(404, "RevisionNotFound")
            return
        if match["what"] == "tree":
            below = (match["path"] or "").rstrip("/")
            inside = {
                path: file
                for path, file in files.items()
                if not below or path.startswith(f"{below}/")
            }
            self._json(
                _tree(inside, below, recursive="true" in str(query.get("recursive", "")).lower())
            )
        elif match["what"] == "paths-info":
            paths = (
                json.loads(body)["paths"]
                if body.startswith(b"{")
                else parse_qs(body.decode())["paths"]
            )
            folders = {str(parent) for path in files for parent in Path(path).parents}
            entries = [_entry(path, files[path]) for path in paths if path in files]
            entries += [_folder(path) for path in paths if path in folders]
            self._json(entries)
        else:
            siblings = [
                {"rfilename": path, "size": file.stat().st_size} for path, file in files.items()
            ]
            self._json(
                {
                    "id": name,
                    "sha": commit,
                    "private": False,
                    "gated": name in self.hub.gated,
                    "disabled": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "lastModified": "2026-01-01T00:00:00.000Z",
                    "siblings": siblings,
                }
            )

    def _file(self, match: re.Match[str]) -> None:
        name = match["name"]
        file = self.hub.files(name).get(match["path"])
        if name in self.hub.gated:
            self._error(403, "GatedRepo")
            return
        if file is None:
            self._error(404, "EntryNotFound" if self.hub.files(name) else "RepoNotFound")
            return
        content = file.read_bytes()
        start = 0
        if first_byte := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(first_byte[1])
        self.send_response(206 if start else 200)
        revision = match["rev"]
        commit = revision if len(revision) == 40 else self.hub.commit(name)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if len(content) >= LARGE:
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-ETag", f'"{_etag(file)}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.broken and len(content) >= LARGE:
            self.hub.broken -= 1
            self.wfile.write(content[start : start + (len(content) - start) // 2])
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(content[start:])

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} says the test")
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(file: Path) -> str:
    content = file.read_bytes()
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _entry(path: str, file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": _etag(file)[:40]}
    if size >= LARGE:
        entry["lfs"] = {"oid": _etag(file), "size": size, "pointerSize": 134}
    return entry


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


def _tree(files: dict[str, Path], below: str, recursive: bool) -> list[dict[str, Any]]:
    base = Path(below)
    folders = {
        str(parent)
        for path in files
        for parent in Path(path).parents
        if parent != base and base in parent.parents
    }
    entries = [_folder(path) for path in sorted(folders)]
    entries += [_entry(path, file) for path, file in files.items()]
    if recursive:
        return entries
    return [entry for entry in entries if Path(entry["path"]).parent == base]
