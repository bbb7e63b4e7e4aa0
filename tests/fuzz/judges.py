"""Servers that judge badly: odd answers, odd headers, bodies without end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

from tests.fuzz.case import KEY, Case

#: Name, status, headers and body of an answer that is no verdict.
ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "empty": (200, {}, b""),
    "html": (200, {"Content-Type": "text/html"}, b"<html>no</html>"),
    "null": (200, {}, b"null"),
    "list": (200, {}, b"[]"),
    "no choices": (200, {}, b'{"choices": []}'),
    "choices null": (200, {}, b'{"choices": null}'),
    "message list": (200, {}, b'{"choices": [{"message": []}]}'),
    "content 5": (200, {}, b'{"choices": [{"message": {"content": 5}}]}'),
    "deep": (200, {}, b"[" * 100_000),
    "not utf-8": (200, {}, b"\xff\xfe\x00"),
    "bomb": (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(100 * 2**20), 1)),
    "flood": (200, {}, b"x" * (20 * 2**20)),
    "not gzip": (200, {"Content-Encoding": "gzip"}, b"{}"),
    "brotli": (200, {"Content-Encoding": "br"}, b"{}"),
    "patience": (429, {"Retry-After": "1e300"}, b"{}"),
    "odd date": (503, {"Retry-After": "Fri, 99 Dec 9999 99:99:99 GMT"}, b"{}"),
    "key": (401, {}, json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()),
    "key html": (500, {}, f"<b>{KEY}</b>".encode()),
    "redirect": (302, {"Location": "http://127.0.0.1:9/"}, b""),
    "escapes": (400, {}, b'{"error": {"message": "\\u001b[2J\\u0007"}}'),
    "error 3": (400, {}, b'{"error": 3}'),
    "teapot": (418, {}, b""),
}


def judges() -> Iterator[Case]:
    """Yield a case for each answer."""
    yield from (Case("judge", "call:judge", (name,), refused=True) for name in ANSWERS)
