"""A judge on this machine: a real HTTP server that speaks OpenAI's chat completions, well or as badly as a test asks.

`with JudgeServer() as server:` and then `judge.base_url=<server.base_url> judge.model=referee`, or `server.argv`. It
rates by `fair`, which compares the answer with the reference, unless `next` has been told of troubles to come first.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Messages = Sequence[dict[str, str]]

#: The places of the answers in the words of the benchmarks, with the marks of an answer that equals the reference, of
#: none, and of any other.
RUBRICS = (
    (
        re.compile(r"Answer 1:\n(.*)\n\(end of answer 1\)\n\nAnswer 2:\n(.*)\n\(end of ans", re.S),
        ("8 8\nBoth are right.", "8 1\nThe second says nothing.", "8 2\nThe second is wrong."),
    ),
    (re.compile(r"right answer: (.*)\nThe answer to mark: (.*)\nIts mark:", re.S), ("3", "0", "1")),
    (
        re.compile(r"right description: (.*)\nThe description to rate: (.*)\n\nReply", re.S),
        ("5", "0", "1"),
    ),
)


def fair(messages: Messages) -> str:
    """Rate an answer: as good as the reference that it equals, bad if it is empty, and little better otherwise."""
    for places, (equal, empty, other) in RUBRICS:
        match = places.search(messages[-1]["content"])
        if match is not None:
            reference, answer = match.groups()
            return equal if answer == reference else other if answer.strip() else empty
    raise AssertionError(f"words that this judge does not know: {messages[-1]['content']!r}")


@dataclass(frozen=True)
class Answer:
    """What the server says to one request.

    Attributes:
        status: of HTTP.
        body: what is sent; None: a completion that holds `text`.
        text: of the completion; None: what the server's judge says.
        headers: sent along.
        delay: seconds before anything is sent.
        drip: seconds between the bytes of the body.
        hang_up: whether the connection ends before anything is sent.
    """

    status: int = 200
    body: bytes | None = None
    text: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    delay: float = 0.0
    drip: float = 0.0
    hang_up: bool = False


def error(status: int, message: str, **headers: str) -> Answer:
    """Return an error as such servers put it."""
    body = json.dumps({"error": {"message": message, "type": "error", "code": status}}).encode()
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Answer(status, body, headers=named)


@dataclass
class JudgeServer:
    """Serves on a free port of 127.0.0.1 as long as the block lasts.

    Args:
        judge: from messages to the text of the verdict.
        models: names that it has.
        key: what it wants to see; None: it takes anybody.
        delay: seconds before every answer.
        requests: the bodies of what was asked, in the order of their coming.
        headers: the headers with them.
        most: the most requests that were under way at once.
    """

    judge: Callable[[Messages], str] = fair
    models: tuple[str, ...] = ("referee",)
    key: str | None = None
    delay: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0
    _coming: list[Answer] = field(default_factory=list)
    _busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def base_url(self) -> str:
        """What `judge.base_url` is to be."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    @property
    def argv(self) -> list[str]:
        """The overrides that choose this judge."""
        return [f"judge.base_url={self.base_url}", f"judge.model={self.models[0]}"]

    def next(self, *answers: Answer) -> None:
        """Give these answers to the next requests, one each."""
        self._coming += answers

    def __enter__(self) -> JudgeServer:
        """Begin to serve."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._serve(self)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop, and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append(body)
            self.headers.append(dict(handler.headers.items()))
            self._busy += 1
            self.most = max(self.most, self._busy)
            answer = self._coming.pop(0) if self._coming else Answer()
        try:
            time.sleep(answer.delay or self.delay)
            self._send(handler, self._refusal(handler, body) or answer, body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # whoever asked has given up
        finally:
            with self._lock:
                self._busy -= 1

    def _refusal(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> Answer | None:
        header = handler.headers.get("Authorization", "")
        if handler.path != "/v1/chat/completions":
            return error(404, f"no such path: {handler.path}")
        if self.key is not None and header != f"Bearer {self.key}":
            # Some servers quote the key that they do not know.
            return error(401, f"Incorrect API key provided: {header.removeprefix('Bearer ')}")
        if body["model"] not in self.models:
            return error(404, f"The model `{body['model']}` does not exist.")
        return None

    def _send(
        self, handler: BaseHTTPRequestHandler, answer: Answer, request: dict[str, Any]
    ) -> None:
        if answer.hang_up:
            handler.close_connection = True
            return
        body = answer.body
        if body is None:
            text = self.judge(request["messages"]) if answer.text is None else answer.text
            body = json.dumps(completion(text, request["model"])).encode()
        handler.send_response(answer.status)
        for name, value in answer.headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        for start in range(0, len(body), 1 if answer.drip else len(body) or 1):
            handler.wfile.write(body[start : start + 1] if answer.drip else body)
            time.sleep(answer.drip)


def completion(text: str | None, model: str, ended: str = "stop") -> dict[str, Any]:
    """Return a chat completion as such servers send it."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": f"{model}-2026-01-01",
        "choices": [{"index": 0, "message": message, "finish_reason": ended}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
