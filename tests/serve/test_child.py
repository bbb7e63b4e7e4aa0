"""The lines of an engine's process, and its clocks, without vLLM."""

from __future__ import annotations

import base64
import io
import json
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.runs.served.engine_process import EngineProcess
from espalier.serve import adapter, child, clock
from espalier.serve.load import USE, cache_use
from espalier.serve.setting import SettingError
from tests.serve.stubs import put_module


class Echo:
    """An engine that answers with the line, or with the error of its arguments."""

    versions: ClassVar = {"vllm": "0"}

    def __init__(self, arguments: dict[str, Any]) -> None:
        if "wrong" in arguments:
            raise ValueError(arguments["wrong"])
        self.closed = False

    def reply(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"answers": message["requests"]}

    def close(self) -> None:
        self.closed = True


def test_a_process_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"requests": []}, {"engine": {"wrong": "a\nb"}}, {"requests": []}]
    lines += [{"engine": {}}, {"requests": [1]}, {"engine": {}}]
    replies = io.StringIO()
    monkeypatch.setattr(child, "_own_output", lambda: replies)
    monkeypatch.setattr(sys, "stdin", map(json.dumps, lines))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert child.main(Echo) == 0
    none, ready = {"error": "no engine is loaded"}, {"ready": {"vllm": "0"}}
    assert [*map(json.loads, replies.getvalue().splitlines())] == [
        *(none, {"error": "a b"}, none),
        *(ready, {"answers": [1]}, ready),
    ]


#: An engine of which a part has failed: the part writes its error into the log.
FAILING = """
import json, sys
for line in sys.stdin:
    print("ValueError: no memory", "the core has ended", sep="\\n", file=sys.stderr, flush=True)
    print(json.dumps({"error": json.loads(line)["engine"]["error"]}), flush=True)
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("The core failed. See root cause above. Failed: 1", "backend=vllm: ValueError: no memory"),
        ("no such model", "backend=vllm: no such model"),
    ],
)
def test_an_engine_that_fails_in_another_process_states_its_cause(
    error: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    failing = closing(EngineProcess(Path(sys.executable), tmp_path, "failing"))
    with failing as engine, pytest.raises(UserError) as refusal:
        engine.load({"error": error})
    assert str(refusal.value) == line


def test_the_plug_ins_own_error_is_the_line() -> None:
    error = RuntimeError("the engine did not start")
    error.__cause__ = ValueError("in between")
    error.__cause__.__context__ = SettingError("espalier.keep=0\nis no count")
    assert child.one_line(error) == "espalier.keep=0 is no count"
    assert child.one_line(RuntimeError("a\n b")) == "a b"
    checked = ValueError("a long text")
    checked.errors = lambda: [{"ctx": {"error": SettingError("inside")}}]  # type: ignore[attr-defined]
    assert child.one_line(checked) == "inside"


def test_a_request_becomes_a_prompt_of_vllm() -> None:
    def encoded(content: io.BytesIO) -> str:
        return base64.b64encode(content.getvalue()).decode()

    picture, frames = io.BytesIO(), io.BytesIO()
    Image.new("L", (2, 3), 7).save(picture, "PNG")
    np.save(frames, np.ones((2, 4, 4, 3), np.uint8))
    media = [{"kind": "image", "data": encoded(picture)}]
    prompt = child.prompt_of({"prompt": [1], "media": media, "setting": {"keep": 2}})
    assert prompt["mm_processor_kwargs"] == {"espalier": {"keep": 2}}
    (image,) = prompt["multi_modal_data"]["image"]
    assert (image.mode, image.size) == ("RGB", (2, 3))
    media = [{"kind": "video", "data": encoded(frames), "metadata": {"fps": 2.0}}]
    media.append({"kind": "video", "data": encoded(frames)})
    prompt = child.prompt_of({"prompt": [1], "media": media})
    assert prompt["mm_processor_kwargs"] == {}
    (timed, metadata), untimed = prompt["multi_modal_data"]["video"]
    assert (timed.shape, metadata) == (untimed.shape, {"fps": 2.0})
    assert child.prompt_of({"prompt": [1], "media": []}) == {"prompt_token_ids": [1]}


def test_an_answer_holds_what_the_harness_reads() -> None:
    completion = SimpleNamespace(token_ids=(4, 5), finish_reason="stop")
    output = SimpleNamespace(outputs=[completion], prompt_token_ids=[1] * 6, num_cached_tokens=None)
    assert child._answer(output) == {"ids": [4, 5], "prompt": 6, "cached": 0, "ended": True}
    completion.finish_reason, output.num_cached_tokens = "length", 3
    assert child._answer(output)["cached"] == 3
    assert not child._answer(output)["ended"]


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "version", {"vllm": "0.32.0"}.__getitem__)
    monkeypatch.setattr(child, "version", lambda name: f"{name}-1")
    assert child.versions() == {
        "vllm": "0.32.0",
        "torch": "torch-1",
        "transformers": "transformers-1",
    }


def test_a_clock_adds_up_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 4.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    batches: list[float] = []
    watch = clock.Stopwatch(batches.append)
    with watch.running():
        pass
    with pytest.raises(KeyError), watch.running():
        raise KeyError
    assert batches == []
    watch.end_batch()
    with watch.running():
        pass
    assert [watch.take(), watch.take()] == [4.5, 0.0]
    assert batches == [3.5, 1.0]


def test_a_model_times_its_encoder_and_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """From second 1 to 4, of it from 2 to 3; vLLM's own class has no plug-in to time."""
    times = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))

    class Model:
        def __init__(self, *, vllm_config: str, prefix: str) -> None:
            assert (vllm_config, prefix) == ("config", "")

        def embed_multimodal(self, pictures: int) -> int:
            with self.stopwatch.running():
                return pictures

    class Timed(clock.TimedModel, Model):
        pass

    model = Timed(vllm_config="config")
    model.stopwatch = clock.Stopwatch()
    worker = clock.WorkerClock()
    worker.get_model = lambda: model
    assert model.embed_multimodal(pictures=2) == 2
    assert worker.encoder_seconds() == (3.0, 1.0)
    del model.stopwatch
    assert worker.encoder_seconds() == (0.0, None)


class Event:
    """An event of a card that is at `now`."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1000.0
        self.time = Event.now

    def query(self) -> bool:
        return Event.now > self.time

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


def test_on_a_card_a_clock_reads_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(is_available=lambda: True, Event=Event)  # nothing to wait by
    monkeypatch.setattr(clock, "torch", SimpleNamespace(cuda=card))
    batches: list[float] = []
    watch = clock.Stopwatch(batches.append)
    seen = []
    for _ in range(2):
        with watch.running():
            pass
        watch.end_batch()
        seen.append(len(batches))
    assert (seen, batches) == ([0, 1], [1.0])


def test_the_use_of_the_cache_is_vllms_own_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    def restricted_registry(names: list[str]) -> SimpleNamespace:
        assert names == [USE]
        samples = [SimpleNamespace(value=share) for share in (0.25, 0.5)]
        return SimpleNamespace(collect=lambda: [SimpleNamespace(samples=samples)])

    registry = SimpleNamespace(restricted_registry=restricted_registry)
    put_module(monkeypatch, "prometheus_client", REGISTRY=registry)
    assert cache_use() == [0.25, 0.5]
