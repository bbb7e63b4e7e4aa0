"""The engine under load that notes when requests are sent; and the same loops over HTTP beside vLLM's own client.

It runs in vLLM's environment. Without arguments it is the child process of `lab.bench.serve_bench`; with the address of
a running server and its model, both clients send the same requests in turns, first in a closed loop, then at the times
of a Poisson process, and the medians of both are printed. A server without caches does the same work for both:

    vllm serve MODEL --no-enable-prefix-caching --mm-processor-cache-gb 0
    PYTHONPATH=. python -m lab.bench.load_clients http://localhost:8000 MODEL
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from espalier.serve.child import main
from espalier.serve.load import Load, LoadEngine

#: Requests of the comparison: words, pixels along an edge of the picture, and tokens of an answer.
QUESTION, EDGE, TOKENS = "what is shown in this picture", 384, 16

#: Arrivals of the comparison as a share of the closed loop's requests a second.
SHARE = 0.7


class TimedEngine(LoadEngine):
    """An engine with entries that have `sent`, the clock at which each was sent or due, and the use of the machine."""

    async def _request(self, load: Load, item: Mapping[str, Any], start: float) -> dict[str, Any]:
        return {**await super()._request(load, item, start), "sent": start}

    async def _measured(self, load: Load) -> dict[str, Any]:
        before, start = other_seconds(), perf_counter()
        reply = await super()._measured(load)
        busy = (other_seconds() - before) / (perf_counter() - start)
        return {**reply, "others": busy, "load_average": os.getloadavg()[0]}


def other_seconds() -> float:
    """Return the processor seconds of all programs but this one and its children."""
    import psutil

    times, process = psutil.cpu_times(), psutil.Process()
    family = [process, *process.children(recursive=True)]
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


async def ours(
    url: str, model: str, load: Load
) -> tuple[list[dict[str, Any]], Mapping[str, float]]:
    """Return the entries of this package's loops."""
    import aiohttp

    engine, media = TimedEngine.__new__(TimedEngine), pictures(load)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        engine._engine, engine._sent, engine._shares = HttpEngine(url, model, session), 0, []
        if load.rate is None:
            return await engine._closed(load, media), {}
        return await engine._open_loop(load, media, perf_counter()), {}


async def theirs(
    url: str, model: str, load: Load
) -> tuple[list[dict[str, Any]], Mapping[str, float]]:
    """Return the entries of vLLM's client, and the figures that it states itself."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.tokenizers import get_tokenizer

    times: Sequence[float | None] = [None] * load.requests if load.rate is None else load.arrivals()
    result = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai-chat",
        api_url=f"{url}/v1/chat/completions",
        base_url=url,
        model_id=model,
        model_name=model,
        tokenizer=get_tokenizer(model),
        input_requests=[
            SampleRequest(QUESTION, 0, load.tokens, chat_messages=[message(part)], timestamp=time)
            for part, time in zip(pictures(load), times, strict=True)
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
        self_timed=load.rate is not None,
    )
    columns = (result[name] for name in ("start_times", "ttfts", "itls"))
    entries = [
        {"sent": sent, "first": first, "end": first + sum(gaps)}
        for sent, first, gaps in zip(*columns, strict=True)
    ]
    return entries, {
        "whole load, requests/s": result["request_throughput"],
        "whole load, first token, ms": result["median_ttft_ms"],
    }


#: Both clients; the first one's figures are divided by the second one's.
CLIENTS = {"lab.bench.serve_bench": ours, "vLLM": theirs}


def figures(entries: Sequence[Mapping[str, Any]], in_flight: int | None) -> dict[str, float]:
    """Return requests a second and first tokens, over the whole load and between ramp-up and drain."""
    kept, begin, last = steady(entries, in_flight)
    start = min(entry["sent"] for entry in entries)
    end = max(entry["sent"] + entry["end"] for entry in entries)
    return {
        "whole load, requests/s": len(entries) / (end - start),
        "whole load, first token, ms": 1e3 * median(entry["first"] for entry in entries),
        "steady, requests/s": len(kept) / (last - begin),
        "steady, first token, ms": 1e3 * median(entry["first"] for entry in kept),
    }


async def compare(url: str, model: str, load: Load, turns: int) -> float:
    """Print the figures of both clients in turns and a table of their medians; return the requests a second."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    for turn in range(turns):
        for name in [*CLIENTS][:: -1 if turn % 2 else 1]:
            entries, stated = await CLIENTS[name](url, model, replace(load, first=turn * 10**6))
            rows[name].append({**figures(entries, load.in_flight), **stated})
            print(json.dumps({"client": name, "rate": load.rate, **rows[name][-1]}), flush=True)
    kind = f"{load.in_flight} in flight" if load.in_flight else f"{load.rate:.2f} a second"
    for figure in rows["vLLM"][0]:
        first, second = (median(row[figure] for row in part) for part in rows.values())
        print(f"| {kind} | {figure} | {first:.2f} | {second:.2f} | {first / second:.3f} |")
    return median(row["steady, requests/s"] for row in rows["vLLM"])


async def compare_all() -> None:
    """Compare the clients in a closed loop and at a rate."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench.load_clients", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model", help="name of the server's model, which is a folder or hub id")
    for name, value in (("in-flight", 16), ("requests", 320), ("turns", 6)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    options = parser.parse_args()
    load = Load([0], EDGE, 0, options.requests, TOKENS, in_flight=options.in_flight)
    await ours(options.url, options.model, load)  # warm-up
    capacity = await compare(options.url, options.model, load, options.turns)
    arrivals = replace(load, in_flight=None, rate=SHARE * capacity)
    await compare(options.url, options.model, arrivals, options.turns)


if __name__ == "__main__":
    sys.exit(asyncio.run(compare_all()) if sys.argv[1:] else main(TimedEngine))
