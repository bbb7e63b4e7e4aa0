"""A running server of vLLM with the plug-in of this package: `backend.url`."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from espalier.harness.errors import FOREIGN, EngineEnded, UserError, brief, foreign
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.specs.secrets import without_keys
from espalier.serve.setting import KEY

#: Seconds to connect; an answer takes as long as it takes.
CONNECT = 10.0

#: Errors of reading a reply that vLLM did not write.
STRANGE: tuple[type[Exception], ...] = (*FOREIGN, httpx.HTTPError)

#: The request's text is the prompt as it is.
VERBATIM = "{{ messages[0]['content'] }}"

#: Option without which a server ignores the settings of requests, and those that the requests of the harness need.
TRUST = "--trust-request-mm-kwargs"
OPTIONS = f"{TRUST} --trust-request-chat-template"

#: Sampling that a server would otherwise take from the model's generation settings.
NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

#: Method name that the plug-in refuses in a line of its own.
NOBODY = "?"


@cache
def server_version(url: str) -> str:
    """Return the version of vLLM of a server.

    Raises:
        UserError: nothing answers there, or another program.
    """
    try:
        reply = httpx.get(f"{url}/version", timeout=CONNECT)
        return str(reply.json()["version"]).partition("+")[0]
    except (httpx.TransportError, httpx.InvalidURL) as error:
        problem = f"does not answer ({brief(str(error))})"
    except STRANGE:
        problem = "is no server of vLLM"
    raise UserError(
        f"backend.url={without_keys(url)!r} {problem}; valid: the address of `vllm serve`, without /v1"
    )


class EngineServer:
    """A server with several requests at a time; it belongs to somebody else, so nothing ends it.

    Args:
        url: its address.
        model: the run's model.

    Raises:
        UserError: nothing answers, the server has another model or no plug-in, or it takes no settings of requests.
    """

    def __init__(self, url: str, model: ModelSpec) -> None:
        self._url, self._place = url, f"backend.url={without_keys(url)!r}"
        self._http = httpx.Client(timeout=httpx.Timeout(None, connect=CONNECT))
        self.versions: Mapping[str, str] = {"vllm": server_version(url)}
        self._name = self._served_name(model)
        self._check_plugin()

    @property
    def alive(self) -> bool:
        """Whether it takes requests; a server that has ended is noticed at the next request."""
        return True

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers of requests, which run together.

        Raises:
            UserError: the server refuses one of them.
            EngineEnded: it does not answer any more.
        """
        with ThreadPoolExecutor(max_workers=max(len(requests), 1)) as pool:
            return list(pool.map(self._answer, requests))

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        sampling = {**NEUTRAL, **request["sampling"]}
        parts = [*map(_part, request["media"]), {"type": "text", "text": request["words"]}]
        reply = self._post(parts, request["setting"], sampling, request["adds_special"])
        choice = reply["choices"][0]
        details = reply["usage"].get("prompt_tokens_details") or {}
        return {
            "ids": choice["token_ids"],
            "prompt": len(reply["prompt_token_ids"]),
            "cached": details.get("cached_tokens") or 0,
            "ended": choice["finish_reason"] == "stop",
        }

    def _post(
        self,
        parts: Sequence[Any],
        setting: Mapping[str, Any],
        sampling: Mapping[str, Any],
        adds_special: bool = True,
    ) -> dict[str, Any]:
        body = {
            "model": self._name,
            "messages": [{"role": "user", "content": parts}],
            "chat_template": VERBATIM,
            "add_generation_prompt": False,
            "add_special_tokens": adds_special,
            "mm_processor_kwargs": {KEY: setting},
            "return_token_ids": True,
            **sampling,
        }
        try:
            reply = self._http.post(f"{self._url}/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            raise EngineEnded(
                f"the server at {self._place} ended ({type(error).__name__}: {brief(str(error))})"
            ) from error
        if reply.status_code >= 500:
            raise EngineEnded(
                f"the server at {self._place} ended (HTTP {reply.status_code}: {_message(reply)})"
            )
        if reply.status_code != 200:
            raise UserError(f"{self._place}: {_message(reply)}")
        with foreign(f"{self._place} sends no answer", "a server of vLLM"):
            result: dict[str, Any] = reply.json()
        return result

    def _served_name(self, model: ModelSpec) -> str:
        """Return the server's name of the run's model."""
        # A checkpoint on disk goes before the hub; the server may name it by a link.
        place = model.hub if model.path is None else str(model.path.resolve())
        remedy = "the address of `vllm serve`, without /v1"
        with foreign(f"{self._place} lists no models", remedy, (httpx.HTTPError,)):
            reply = httpx.get(f"{self._url}/v1/models", timeout=CONNECT)
            entries = reply.raise_for_status().json()["data"]
            for entry in entries:
                names = {entry["id"], entry["root"], str(Path(entry["root"]).resolve())}
                if place in names:
                    return str(entry["id"])
            roots = ", ".join(str(entry["root"]) for entry in entries)
        raise UserError(
            f"{self._place} serves {roots}; valid for model={model.name!r}: a server of {place}, or with "
            "that as its --served-model-name"
        )

    def _check_plugin(self) -> None:
        """Check that the server reads settings: it must refuse one."""
        content = io.BytesIO()
        Image.new("RGB", (64, 64)).save(content, "PNG")
        data = base64.b64encode(content.getvalue()).decode("ascii")
        picture = _part({"kind": "image", "data": data})
        try:
            self._post(
                [picture, {"type": "text", "text": ""}], {"method": NOBODY}, {"max_tokens": 1}
            )
        except UserError as error:
            if f"{KEY}.method={NOBODY!r}" in str(error):
                return
            reason = str(error).partition(": ")[2]
            raise UserError(
                f"{self._place} takes no setting ({reason}); valid: a server with the plug-in, started "
                f"with {OPTIONS} (docs/serve.md)"
            ) from error
        raise UserError(
            f"{self._place} has no plug-in of this package; valid: a server that has it, started with "
            f"--hf-overrides '{{\"{KEY}\": {{}}}}' (docs/serve.md)"
        )


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["kind"] != "image":
        raise UserError("backend.url sends pictures; valid for videos: backend.python")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{part['data']}"}}


def _message(reply: httpx.Response) -> str:
    """Return the message of a refusal in one line."""
    try:
        error = reply.json()["error"]
        message = error["message"] if isinstance(error, Mapping) else error
    except FOREIGN:
        message = reply.text
    return brief(" ".join(str(message).split()))
