"""What a judge's server sends is read within bounds of bytes and seconds, and told in short lines."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import tracemalloc
import zlib

import pytest

from espalier.harness.evaluation.judging.client import (
    MOST_BYTES,
    MOST_SECONDS,
    JudgeClient,
    RequestError,
    _wait,
)
from espalier.harness.specs.judge_spec import JudgeSpec
from tests.benchmarks.judge_server import Answer, JudgeServer, completion


def ask(answer: Answer) -> str:
    """Return the text of one answer of a server."""
    with JudgeServer() as server:
        server.next(answer)
        spec = JudgeSpec(base_url=server.base_url, model="referee", timeout=30)

        async def once() -> str:
            async with JudgeClient(spec) as client:
                return (await client.ask({"model": "referee", "messages": []})).text

        return asyncio.run(once())


def packed(body: bytes, how: str) -> Answer:
    return Answer(body=body, headers=(("Content-Encoding", how),))


WHOLE = json.dumps(completion("8 2", "referee")).encode()


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body=WHOLE),
        packed(gzip.compress(WHOLE), "gzip"),
        packed(zlib.compress(WHOLE), "deflate"),
    ],
)
def test_an_answer_is_unpacked(answer: Answer) -> None:
    assert ask(answer) == "8 2"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (packed(gzip.compress(bytes(200 * 2**20), 1), "gzip"), "more than"),
        (packed(zlib.compress(bytes(200 * 2**20), 1), "deflate"), "more than"),
        (Answer(body=bytes(MOST_BYTES + 1)), "more than"),
        (packed(WHOLE, "gzip"), "does not unpack"),
        (packed(WHOLE, "br"), "is packed as 'br'"),
        (packed(WHOLE, "gzip, gzip"), "is packed as"),
    ],
)
def test_an_answer_is_bounded(answer: Answer, words: str) -> None:
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(RequestError, match=words):
        ask(answer)
    spent, (_, most) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 20
    assert most < 6 * MOST_BYTES


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *((text, MOST_SECONDS) for text in ("1e300", "inf", "9" * 300)),
        *((text, None) for text in ("nan", "soon", "", "Fri, 31 Dec 9999 23:59:59 GMT")),
        *(("7", 7), ("-7", 0)),
    ],
)
def test_patience_is_bounded(header: str, seconds: float | None) -> None:
    assert _wait(header) == seconds
