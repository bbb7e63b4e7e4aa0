"""An engine under load, driven line by line as in `espalier.serve.child`: the asynchronous engine of vLLM's server.

A line with `load` sends requests, each with a picture or video of its own, and is answered by their times: a fixed
number in flight (closed loop), or arrivals of a Poisson process (open loop). Pixels are ready before the clock starts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

from espalier.serve.child import main, one_line, versions

#: Squares of one colour along a picture's edge.
SQUARES = 24


#: vLLM's gauge of the cache's blocks in use, a share.
USE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class Load:
    """Requests of one kind.

    Attributes:
        prompt: token ids with one placeholder.
        edge: pixels along an edge.
        first: number of the first picture; its pixels follow from it.
        requests: how many.
        tokens: of each answer.
        in_flight: requests at a time; None: they arrive by themselves.
        rate: arrivals a second.
        video: times of a video's frames, as vLLM's processors read them; None: pictures.
    """

    prompt: Sequence[int]
    edge: int
    first: int
    requests: int
    tokens: int
    in_flight: int | None = None
    rate: float | None = None
    video: Mapping[str, Any] | None = None

    def media(self) -> Iterator[dict[str, Any]]:
        """Yield a picture or video for each request, by its kind; no two are alike."""
        frames = 1 if self.video is None else len(self.video["frames_indices"])
        for number in range(self.first, self.first + self.requests):
            chance = np.random.default_rng(number)
            pictures = [self._picture(chance) for _ in range(frames)]
            if self.video is None:
                yield {"image": pictures[0]}
            else:
                yield {"video": [(np.stack([*map(np.asarray, pictures)]), self.video)]}

    def _picture(self, chance: np.random.Generator) -> Image.Image:
        pixels = chance.integers(0, 256, (SQUARES, SQUARES, 3), np.uint8)
        return Image.fromarray(pixels).resize((self.edge, self.edge), Image.Resampling.NEAREST)

    def arrivals(self) -> list[float]:
        """Return the seconds from the start at which requests of an open loop arrive, the same for equal loads."""
        assert self.rate is not None
        chance = np.random.default_rng((self.first, self.requests))
        times: list[float] = np.cumsum(chance.exponential(1 / self.rate, self.requests)).tolist()
        return times


class LoadEngine:
    """One model under vLLM's asynchronous engine.

    Args:
        arguments: of `vllm.AsyncEngineArgs`.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._shares: list[float] = []
        self._engine = self._loop.run_until_complete(self._open(arguments))
        self.versions: Mapping[str, str] = versions()
        self._sent = 0

    async def _open(self, arguments: Mapping[str, Any]) -> Any:
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        options = AsyncEngineArgs(
            **arguments, worker_extension_cls="espalier.serve.clock.WorkerClock"
        )
        return AsyncLLMEngine.from_engine_args(options)

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
        self._loop.close()

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the times of a load."""
        from vllm.exceptions import VLLMClientError

        try:
            return self._loop.run_until_complete(self._measured(Load(**message["load"])))
        except (ValueError, VLLMClientError, type(self._engine.dead_error)) as error:
            return {"error": one_line(error)}

    async def _measured(self, load: Load) -> dict[str, Any]:
        media = [*load.media()]
        await self._seconds()
        self._shares.clear()
        start = perf_counter()
        if load.rate is None:
            entries = await self._closed(load, media)
        else:
            entries = await self._open_loop(load, media, start)
        seconds = perf_counter() - start
        blocks = self._engine.vllm_config.cache_config.num_gpu_blocks
        shares = self._shares or [0.0]
        encoder, selection = await self._seconds()
        return {
            "requests": entries,
            "seconds": seconds,
            "blocks": {"mean": blocks * float(np.mean(shares)), "peak": blocks * max(shares)},
            "encoder": encoder,
            "selection": selection,
        }

    async def _closed(self, load: Load, media: Sequence[Any]) -> list[dict[str, Any]]:
        waiting, entries = iter(media), []

        async def client() -> None:
            for item in waiting:
                entries.append(await self._request(load, item, perf_counter()))

        assert load.in_flight is not None
        await asyncio.gather(*(client() for _ in range(load.in_flight)))
        return entries

    async def _open_loop(
        self, load: Load, media: Sequence[Any], start: float
    ) -> list[dict[str, Any]]:
        async def arriving(delay: float, item: Any) -> dict[str, Any]:
            due = start + delay
            await asyncio.sleep(due - perf_counter())
            # A client that is late because the frontend is busy has waited since it was due.
            return await self._request(load, item, due)

        pairs = zip(load.arrivals(), media, strict=True)
        return [*await asyncio.gather(*(arriving(*pair) for pair in pairs))]

    async def _request(self, load: Load, item: Mapping[str, Any], start: float) -> dict[str, Any]:
        """Return the seconds to the first token and to the end, the gaps between tokens, and the prompt's length."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=load.tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(load.prompt), "multi_modal_data": item}
        self._sent += 1
        times: list[float] = []
        length = 0
        async for output in self._engine.generate(prompt, sampling, str(self._sent)):
            times += [perf_counter() - start] * len(output.outputs[0].token_ids)
            length = len(output.prompt_token_ids)
            self._shares += cache_use()
        gaps = (np.diff(times)).tolist()
        return {"first": times[0], "end": times[-1], "gaps": gaps, "prompt": length}

    async def _seconds(self) -> tuple[float, float | None]:
        """Return the seconds of encoders and of the plug-in since the last call, of the slowest worker."""
        workers = await self._engine.collective_rpc("encoder_seconds")
        encoders, selections = zip(*workers, strict=True)
        return max(encoders), None if None in selections else max(selections)


def cache_use() -> list[float]:
    """Return the share of the blocks in use when the scheduler last ran, of each engine in this process."""
    from prometheus_client import REGISTRY

    gauges = REGISTRY.restricted_registry([USE]).collect()
    return [sample.value for gauge in gauges for sample in gauge.samples]


if __name__ == "__main__":
    sys.exit(main(LoadEngine))
