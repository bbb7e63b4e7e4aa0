"""An engine of vLLM that another program drives: one JSON object a line, in on standard input, out on standard output.

A line with `engine`, the arguments of `vllm.LLM`, loads a model in the place of the one before; the reply states
versions. A line with `requests` is answered by one line with `answers` in their order; all of them run together. What
cannot be done is answered by `error`, one line of text. `espalier.serve.load` takes other lines in the same way.
"""

from __future__ import annotations

import base64
import gc
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol, TextIO

import numpy as np

from espalier.serve.setting import KEY


class Served(Protocol):
    """A loaded model, which answers lines."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of vLLM and the packages beside it."""

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line that answers a line."""

    def close(self) -> None:
        """Free the model."""


def main(open_engine: Callable[[Mapping[str, Any]], Served] | None = None) -> int:
    """Serve until standard input ends, by default with `VllmEngine`."""
    replies = _own_output()
    engine: Served | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if "engine" in message:
            if engine is not None:
                engine.close()
            engine, reply = start(open_engine or VllmEngine, message["engine"])
        elif engine is None:
            reply = {"error": "no engine is loaded"}
        else:
            reply = engine.reply(message)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


def start(
    open_engine: Callable[[Mapping[str, Any]], Served], arguments: Mapping[str, Any]
) -> tuple[Served | None, dict[str, Any]]:
    """Return an engine and the reply about it; None if it does not start."""
    if arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1) == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        engine = open_engine(arguments)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return None, {"error": one_line(error)}
    return engine, {"ready": engine.versions}


class VllmEngine:
    """One model under vLLM.

    Args:
        arguments: of `vllm.LLM`.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import LLM

        self._engine = LLM(**arguments)
        self.versions: Mapping[str, str] = versions()

    def close(self) -> None:
        """Free the model."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self._engine
        gc.collect()
        cleanup_dist_env_and_memory()

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answers of some requests, or the line that refuses one of them."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        requests: Sequence[Mapping[str, Any]] = message["requests"]
        try:
            sampling = [SamplingParams(**request["sampling"]) for request in requests]
            outputs = self._engine.generate(
                [prompt_of(request) for request in requests], sampling, use_tqdm=False
            )
        except (ValueError, VLLMClientError) as error:
            return {"error": one_line(error)}
        return {"answers": [_answer(output) for output in outputs]}


def versions() -> dict[str, str]:
    """Return the versions of vLLM and the packages beside it."""
    from espalier.serve.adapter import vllm_version

    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"vllm": vllm_version(), **packages}


def prompt_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request in vLLM's form: token ids with a placeholder for each item, media, setting."""
    media: dict[str, list[Any]] = {}
    for part in request["media"]:
        media.setdefault(part["kind"], []).append(_medium(part))
    prompt: dict[str, Any] = {"prompt_token_ids": request["prompt"]}
    if media:
        prompt["multi_modal_data"] = media
        prompt["mm_processor_kwargs"] = {KEY: request["setting"]} if "setting" in request else {}
    return prompt


def _medium(part: Mapping[str, Any]) -> Any:
    """Return a picture, or the frames of a video with its times."""
    content = io.BytesIO(base64.b64decode(part["data"]))
    if part["kind"] == "image":
        from PIL import Image

        return Image.open(content).convert("RGB")
    frames = np.load(content, allow_pickle=False)
    return (frames, part["metadata"]) if "metadata" in part else frames


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "ids": list(completion.token_ids),
        "prompt": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens or 0,
        "ended": completion.finish_reason == "stop",
    }


def one_line(error: BaseException) -> str:
    """Return the message of an error, or of the plug-in's error that caused it, in one line."""
    if hasattr(error, "errors"):
        # A check of vLLM's configurations holds the error that it caught.
        error = error.errors()[0].get("ctx", {}).get("error", error)
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != "SettingError":
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(cause or error).split())


def _own_output() -> TextIO:
    """Return a stream to standard output; what others print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


if __name__ == "__main__":
    sys.exit(main())
