"""A client of servers with OpenAI's chat completions: one request, its errors, and the pause before the next try."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from espalier.harness.errors import UserError
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.specs.secrets import masked

#: Characters of a server's message that an error line quotes.
QUOTED = 200

#: Largest unpacked answer in bytes, and largest wait in seconds that an error line names.
MOST_BYTES, MOST_SECONDS = 16 * 2**20, 1e6

#: Statuses of temporary failures; with any other status from 400 on the same request fails again.
PASSING = frozenset((408, 409, 425, 429))

#: Statuses that concern one question, such as one that is too long or trips a filter.
OF_THE_QUESTION = frozenset((400, 413, 422))


#: Headers of an answer that are used.
_KEPT = ("Content-Type", "Retry-After")


class RequestError(Exception):
    """A request failed.

    Attributes:
        passing: whether a repetition may succeed.
        wait: seconds to wait before a repetition, as the server requests; None: not given.
        single: whether the failure concerns only this question.
    """

    def __init__(
        self, line: str, passing: bool = True, wait: float | None = None, single: bool = False
    ) -> None:
        # A server's message may contain terminal escapes.
        super().__init__("".join(sign if sign.isprintable() else "\ufffd" for sign in line))
        self.passing, self.wait, self.single = passing, wait, single


@dataclass(frozen=True)
class JudgeReply:
    """A server's answer: its text, the server's name of the model, and the finish reason."""

    text: str
    served: str | None
    ended: str | None


def request_of(spec: JudgeSpec, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return the request for a chat, without fields that are None."""
    sampling = {
        "temperature": spec.temperature,
        "seed": spec.seed,
        "max_tokens": spec.max_tokens,
    }
    fields = {"model": spec.model, "messages": messages, **sampling, **spec.options}
    return {name: value for name, value in fields.items() if value is not None}


def read_key(variable: str) -> str | None:
    """Return the key in an environment variable, None if there is none.

    Raises:
        UserError: the value cannot be sent in a header.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(
            f"judge.key_env={variable}: the variable holds no key; valid: one word of plain characters"
        )
    return key or None


class JudgeClient(httpx.AsyncClient):
    """Sends requests to one server; as an asynchronous context manager it closes its connections at the end.

    The key is only in the header of requests.

    Args:
        spec: address, model, time limit and the name of the variable with the key.
    """

    def __init__(self, spec: JudgeSpec) -> None:
        self._spec = spec
        self._key = read_key(spec.key_env)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        super().__init__(
            headers={
                "Content-Type": "application/json",
                "Accept-Encoding": "gzip, deflate",
                **headers,
            },
            timeout=None,  # one limit for the whole request, below
            # A proxy of the environment cannot reach a server on this machine.
            trust_env=not _on_this_machine(spec.base_url or ""),
            limits=httpx.Limits(max_connections=spec.concurrency),
        )

    async def ask(self, request: Mapping[str, Any]) -> JudgeReply:
        """Return the server's answer.

        Raises:
            RequestError: the request failed; one line without the key.
        """
        # Plain ASCII: a lone surrogate of an answer could not be sent otherwise.
        body = json.dumps(dict(request)).encode()
        try:
            async with asyncio.timeout(self._spec.timeout):
                response = await self._post(body)
        except TimeoutError:
            seconds = f"{self._spec.timeout:g} s (judge.timeout)"
            raise RequestError(f"no whole answer within {seconds}") from None
        except (httpx.TransportError, httpx.InvalidURL, httpx.DecodingError) as error:
            raise RequestError(self._line(f"{type(error).__name__}: {error}")) from None
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            return self._reply(response.json())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            start = self._line(response.text)
            raise RequestError(f"the answer is no chat completion: {start!r}") from None

    async def _post(self, body: bytes) -> httpx.Response:
        """Return the server's whole answer, unpacked, up to `MOST_BYTES`."""
        address = f"{self._spec.base_url}/chat/completions"
        async with self.stream("POST", address, content=body) as response:
            packed = response.headers.get("Content-Encoding", "identity").strip().lower()
            if packed not in ("identity", "", "gzip", "deflate"):
                raise RequestError(f"the answer is packed as {self._line(packed)!r}", passing=False)
            # Either header, of gzip or of zlib.
            unpack = zlib.decompressobj(47) if packed in ("gzip", "deflate") else None
            content = bytearray()
            async for piece in response.aiter_raw():
                try:
                    content += (
                        piece
                        if unpack is None
                        else unpack.decompress(piece, MOST_BYTES + 1 - len(content))
                    )
                except zlib.error as error:
                    raise RequestError(f"the answer does not unpack: {error}") from None
                if len(content) > MOST_BYTES:
                    raise RequestError(
                        f"the answer has more than {MOST_BYTES} bytes", passing=False
                    )
        headers = {name: response.headers[name] for name in _KEPT if name in response.headers}
        return httpx.Response(response.status_code, headers=headers, content=bytes(content))

    def _reply(self, content: Any) -> JudgeReply:
        choice = content["choices"][0]
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError
        served = content.get("model")
        ended = choice.get("finish_reason")
        return JudgeReply(
            self._without_key(text),
            self._without_key(served) if isinstance(served, str) else None,
            ended if isinstance(ended, str) else None,
        )

    def _refusal(self, response: httpx.Response) -> RequestError:
        status = response.status_code
        try:
            message = response.json()["error"]
            message = message["message"] if isinstance(message, Mapping) else message
        except (ValueError, LookupError, TypeError, RecursionError):
            message = response.text
        line = f"HTTP {status}: {self._line(str(message))}".rstrip(": ")
        if status in (401, 403):
            line += f"; the key is read from the variable {self._spec.key_env} (judge.key_env)"
        elif status == 404:
            line += "; valid: a judge.base_url up to /v1, and a judge.model that the server has"
        return RequestError(
            line,
            passing=status in PASSING or status >= 500,
            wait=_wait(response.headers.get("Retry-After")),
            single=status in OF_THE_QUESTION,
        )

    def _line(self, text: str) -> str:
        # The key is masked before the text is cut, which could leave a part of it.
        return " ".join(self._without_key(text).split())[:QUOTED]

    def _without_key(self, text: str) -> str:
        return masked(text, (self._key,))


def _wait(header: str | None) -> float | None:
    """Return the seconds of a header `Retry-After`; None for anything else, as a date."""
    try:
        seconds = float(header or "nan")
    except ValueError:
        return None
    return min(max(seconds, 0.0), MOST_SECONDS) if seconds == seconds else None


def _on_this_machine(address: str) -> bool:
    host = httpx.URL(address).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
