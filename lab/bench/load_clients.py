"""The engine under load that notes when requests are sent, and the same loops over HTTP beside vLLM's own client.

    PYTHONPATH=. /envs/vllm/bin/python -m lab.bench.load_clients compare harness/seedling/weights/seedling

It runs in vLLM's environment. Without `compare` it is the child process of `lab.bench.serve_bench`. With it, both
clients send the same requests to one server in turns: a closed loop, then a Poisson process of the same rate.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from espalier.serve.child import main
from espalier.serve.load import Load, LoadEngine

QUESTION = "what is shown in this picture"

#: Caches would answer the second client's requests, which are those of the first.
UNCACHED = ("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0")


class TimedEngine(LoadEngine):
    """An engine with entries that have `sent`, the clock at which each was sent or due, and the use of the machine."""

    async def _request(self, load: Load, item: Mapping[str, Any], start: float) -> dict[str, Any]:
        return {**await super()._request(load, item, start), "sent": start}

    async def _measured(self, load: Load) -> dict[str, Any]:
        before, start = beside(), perf_counter()
        reply = await super()._measured(load)
        others = (beside() - before) / (perf_counter() - start)
        return {**reply, "others": others, "load_average": os.getloadavg()[0]}


def beside() -> float:
    """Return the processor seconds of all programs but this one and its children."""
    import psutil

    times, here = psutil.cpu_times(), psutil.Process()
    family = [here, *here.children(recursive=True)]
    ours = sum(sum(member.cpu_times()[:2]) for member in family)
    return float(times.user + times.nice + times.system - ours)


def steady(
    requests: Sequence[Mapping[str, Any]], in_flight: int | None
) -> tuple[list[Mapping[str, Any]], float, float]:
    """Return the answers between ramp-up and drain, and the clock at both ends.

    Ramp-up ends with the first `in_flight` answers (None, an open loop: with the first request), and drain begins when
    the last request is sent.
    """
    ends = sorted(entry["sent"] + entry["end"] for entry in requests)
    last = max(entry["sent"] for entry in requests)
    begin = ends[in_flight - 1] if in_flight else min(entry["sent"] for entry in requests)
    kept = [entry for entry in requests if begin < entry["sent"] + entry["end"] <= last]
    return kept, begin, last


class HttpEngine:
    """What `LoadEngine` sends requests to, over HTTP.

    Args:
        url: of a server of vLLM.
        model: its name there.
        session: of aiohttp.
    """

    def __init__(self, url: str, model: str, session: Any) -> None:
        self._url, self._model, self._session = url, model, session

    async def generate(
        self, prompt: Mapping[str, Any], sampling: Any, number: str
    ) -> AsyncIterator[Any]:
        """Yield a token for each piece of the answer, then the prompt's length."""
        del number
        body = {
            **{"model": self._model, "messages": [message(prompt["multi_modal_data"])]},
            **{"max_completion_tokens": sampling.max_tokens, "ignore_eos": True, "temperature": 0},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    piece = json.loads(line[6:])
                    # The first piece has a role and no token.
                    tokens = ["role" not in choice["delta"] for choice in piece["choices"]]
                    yield SimpleNamespace(
                        outputs=[SimpleNamespace(token_ids=[1] * sum(tokens))],
                        prompt_token_ids=range((piece.get("usage") or {}).get("prompt_tokens", 0)),
                    )


def message(picture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's turn with a picture."""
    return {"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}


def pictures(load: Load) -> list[dict[str, Any]]:
    """Return a load's pictures as parts of a chat."""
    parts = []
    for item in load.media():
        content = io.BytesIO()
        item["image"].save(content, "PNG")
        data = base64.b64encode(content.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return parts


async def ours(url: str, model: str, load: Load) -> list[dict[str, Any]]:
    """Return the entries of this package's loops."""
    import aiohttp

    engine, media = TimedEngine.__new__(TimedEngine), pictures(load)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        engine._engine, engine._sent = HttpEngine(url, model, session), 0
        if load.rate is None:
            return await engine._closed(load, media)
        return await engine._open_loop(load, media, perf_counter())


async def theirs(url: str, model: str, load: Load) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the entries of vLLM's client, and the figures that it prints."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.tokenizers import get_tokenizer

    result = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai-chat",
        api_url=f"{url}/v1/chat/completions",
        base_url=url,
        model_id=model,
        model_name=model,
        tokenizer=get_tokenizer(model),
        input_requests=[
            SampleRequest(QUESTION, 0, load.tokens, chat_messages=[message(part)])
            for part in pictures(load)
        ],
        logprobs=None,
        request_rate=load.rate or float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=["ttft"],
        selected_percentiles=[99.0],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=load.in_flight,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0},
        ready_check_timeout_sec=0,
    )
    entries = [
        {"sent": sent, "first": first, "end": first + sum(gaps)}
        for sent, first, gaps in zip(
            result["start_times"], result["ttfts"], result["itls"], strict=True
        )
    ]
    return entries, result


def figures(entries: Sequence[Mapping[str, Any]], in_flight: int | None) -> dict[str, float]:
    """Return requests a second and first tokens, over the whole load and between ramp-up and drain."""
    kept, begin, last = steady(entries, in_flight)
    start = min(entry["sent"] for entry in entries)
    end = max(entry["sent"] + entry["end"] for entry in entries)
    timed = kept if in_flight else entries
    return {
        "whole, requests/s": len(entries) / (end - start),
        "whole, first token, ms": 1e3 * median(entry["first"] for entry in entries),
        "steady, requests/s": len(kept) / (last - begin),
        "steady, first token, ms": 1e3 * median(entry["first"] for entry in timed),
    }


async def compare(url: str, options: argparse.Namespace) -> None:
    """Print a line for each turn, then the medians of both clients and their ratio."""
    model = options.model
    closed = Load(
        [0], options.edge, 0, options.requests, options.tokens, in_flight=options.in_flight
    )
    await ours(url, model, replace(closed, requests=4 * options.in_flight))  # warm-up
    loads = [closed]
    while loads:
        load, turns = loads.pop(), []
        for turn in range(options.turns):
            here = replace(load, first=turn * 10**6)
            for client in ("ours", "vllm")[:: -1 if turn % 2 else 1]:
                if client == "ours":
                    row = figures(await ours(url, model, here), load.in_flight)
                else:
                    entries, result = await theirs(url, model, here)
                    row = figures(entries, load.in_flight)
                    row["whole, requests/s"] = result["request_throughput"]
                    row["whole, first token, ms"] = result["median_ttft_ms"]
                turns.append({"client": client, **row})
                print(json.dumps({"in_flight": load.in_flight, "rate": load.rate, **turns[-1]}))
        name = f"{load.in_flight} in flight" if load.in_flight else f"{load.rate:.2f} a second"
        for figure in list(turns[0])[1:]:
            both = [
                median(row[figure] for row in turns if row["client"] == client)
                for client in ("ours", "vllm")
            ]
            print(
                f"| {name} | {figure} | {both[0]:.2f} | {both[1]:.2f} | {both[0] / both[1]:.3f} |"
            )
        if load.in_flight:
            capacity = median(row["steady, requests/s"] for row in turns)
            loads.append(replace(load, in_flight=None, rate=round(options.share * capacity, 2)))


def serve(options: argparse.Namespace) -> int:
    """Start a server, compare the clients, and end it."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    command += ["--dtype", "float32", "--enforce-eager", "--port", str(options.port), *UNCACHED]
    url = f"http://127.0.0.1:{options.port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not ready(url):
                if server.poll() is not None:
                    return server.returncode
                sleep(1)
            asyncio.run(compare(url, options))
        finally:
            server.terminate()
    return 0


def ready(url: str) -> bool:
    """Return whether a server answers."""
    try:
        with urlopen(f"{url}/health"):
            return True
    except (URLError, ConnectionError):
        return False


def arguments() -> argparse.Namespace:
    """Return the options of `compare`."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench.load_clients", description=__doc__)
    parser.add_argument("action", choices=["compare"])
    parser.add_argument("model", help="folder")
    for name, value in {
        **{"port": 8123, "edge": 384, "tokens": 16, "in-flight": 16, "requests": 320, "turns": 6},
        "share": 0.7,
    }.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(serve(arguments()) if sys.argv[1:] else main(TimedEngine))
